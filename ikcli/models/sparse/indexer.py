"""Indexers: every query attends only to the `index_top_k` positions it prefers.

DeepSeek V3.2, GLM-5 and Hy 4 choose positions. A layer has its own indexer, or uses the positions that the layer before
it chose. Index queries come from the low-rank query, keys and head weights from the input of attention; heads are
[rotated | not rotated], those of Hy 4 the other way round, and keys have a cache of their own. Corresponds to
`build_deepseek2_dsa_indexer` of ik_llama.cpp. openPangu has one in layers without a window, whose keys have an RMS
norm.

MiniMax-M3 chooses blocks of positions, for every KV head by an index head of its own. Queries and keys are projected
from the input of attention, normed and rotated like those of attention. Corresponds to `MiniMaxM3VLIndexer` of
transformers.
"""

from __future__ import annotations

import math

from ikcli.graph import Graph, HeadSlice, Node
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec

NORM_EPS = 1e-6  # of keys; files do not store it
_EPS = ("hy_v4",)  # there it is that of the other norms
_ROTATES_LAST = ("hy_v4",)  # the last columns of a head
CACHE = "index"
_RMS = ("openpangu",)  # the norm of keys, which is a layer norm elsewhere
_NEOX = ("deepseek32", "openpangu")  # rotate pairs that are half of the rotated part apart


def specs(hp: HParams, il: int) -> dict[str, TensorSpec]:
    """Return the tensors of the indexer of a layer."""
    if il not in hp.index_owners:
        return {}
    n_head, width = hp.index_n_head, hp.index_head_dim
    if hp.index_block:
        return {
            "indexer.q_proj.weight": TensorSpec((hp.n_embd, n_head * width)),
            "indexer.k_proj.weight": TensorSpec((hp.n_embd, width)),
            "indexer.q_norm.weight": TensorSpec((width,)),
            "indexer.k_norm.weight": TensorSpec((width,)),
        }
    query, key, norm, weights = _names(hp)
    found = {
        f"{query}.weight": TensorSpec((hp.q_lora_rank, n_head * width)),
        f"{key}.weight": TensorSpec((hp.n_embd, width)),
        f"{norm}.weight": TensorSpec((width,)),
        f"{weights}.weight": TensorSpec((hp.n_embd, n_head)),
    }
    return found | ({} if hp.arch in _RMS else {f"{norm}.bias": TensorSpec((width,))})


def _names(hp: HParams) -> tuple[str, str, str, str]:
    """Return the names of projections of queries and keys, the norm of keys, and the projection to weights."""
    if hp.arch == "openpangu":
        return "attn_indexer_q_b", "attn_indexer_k", "attn_indexer_k_norm", "attn_indexer_weights_proj"
    return "indexer.attn_q_b", "indexer.attn_k", "indexer.k_norm", "indexer.proj"


def top_k(hp: HParams, cfg: GraphConfig) -> int:
    """Return how many positions a query attends to; 0: all, which is so where the context has no more."""
    n = hp.index_top_k if cfg.index_top_k < 0 else cfg.index_top_k
    if n and hp.index_block:
        n = max(-(-n // hp.index_block), hp.index_local) * hp.index_block
    return n if hp.index_top_k and n < cfg.n_ctx // cfg.n_seq else 0


def chosen_blocks(
    g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, table: Node | None
) -> Node | None:
    """Return the cells of the blocks that a layer with attention input x attends to; None: it attends to all."""
    most = top_k(hp, cfg)
    if not most or layer.il not in hp.index_owners or table is None:
        return None
    n_head, width = hp.index_n_head, hp.index_head_dim

    def projected(which: str, heads: int) -> Node:
        cur = g.mul_mat(layer.tensor(f"indexer.{which}_proj.weight"), x, f"index_{which}")
        norm = layer.tensor(f"indexer.{which}_norm.weight")
        cur = g.norm(cur, norm, hp.eps, f"index_{which}_norm", kind="rms", width=width)
        return g.rope(cur, table, heads, width, f"index_{which}_rope", neox=True)

    cache = g.cache(CACHE, width, cfg.type_index)
    g.kv_store(cache, projected("k", 1), "index_k_view")
    if cfg.index_keys_only:
        return None
    q = HeadSlice(projected("q", n_head), 0, width, width)
    block, local = hp.index_block, hp.index_local
    return g.index_top_blocks(q, cache, "index_top_k", n_head=n_head, top_k=most // block, block=block, local=local)


class Indexer:
    """Chooses positions, layer by layer, while a graph is recorded."""

    def __init__(self, g: Graph, hp: HParams, cfg: GraphConfig, table: Node) -> None:
        self._g, self._hp, self._cfg, self._table = g, hp, cfg, table
        self._chosen: Node | None = None

    def choose(self, x: Node, q_a: Node, layer: LayerWeights) -> Node | None:
        """Return the positions of a layer with attention input x and low-rank query q_a; None: all."""
        if layer.il in self._hp.index_owners:
            self._chosen = self._own(x, q_a, layer)
        return self._chosen

    def _own(self, x: Node, q_a: Node, layer: LayerWeights) -> Node | None:
        g, hp = self._g, self._hp
        n_head, width = hp.index_n_head, hp.index_head_dim
        neox, offset = hp.arch in _NEOX, width - hp.n_rot if hp.arch in _ROTATES_LAST else 0
        query, key, norm, per_head = (layer.tensor(f"{name}.weight") for name in _names(hp))
        k = g.mul_mat(key, x, "index_k")
        if hp.arch in _RMS:
            k = g.rms_norm(k, norm, hp.eps, "index_k_norm")
        else:
            eps = hp.eps if hp.arch in _EPS else NORM_EPS
            k = g.norm(k, norm, eps, "index_k_norm", b=layer.tensor("indexer.k_norm.bias"))
        k = g.rope(k, self._table, 1, width, "index_k_rope", neox=neox, offset=offset)
        cache = g.cache(CACHE, width, self._cfg.type_index)
        g.kv_store(cache, k, "index_k_view")
        if self._cfg.index_keys_only:
            return None
        q = g.mul_mat(query, q_a, "index_q")
        q = g.rope(q, self._table, n_head, width, "index_q_rope", neox=neox, offset=offset)
        weights = g.mul_mat(per_head, x, "index_weights")
        weights = g.scale(weights, 1 / math.sqrt(n_head * width), "index_weights_scaled")
        return g.index_top_k(
            HeadSlice(q, 0, width, width), weights, cache, "index_top_k", n_head=n_head, top_k=top_k(hp, self._cfg)
        )
