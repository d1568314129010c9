"""DeepSeek V4 and V4-Flash: a window of positions, entries in place of earlier ones, and a residual of streams.

A layer reads a weighted sum of the streams and adds shares of its result to them, mixed (`graph/ops_streams.py`).
Attention has one row per position, both key and value, for all heads, which are [not rotated | rotated]; results are
rotated back. Queries see the last positions; in most layers also entries (`graph/ops_pooled.py`): of many positions
each, or of four, overlapping, of which an indexer chooses. The output projection is of low rank by groups of heads. The
experts of the first layers are looked up by token. Corresponds to `build_deepseek4` of ik_llama.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, Graph, HeadSlice, Node, Per, Weight, power_of_two_parts
from ikcli.graph.ops_pooled import Pool, PooledAttn, PooledCells, PooledStore
from ikcli.graph.ops_streams import StreamMix, StreamSum, StreamWeights
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import limited_feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.rope import RopeParams, inverse_frequencies
from ikcli.models.sparse import indexer
from ikcli.models.sparse.keys import ENTRY_NAMES, OVERLAPPING
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

_ROWS = ("attn_kv", "attn_kv_latent")  # names of the projection to rows of the cache
_HEADS = ("output_hc", "hc_head")  # names of the weights that sum up the streams of the last layer


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    n = hp.n_stream
    specs = expected.with_blocks(hp, block_shapes)
    parts = {"fn": (n * hp.n_embd, n), "base": (n,), "scale": (1,)}
    return specs | _either("", {f"{x}.weight": TensorSpec(s) for x, s in parts.items()}, _HEADS, "_")


def _either(prefix: str, specs: TensorSpecs, names: tuple[str, str], joint: str) -> TensorSpecs:
    """Return specs of tensors that have one of two names before `joint` and their own."""
    found: TensorSpecs = {}
    for own, spec in specs.items():
        first, second = (f"{prefix}{name}{joint}{own}" for name in names)
        found |= {first: replace(spec, unless=second), second: replace(spec, required=False)}
    return found


def _stream_specs(hp: HParams, which: str) -> TensorSpecs:
    n = hp.n_stream
    return {
        f"hc_{which}_fn.weight": TensorSpec((n * hp.n_embd, n * (n + 2))),
        f"hc_{which}_base.weight": TensorSpec((n * (n + 2),)),
        f"hc_{which}_scale.weight": TensorSpec((3,)),
    }


def _entry_specs(hp: HParams, width: int) -> TensorSpecs:
    """Return the tensors that make entries of a layer; `hp`: its numbers."""
    cols = width * _parts(hp.pool_ratio)
    return {
        "kv.weight": TensorSpec((hp.n_embd, cols)),
        "gate.weight": TensorSpec((hp.n_embd, cols)),
        "ape.weight": TensorSpec((cols, hp.pool_ratio)),
        "norm.weight": TensorSpec((width,)),
    }


def _parts(ratio: int) -> int:
    """Return the entries that a position is part of."""
    return 2 if ratio == OVERLAPPING else 1


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    own, d = hp.at(il), hp.head_dim_k
    in_group = hp.n_head * d // hp.o_groups
    specs = {
        "attn_norm.weight": TensorSpec((hp.n_embd,)),
        "attn_q_a.weight": TensorSpec((hp.n_embd, hp.q_lora_rank)),
        "attn_q_a_norm.weight": TensorSpec((hp.q_lora_rank,)),
        "attn_q_b.weight": TensorSpec((hp.q_lora_rank, hp.n_head * d)),
        "attn_kv_a_norm.weight": TensorSpec((d,)),
        "attn_output_a.weight": TensorSpec((in_group, hp.o_groups * hp.o_lora_rank)),
        "attn_output_b.weight": TensorSpec((hp.o_groups * hp.o_lora_rank, hp.n_embd)),
        "attn_sinks.weight": TensorSpec((hp.n_head,)),
        "ffn_norm.weight": TensorSpec((hp.n_embd,)),
    } | _stream_specs(hp, "attn") | _stream_specs(hp, "ffn")  # fmt: skip
    if il < hp.n_hash:
        specs["ffn_gate_tid2eid.weight"] = TensorSpec((hp.n_expert_used, hp.n_vocab))
    if il in hp.index_owners:
        specs["indexer.attn_q_b.weight"] = TensorSpec((hp.q_lora_rank, hp.index_n_head * hp.index_head_dim))
        specs["indexer.proj.weight"] = TensorSpec((hp.n_embd, hp.index_n_head))
    found = expected.in_block(il, specs) | expected.feed_forward_specs(hp, il)
    found |= _either(f"blk.{il}.", {".weight": TensorSpec((hp.n_embd, d))}, _ROWS, "")
    if own.pool_ratio:
        found |= _either(f"blk.{il}.", _entry_specs(own, d), ENTRY_NAMES["attn"], "_")
    if il in hp.index_owners:
        found |= _either(f"blk.{il}.", _entry_specs(own, hp.index_head_dim), ENTRY_NAMES["index"], "_")
    return found


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    rotations = _rotations(g, hp)
    x = g.concat([blocks.embedded(g, hp, w)] * hp.n_stream, "inp_streams")
    last = hp.n_layer - 1
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        before, weights = _before(g, hp, x, layer, "attn")
        cur = blocks.normed(g, hp, before, layer, "attn_norm")
        cur = _attention(g, hp.at(il), hp, cfg, cur, layer, rotations[hp.at(il).rope])
        x = g.record(StreamMix(x, cur, weights, hp.n_stream), "ffn_inp")
        if il == last and il >= hp.n_hash:  # experts that are looked up need the tokens
            x = g.select_outputs(x, "last_ffn_inp")
        before, weights = _before(g, hp, x, layer, "ffn")
        cur = limited_feed_forward(g, hp, cfg, blocks.normed(g, hp, before, layer, "ffn_norm"), layer)
        x = g.layer_out(g.record(StreamMix(x, cur, weights, hp.n_stream), "l_out"))
    g.il = -1
    if last < hp.n_hash:
        x = g.select_outputs(x, "last_out")
    head = next((name for name in _HEADS if f"{name}_fn.weight" in w), _HEADS[0])
    projection, scale, base = (w[f"{head}_{part}.weight"] for part in ("fn", "scale", "base"))
    return blocks.output(g, hp, w, _collapsed(g, hp, x, projection, scale, base)[0])


def _before(g: Graph, hp: HParams, x: Node, layer: LayerWeights, which: str) -> tuple[Node, Node]:
    """Return what a part of a layer reads of the streams, and their weights."""
    fn, scale, base = (layer.tensor(f"hc_{which}_{part}.weight") for part in ("fn", "scale", "base"))
    return _collapsed(g, hp, x, fn, scale, base, f"hc_{which}")


def _collapsed(
    g: Graph, hp: HParams, x: Node, projection: Weight, scale: Weight, base: Weight, name: str = "hc_head"
) -> tuple[Node, Node]:
    """Return the weighted sum of the streams, and their weights."""
    flat = g.norm(x, None, hp.eps, f"{name}_norm", kind="rms")
    logits = g.mul_mat(projection, flat, f"{name}_mix")
    made = StreamWeights(logits, scale, base, hp.n_stream, hp.stream_iterations, hp.stream_eps)
    weights = g.record(made, f"{name}_weights")
    return g.record(StreamSum(x, weights, hp.n_stream), f"{name}_sum"), weights


@dataclass(frozen=True, slots=True)
class _Rotation:
    """The tables of layers that rotate alike: of a token's position, back again, and of the first of an entry."""

    table: Node
    back: Node
    first: dict[int, Node]  # by the positions of an entry


def _rotations(g: Graph, hp: HParams) -> dict[RopeParams, _Rotation]:
    found: dict[RopeParams, _Rotation] = {}
    for own in map(hp.at, range(hp.n_layer)):
        freqs = inverse_frequencies(own.rope, own.n_rot).tolist()
        name = f"rope_table_{len(found)}"
        if own.rope not in found:
            back = g.rope_table([-f for f in freqs], 1.0, f"{name}_back")
            found[own.rope] = _Rotation(g.rope_table(freqs, 1.0, name), back, {})
        first = found[own.rope].first
        if own.pool_ratio and own.pool_ratio not in first:
            lag = own.pool_ratio - 1
            first[own.pool_ratio] = g.rope_table(freqs, 1.0, f"rope_table_first_{own.pool_ratio}", lag)
    return found


def _attention(
    g: Graph, hp: HParams, model: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, rotation: _Rotation
) -> Node:
    """Record the attention of a layer, whose numbers are `hp`."""
    d, n_head = hp.head_dim_k, hp.n_head
    offset = d - hp.n_rot
    q_a = g.rms_norm(g.mul_mat(layer.attn_q_a, x, "q_a"), layer.attn_q_a_norm, hp.eps, "q_a_norm")
    q = g.norm(g.mul_mat(layer.attn_q_b, q_a, "q"), None, hp.eps, "q_norm", kind="rms", width=d)
    q = g.rope(q, rotation.table, n_head, d, "q_rope", neox=False, offset=offset)
    rows = next(found for name in _ROWS if (found := layer.get(name)) is not None)
    kv = g.rms_norm(g.mul_mat(rows, x, "kv"), layer.attn_kv_a_norm, hp.eps, "kv_norm")
    kv = g.rope(kv, rotation.table, 1, d, "kv_rope", neox=False, offset=offset)
    if cfg.k_hadamard:
        q = g.hadamard(q, n_head, d, "q_hadamard", blocks=power_of_two_parts(d))
        kv = g.hadamard(kv, 1, d, "kv_hadamard", blocks=power_of_two_parts(d))
    recent = g.cache("k", d, cfg.type_k, per=_per(hp, cfg))
    g.kv_store(recent, kv, "kv_cache_view")
    scale = 1.0 / math.sqrt(d)
    if not hp.pool_ratio:
        kqv = g.attention(
            [HeadSlice(q, 0, d, d)], [HeadSlice(recent, 0, d, 0)], HeadSlice(recent, 0, d, 0), "kqv", n_head=n_head,
            n_head_kv=1, scale=scale, window=hp.window, sinks=layer.attn_sinks, flash=cfg.flash_attn,
            heads_per_step=blocks.heads_per_step(cfg, n_head),
        )  # fmt: skip
    else:
        entries = _entries(g, hp, cfg, x, layer, rotation, "attn", d, cfg.type_k)
        chosen = _chosen(g, hp, model, cfg, x, q_a, layer, rotation)
        most = max(cfg.n_ctx // hp.pool_ratio, 1) if chosen is None else chosen.cols
        cells = g.record(PooledCells(q, recent, chosen, hp.window, hp.pool_ratio, most), "cells")
        attention = PooledAttn(
            HeadSlice(q, 0, d, d), recent, entries, cells, layer.attn_sinks, n_head, scale, hp.window, hp.pool_ratio
        )
        kqv = g.record(attention, "kqv")
    if cfg.k_hadamard:
        kqv = g.hadamard(kqv, n_head, d, "kqv_hadamard", blocks=power_of_two_parts(d))
    kqv = g.rope(kqv, rotation.back, n_head, d, "kqv_rope_back", neox=False, offset=offset)
    in_group = n_head * d // hp.o_groups
    by_group = replace(layer.attn_output_a, shape=(in_group, hp.o_lora_rank, hp.o_groups))
    low = g.mul_mat_heads(by_group, HeadSlice(kqv, 0, in_group, in_group), "kqv_low")
    return g.mul_mat(layer.attn_output_b, low, "kqv_out")


def _per(hp: HParams, cfg: GraphConfig) -> Per:
    return Per.WINDOW if hp.window and cfg.n_window else Per.CELL


def _entries(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    x: Node,
    layer: LayerWeights,
    rotation: _Rotation,
    kind: str,
    width: int,
    type_: GGMLType,
) -> Cache:
    """Record the entries that tokens complete, and return their cache: rows of attention, or keys of the indexer."""
    ratio = hp.pool_ratio
    stem = next(n for n in ENTRY_NAMES[kind] if layer.get(f"{n}_kv") is not None)
    kv, gate, bias, norm = (layer.tensor(f"{stem}_{part}.weight") for part in ("kv", "gate", "ape", "norm"))
    parts = g.concat([g.mul_mat(kv, x, f"{kind}_pool_kv"), g.mul_mat(gate, x, f"{kind}_pool_gate")], f"{kind}_pool")
    kept = g.cache(f"{kind}_parts", parts.cols, GGMLType.F32, per=_per(hp, cfg))
    g.kv_store(kept, parts, f"{kind}_parts_view")
    entry = g.record(Pool(parts, kept, bias, width, ratio), f"{kind}_entry")
    entry = g.rms_norm(entry, norm, hp.eps, f"{kind}_entry_norm")
    table = rotation.first[ratio]
    entry = g.rope(entry, table, 1, width, f"{kind}_entry_rope", neox=False, offset=width - hp.n_rot)
    if cfg.k_hadamard and kind == "attn":
        entry = g.hadamard(entry, 1, width, f"{kind}_entry_hadamard", blocks=power_of_two_parts(width))
    cache = g.cache(indexer.CACHE if kind == "index" else "entry", width, type_)
    g.record(PooledStore(cache, entry, ratio), f"{kind}_entry_view")
    return cache


def _chosen(
    g: Graph,
    hp: HParams,
    model: HParams,
    cfg: GraphConfig,
    x: Node,
    q_a: Node,
    layer: LayerWeights,
    rotation: _Rotation,
) -> Node | None:
    """Return the entries that the indexer of a layer chooses; None: all are seen."""
    most = indexer.top_k(model, cfg)
    if not most or layer.il not in model.index_owners:
        return None
    n_head, width, ratio = hp.index_n_head, hp.index_head_dim, hp.pool_ratio
    keys = _entries(g, hp, cfg, x, layer, rotation, "index", width, cfg.type_index)
    if cfg.index_keys_only:
        return None
    q = g.mul_mat(layer.tensor("indexer.attn_q_b.weight"), q_a, "index_q")
    q = g.rope(q, rotation.table, n_head, width, "index_q_rope", neox=False, offset=width - hp.n_rot)
    weights = g.mul_mat(layer.tensor("indexer.proj.weight"), x, "index_weights")
    weights = g.scale(weights, 1 / math.sqrt(n_head * width), "index_weights_scaled")
    heads = HeadSlice(q, 0, width, width)
    top = -(-most // ratio)
    return g.index_top_k(heads, weights, keys, "index_top_k", n_head=n_head, top_k=top, ratio=ratio)
