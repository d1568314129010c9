"""DFlash: a small transformer that drafts a whole block at once, in ik_llama.cpp's file format (`dflash-draft`).

    state of p = norm(fc [outputs of layers of the model at p])        in the model's own graphs
    keys and values of p, in every layer, are projections of this state

A block is the last token of the text and masks after it. Its rows see the text and, in both directions, each other;
row i predicts the token at the place of the i-th mask. Embedding and output matrix are the model's where the file has
none. With DSpark's Markov tensors, row i predicts the token after its own place, and the token before it adds w2 w1[it]
to the logits, so the tokens of a block are chosen one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ikcli.errors import FormatError, UnsupportedError
from ikcli.graph import Graph, Node, Rows
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.heads.head import MARKOV, Head, renamed
from ikcli.models.hparams import HParams
from ikcli.models.keys import HasShape
from ikcli.models.rope import inverse_frequencies, magnitude
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

CONSTANT = False
BLOCK = True
_BASE = "dflash.backbone_rotary_base"


def read(metadata: Mapping[str, Any], arch: str, hp: HParams, source: str) -> Head:
    """Return what the file says; raise FormatError or UnsupportedError if the head does not fit or run."""

    def key(name: str) -> Any:
        value = metadata.get(f"{arch}.{name}")
        if value is None:
            raise FormatError(f"the head of {source}: {arch}.{name} is missing")
        return value

    layers, size = tuple(int(i) for i in key("dflash.target_layer_ids")), int(key("dflash.block_size"))
    mask = int(key("dflash.mask_token_id"))
    if int(key("dflash.n_target_features")) != hp.n_embd * len(layers):
        raise FormatError(
            f"{source}: the head of -md is of another model: its {arch}.dflash.n_target_features is "
            f"{key('dflash.n_target_features')}, not {len(layers)} times the model's embedding_length {hp.n_embd}"
        )
    if not layers or not all(0 <= il < hp.n_layer - 1 for il in layers):
        raise UnsupportedError(
            f"the head of {source}: {arch}.dflash.target_layer_ids is {list(layers)}; it can read the outputs of "
            f"layers 0 to {hp.n_layer - 2} of this model"
        )
    if size < 2 or not 0 <= mask < hp.n_vocab:
        raise FormatError(f"the head of {source}: a block of {size} tokens with the mask {mask} cannot be drafted")
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern", ())
    pattern = [pattern] if isinstance(pattern, bool | int) else pattern
    if metadata.get(f"{arch}.dflash.laguna") or (metadata.get(f"{arch}.attention.sliding_window") and any(pattern)):
        raise UnsupportedError(f"the head of {source}: DFlash heads with windows, such as Laguna's, are not supported")
    kept = {k: v for k, v in metadata.items() if "sliding_window" not in k}
    own = HParams.from_gguf(renamed(kept, arch, "qwen3", hp.n_vocab), {}, f"the head of {source}")
    own = replace(own, value_scale=float(metadata.get(f"{arch}.attention.value_scale", 1.0)))
    base = float(metadata.get(f"{arch}.{_BASE}", 0.0))
    return Head(own, layers, block=(size, mask), rope_base=base)


def tensor_shapes(head: Head, hp: HParams, tensors: Mapping[str, HasShape], prefix: str) -> TensorSpecs:
    """Return the expected tensors."""
    own, row = head.own, TensorSpec((head.own.n_embd,))
    table = TensorSpec((own.n_embd, hp.n_vocab), required=own.n_embd != hp.n_embd)
    specs: TensorSpecs = {
        "dflash_fc.weight": TensorSpec((hp.n_embd * len(head.layers), own.n_embd)),
        "dflash_hidden_norm.weight": row,
        "output_norm.weight": row,
        "token_embd.weight": table,
        "output.weight": replace(table, required=False),
    }
    if (markov := tensors.get(f"{prefix}{MARKOV}")) is not None:
        rank = markov.shape[0]
        specs |= dict.fromkeys((MARKOV, "markov_w2.weight"), TensorSpec((rank, hp.n_vocab)))
        specs["conf_proj.weight"] = TensorSpec((own.n_embd + rank, 1), required=False)  # nothing uses it
        specs["conf_proj.bias"] = TensorSpec((1,), required=False)
    for il in range(own.n_layer):
        layer = expected.attention_specs(own, il, bias=None, qk_norm=True, ffn_norm="post_attention_norm", fused=False)
        sinks = {"attn_sinks.weight": TensorSpec((own.n_head,), required=False)}
        specs |= layer | expected.dense_specs(own, il, own.n_ff) | expected.in_block(il, sinks)
    return {prefix + name: spec for name, spec in specs.items()}


def take_states(g: Graph, head: Head, w: Weights, prefix: str, outputs: Mapping[int, Node]) -> None:
    """Compute the states of all tokens from the outputs of layers."""
    x = g.concat([outputs[il] for il in head.layers], "dflash_concat")
    x = g.mul_mat(w[f"{prefix}dflash_fc.weight"], x, "dflash_fc")
    g.states = g.rms_norm(x, w[f"{prefix}dflash_hidden_norm.weight"], head.own.eps, "dflash_hidden_norm")
    g.wants_states = Rows.TOKENS


def build(g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
    """Record what stores keys and values of states in the caches of all layers."""
    own = head.own
    given = g.host_rows(own.n_embd, "mtp_states")
    table = _table(g, own, head.rope_base)
    for i in range(own.n_layer):
        g.il = hp.n_layer + i
        k, v = _keys_values(g, own, given, w.layer(i, prefix), table)
        if cfg.k_hadamard:
            k = g.hadamard(k, own.n_head_kv, own.head_dim_k, "Kcur_hadamard")
        if cfg.v_hadamard:
            v = g.hadamard(v, own.n_head_kv, own.head_dim_v, "Vcur_hadamard")
        g.kv_store(g.cache("k", k.cols, cfg.type_k), k, "k_cache_view")
        g.kv_store(g.cache("v", v.cols, cfg.type_v), v, "v_cache_view")
    g.il = -1
    g.states, g.wants_states = g.select_outputs(given, "mtp_rows"), Rows.OUTPUTS
    return g.states


def build_block(g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
    """Record the transformer over the rows of a block and return their logits."""
    own = head.own
    x = g.embed(w.get(f"{prefix}token_embd.weight") or w["token_embd.weight"])
    table = _table(g, own, 0.0)
    for i in range(own.n_layer):
        g.il, layer = hp.n_layer + i, w.layer(i, prefix)
        cur = g.rms_norm(x, layer.attn_norm, own.eps, "attn_norm")
        q = blocks.linear(g, layer.attn_q, layer.get("attn_q_bias"), cur, "Qcur_proj")
        q = blocks.rotated(g, own, q, layer, table, "q", own.n_head, neox=True)
        kv = _keys_values(g, own, cur, layer, table)
        x = g.add(blocks.attend(g, own, cfg, q, kv, cur, layer, kv_layer=g.il), x, "ffn_inp")
        normed = g.rms_norm(x, layer.post_attention_norm, own.eps, "ffn_norm")
        x = g.add(dense_ffn(g, normed, layer), x, "l_out")
    g.il = -1
    x = g.rms_norm(g.select_outputs(x, "mtp_rows"), w[f"{prefix}output_norm.weight"], own.eps, "mtp_norm")
    matrix = w.get(f"{prefix}output.weight") or w.get(f"{prefix}token_embd.weight") or w.get("output.weight")
    return g.mul_mat(matrix or w["token_embd.weight"], x, "mtp_output")


def build_markov(g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
    """Record what a token adds to the logits of the next one (DSpark)."""
    x = g.embed(w[f"{prefix}{MARKOV}"], "markov_w1")
    g.il = hp.n_layer
    return g.mul_mat(w[f"{prefix}markov_w2.weight"], g.select_outputs(x, "mtp_rows"), "markov_bias")


def _table(g: Graph, own: HParams, base: float) -> Node:
    rope = replace(own.rope, freq_base=base) if base else own.rope
    return g.rope_table([float(f) for f in inverse_frequencies(rope, own.n_rot, None)], magnitude(rope, 1.0))


def _keys_values(g: Graph, own: HParams, x: Node, layer: LayerWeights, table: Node) -> tuple[Node, Node]:
    """Project rows to keys, normed and rotated, and values."""
    k = blocks.linear(g, layer.attn_k, layer.get("attn_k_bias"), x, "Kcur_proj")
    v = blocks.linear(g, layer.attn_v, layer.get("attn_v_bias"), x, "Vcur_proj")
    k = blocks.rotated(g, own, k, layer, table, "k", own.n_head_kv, neox=True)
    return k, g.scale(v, own.value_scale, "Vcur_scaled")
