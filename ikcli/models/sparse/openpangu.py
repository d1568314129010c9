"""openPangu 2.0 Flash: latent attention with learned rows before all positions, and a residual of several streams.

A layer reads a weighted sum of the streams and adds shares of its result to them, mixed (`graph/ops_streams.py`).
Attention is absorbed latent attention, whose cache rows are [rotated | latent]. Every query attends to learned rows
(`sink_rows.py`) and to the positions of a window, or to those that an indexer chooses. Low-rank queries, latents and
what attention returns gain a causal convolution of themselves. Corresponds to `build_openpangu` of ik_llama.cpp.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ikcli.graph import Cache, Graph, HeadSlice, Node, Per, Weight, power_of_two_parts
from ikcli.graph.ops_pooled import PooledCells
from ikcli.graph.ops_sparse import PrefixAttn
from ikcli.graph.ops_streams import StreamMix, StreamSum, StreamWeights
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.deepseek2 import attention_specs
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.sparse import indexer, sink_rows
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file; `mla.derive` decides which of kv_b, k_b, v_b must be there."""
    return expected.with_blocks(hp, block_shapes) | _stream_specs(hp, "merge_mhc", hp.n_stream, 1)


def _stream_specs(hp: HParams, prefix: str, cols: int, n_factors: int) -> TensorSpecs:
    width = hp.n_stream * hp.n_embd
    return {
        f"{prefix}_phi.weight": TensorSpec((width, cols)),
        f"{prefix}_alpha": TensorSpec((n_factors,)),
        f"{prefix}_beta": TensorSpec((cols,)),
        f"{prefix}_gamma": TensorSpec((width,)),
    }


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    cols = hp.n_stream * (hp.n_stream + 2)
    specs = attention_specs(hp) | indexer.specs(hp, il) | sink_rows.specs(hp)
    for name in ("attn_k_b.weight", "attn_v_b.weight"):  # matrices in files of ik_llama.cpp
        specs[name] = replace(specs[name], shape=specs[name].also[0], also=(specs[name].shape,))
    specs |= {
        f"attn_{site}_conv.weight": TensorSpec((3, n), also=((3, 1, n),))
        for site, n in (("qa", hp.q_lora_rank), ("compresskv", hp.kv_lora_rank), ("o", hp.n_head * hp.head_dim_v))
    }
    for part in ("attn", "mlp"):
        specs |= _stream_specs(hp, f"{part}_mhc", cols, 3)
    specs["block_post_norm.weight"] = TensorSpec((hp.n_stream * hp.n_embd,), required=False)
    return expected.in_block(il, specs) | expected.post_norm_specs(hp, il) | expected.feed_forward_specs(hp, il)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attention = _Attention(g, hp, w, cfg)
    x = g.concat([blocks.embedded(g, hp, w)] * hp.n_stream, "inp_streams")
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        before, weights = _before(g, hp, x, layer, "attn")
        cur = attention.record(blocks.normed(g, hp, before, layer, "attn_norm"), layer)
        cur = blocks.normed(g, hp, cur, layer, "post_attention_norm", "attn_post_norm")
        x = g.record(StreamMix(x, cur, weights, hp.n_stream), "ffn_inp")
        if il == hp.n_layer - 1:
            x = g.select_outputs(x, "last_ffn_inp")
        before, weights = _before(g, hp, x, layer, "mlp")
        cur = feed_forward(g, hp, cfg, blocks.normed(g, hp, before, layer, "ffn_norm"), layer)
        cur = blocks.normed(g, hp, cur, layer, "post_ffw_norm", "ffn_post_norm")
        x = g.record(StreamMix(x, cur, weights, hp.n_stream), "ffn_streams")
        x = g.layer_out(blocks.normed(g, hp, x, layer, "block_post_norm", "l_out"))
    g.il = -1
    phi, alpha, beta, gamma = (w[f"merge_mhc_{part}"] for part in ("phi.weight", "alpha", "beta", "gamma"))
    return blocks.output(g, hp, w, _collapsed(g, hp, x, (phi, alpha, beta, gamma), "merge_mhc")[0])


def _before(g: Graph, hp: HParams, x: Node, layer: LayerWeights, which: str) -> tuple[Node, Node]:
    """Return what a part of a layer reads of the streams, and their weights."""
    name = f"{which}_mhc"
    phi, alpha, beta, gamma = (layer.tensor(f"{name}_{part}") for part in ("phi.weight", "alpha", "beta", "gamma"))
    return _collapsed(g, hp, x, (phi, alpha, beta, gamma), name)


def _collapsed(
    g: Graph, hp: HParams, x: Node, made_with: tuple[Weight, Weight, Weight, Weight], name: str
) -> tuple[Node, Node]:
    """Return the weighted sum of the streams, and their weights."""
    phi, alpha, beta, gamma = made_with
    logits = g.mul_mat(phi, g.rms_norm(x, gamma, hp.eps, f"{name}_norm"), f"{name}_mix")
    made = StreamWeights(logits, alpha, beta, hp.n_stream, hp.stream_iterations, 0.0)
    weights = g.record(made, f"{name}_weights")
    return g.record(StreamSum(x, weights, hp.n_stream), f"{name}_sum"), weights


class _Attention:
    """Records the attention of one layer after the other; layers that see alike share a list of positions."""

    def __init__(self, g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> None:
        table = blocks.rope_tables(g, hp, w, cfg, 0)[0]
        assert table is not None
        self._g, self._hp, self._cfg, self._table = g, hp, cfg, table
        self._top_k = indexer.top_k(hp, cfg)
        self._indexer = indexer.Indexer(g, hp, cfg, table)
        self._lists: dict[int, Node] = {}  # by window

    def record(self, x: Node, layer: LayerWeights) -> Node:
        """Return what a layer with attention input x adds, before its norm."""
        g, hp, d = self._g, self._hp, self._hp.head_dim_k
        q_a = self._with_conv(g.mul_mat(layer.attn_q_a, x, "q_a"), layer, "qa")
        q_a = g.rms_norm(q_a, layer.attn_q_a_norm, hp.eps, "q_a_norm")
        q = g.mul_mat(layer.attn_q_b, q_a, "q")
        q = g.rope(q, self._table, hp.n_head, d, "q_rope", neox=True, offset=d - hp.n_rot)
        cache = self._stored(x, layer)
        chosen = None
        if self._top_k and layer.il in hp.index_owners:
            chosen = self._indexer.choose(x, q_a, layer)
        cells = self._seen(q, cache, layer.il) if chosen is None else chosen
        out = self._with_conv(self._absorbed(q, cache, cells, layer), layer, "o")
        return g.mul_mat(layer.attn_output, out, "kqv_out")

    def _with_conv(self, x: Node, layer: LayerWeights, site: str) -> Node:
        """Return x plus its causal convolution."""
        state = self._g.state(f"conv_{site}", 2 * x.cols)
        conv = self._g.short_conv(state, [x], [layer.tensor(f"attn_{site}_conv.weight")], f"{site}_conv", linear=True)
        return self._g.add(conv, x, f"{site}_mixed")

    def _stored(self, x: Node, layer: LayerWeights) -> Cache:
        """Store the rows [rotated | latent] of tokens, and return their cache."""
        g, hp, cfg, rank = self._g, self._hp, self._cfg, self._hp.kv_lora_rank
        kv_a = g.mul_mat(layer.attn_kv_a_mqa, x, "kv_rope_compressed")
        latent = self._with_conv(blocks.columns(g, kv_a, 0, rank, "kv_latent"), layer, "compresskv")
        latent = g.rms_norm(latent, layer.attn_kv_a_norm, hp.eps, "kv_compressed")
        rotated = g.rope(kv_a, self._table, 1, hp.kv_row, "k_rope", neox=True, offset=rank)
        row = g.concat_heads([HeadSlice(rotated, rank, hp.n_rot, 0), HeadSlice(latent, 0, rank, 0)], 1, "kvr")
        if cfg.k_hadamard:
            row = g.hadamard(row, 1, hp.kv_row, "kvr_hadamard", blocks=sink_rows.hadamard_blocks(hp))
        in_window = hp.at(layer.il).window and cfg.n_window
        cache = g.cache("kv", hp.kv_row, cfg.type_k, per=Per.WINDOW if in_window else Per.CELL)
        g.kv_store(cache, row, "kv_cache_view")
        return cache

    def _seen(self, q: Node, cache: Cache, il: int) -> Node:
        """Return the list of the positions in a layer's window; without one, of all."""
        window = self._hp.at(il).window
        if window not in self._lists:
            # An indexer that only stores keys goes with queries that see no more positions than it may choose.
            most = window or (self._top_k if self._cfg.index_keys_only and self._top_k else self._cfg.n_ctx)
            seen = PooledCells(q, cache, None, min(most, self._cfg.n_ctx), 1, 0)
            self._lists[window] = self._g.record(seen, f"cells_{window}" if window else "cells")
        return self._lists[window]

    def _absorbed(self, q: Node, cache: Cache, cells: Node, layer: LayerWeights) -> Node:
        """Move queries into the latent space, attend there, and return results through v_b."""
        g, hp, rank, d = self._g, self._hp, self._hp.kv_lora_rank, self._hp.head_dim_k
        nope, parts = d - hp.n_rot, power_of_two_parts(rank)
        k_b = replace(layer.attn_k_b, shape=(nope, rank, hp.n_head))
        v_b = replace(layer.attn_v_b, shape=(rank, hp.head_dim_v, hp.n_head))
        q_latent = g.mul_mat_heads(k_b, HeadSlice(q, 0, nope, d), "q_nope2")
        if self._cfg.k_hadamard:
            rotated = power_of_two_parts(hp.n_rot)
            q = g.hadamard(q, hp.n_head, d, "q_rope_hadamard", offset=nope, blocks=rotated)
            q_latent = g.hadamard(q_latent, hp.n_head, rank, "q_nope2_hadamard", blocks=parts)
        attention = PrefixAttn(
            (HeadSlice(q, nope, hp.n_rot, d), HeadSlice(q_latent, 0, rank, rank)), HeadSlice(cache, 0, hp.kv_row, 0),
            HeadSlice(cache, hp.n_rot, rank, 0), layer.tensor(sink_rows.name(self._cfg)), cells, hp.n_head,
            1 / math.sqrt(d),
        )  # fmt: skip
        kqv = g.record(attention, "kqv_compressed")
        if self._cfg.k_hadamard:
            kqv = g.hadamard(kqv, hp.n_head, rank, "kqv_compressed_hadamard", blocks=parts)
        return g.mul_mat_heads(v_b, HeadSlice(kqv, 0, rank, rank), "kqv")
