"""Gemma 3n: a residual of four streams, of which layers read the first, predicted from all (AltUp).

What a layer returns for the first stream corrects all of them. Beside attention is a branch of low rank (LAuReL), and
the gates of first layers are cut off below many standard deviations. Embeddings of layers, and last layers that use
keys and values of earlier ones, are those of Gemma 4.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ikcli.graph import Graph, HeadSlice, Node, Rows
from ikcli.graph.ops_elements import Cut
from ikcli.graph.ops_streams import StreamAdd, StreamLevel, StreamPredict
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.gemma import gemma4
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

LEAST_SQUARE = 1e-5  # of the columns of a stream, where it is brought to the level of another


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    further = TensorSpec((hp.n_embd, hp.n_embd, hp.n_stream - 1))
    specs = expected.base_specs(hp) | gemma4.own_specs(hp)
    specs |= {"altup_proj.weight": further, "altup_unembd_proj.weight": further}
    for il in range(hp.n_layer):
        specs |= gemma4.layer_specs(hp, il) | expected.in_block(il, _stream_specs(hp))
        if il < hp.n_layer_kv:
            specs[f"blk.{il}.attn_v.weight"] = replace(specs[f"blk.{il}.attn_v.weight"], required=True)
    return specs


def _stream_specs(hp: HParams) -> TensorSpecs:
    n, row = hp.n_stream, TensorSpec((hp.n_embd,))
    return {
        "altup_router.weight": TensorSpec((hp.n_embd, n)),
        "altup_router_norm.weight": row,
        "altup_predict_coef.weight": TensorSpec((n, n * n)),
        "altup_correct_coef.weight": TensorSpec((n, n)),
        "altup_correct_scale.weight": row,
        "laurel_l.weight": TensorSpec((hp.n_embd, hp.laurel_rank)),
        "laurel_r.weight": TensorSpec((hp.laurel_rank, hp.n_embd)),
        "laurel_post_norm.weight": row,
    }


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)
    x = g.with_media(g.scale(g.embed(w["token_embd.weight"]), hp.embedding_scale, "inp_scaled"))
    own = gemma4.own_embeddings(g, hp, w, x)
    others = g.mul_mat_heads(w["altup_proj.weight"], HeadSlice(x, 0, hp.n_embd, 0), "altup_added")
    x = _level(g, hp, g.concat([x, others], "inp_streams"), "inp_stacked")
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        x = _predicted(g, hp, x, layer)
        cur = _first_half(g, hp, cfg, blocks.columns(g, x, 0, hp.n_embd, "active_prediction"), layer, tables[il])
        part = blocks.columns(g, own, il * hp.n_embd_per_layer, hp.n_embd_per_layer, "inp_this_layer")
        if il == hp.n_layer - 1:
            if g.wants_states is Rows.TOKENS:  # beside the output rows, which are computed as without them
                exact = g.exact
                found = _second_half(g, hp, cur, x, part, layer)
                g.il = -1
                g.states = blocks.states_of(g, hp, w, _merged(g, hp, w, found))
                g.il, g.exact = il, exact
            cur, x = g.select_outputs(cur, "last_attn_laurel"), g.select_outputs(x, "last_predictions")
            part = g.select_outputs(part, "last_inp_this_layer")
        x = _second_half(g, hp, cur, x, part, layer)
    g.il = -1
    return blocks.output(g, hp, w, _merged(g, hp, w, x))


def _first_half(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, table: Node | None) -> Node:
    """Record attention and the branch of low rank on x, the first stream, and return what the second half reads."""
    normed = g.rms_norm(x, layer.attn_norm, hp.eps, "attn_norm")
    low = g.mul_mat(layer.laurel_r, g.mul_mat(layer.laurel_l, normed, "laurel_low"), "laurel")
    laurel = g.add(g.rms_norm(low, layer.laurel_post_norm, hp.eps, "laurel_normed"), normed, "laurel_out")
    attn = gemma4.attention(g, hp, cfg, normed, layer, table)
    attn = g.add(g.rms_norm(attn, layer.post_attention_norm, hp.eps, "attn_post_norm"), x, "attn_gated")
    return g.scale(g.add(attn, laurel, "attn_and_laurel"), 1 / math.sqrt(2), "attn_laurel")


def _second_half(g: Graph, hp: HParams, cur: Node, x: Node, part: Node, layer: LayerWeights) -> Node:
    """Record the rest of a layer; x holds the predicted streams, `part` the layer's own embedding."""
    ffn = _feed_forward(g, hp, g.rms_norm(cur, layer.ffn_norm, hp.eps, "ffn_norm"), layer)
    cur = g.add(g.rms_norm(ffn, layer.post_ffw_norm, hp.eps, "ffn_post_norm"), cur, "attn_ffw_laurel_gated")
    coefs = g.mul_mat(layer.altup_correct_coef, _modalities(g, hp, cur, layer, "correct"), "correct_coefs")
    before = g.scale(blocks.columns(g, x, 0, hp.n_embd, "active_before"), -1.0, "active_negative")
    x = g.record(StreamAdd(x, g.add(cur, before, "innovation"), hp.n_stream, coefs), "corrected")
    scale = layer.tensor("altup_correct_scale.weight")
    first = g.norm(blocks.columns(g, x, 0, hp.n_embd, "first_corrected"), scale, 0.0, "first_scaled", kind="none")
    return g.layer_out(
        g.record(StreamAdd(x, gemma4.own_part(g, hp, first, part, layer), hp.n_stream, first=1), "l_out")
    )


def _feed_forward(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    z, gate = hp.at(layer.il).gate_cut, g.mul_mat(layer.ffn_gate, x, "ffn_gate")
    if z > -math.inf:
        gate = g.record(Cut(gate, z), "ffn_gate_sparse")
    par = g.swiglu(gate, g.mul_mat(layer.ffn_up, x, "ffn_up"), "ffn_gate_par", gemma4.GELU)
    return g.mul_mat(layer.ffn_down, par, "ffn_out")


def _predicted(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    first = blocks.columns(g, x, 0, hp.n_embd, "active")
    coefs = g.mul_mat(layer.altup_predict_coef, _modalities(g, hp, first, layer, "predict"), "predict_coefs")
    return g.record(StreamPredict(x, coefs, hp.n_stream), "predictions")


def _modalities(g: Graph, hp: HParams, x: Node, layer: LayerWeights, name: str) -> Node:
    """Return the numbers that the coefficients of streams are made of: one per stream, between -1 and 1."""
    normed = g.rms_norm(x, layer.altup_router_norm, hp.eps, f"{name}_router_norm")
    routed = g.scale(g.mul_mat(layer.altup_router, normed, f"{name}_routed"), 1 / hp.n_embd, f"{name}_router")
    return g.softcap(routed, 1.0, f"{name}_modalities")


def _level(g: Graph, hp: HParams, x: Node, name: str) -> Node:
    return g.record(StreamLevel(x, hp.n_stream, LEAST_SQUARE), name)


def _merged(g: Graph, hp: HParams, w: Weights, x: Node) -> Node:
    """Return the mean of the streams, the others than the first projected and brought to its level."""
    n, d = hp.n_stream, hp.n_embd
    others = g.mul_mat_heads(w["altup_unembd_proj.weight"], HeadSlice(x, d, d, d), "altup_unembd")
    x = _level(g, hp, g.concat([blocks.columns(g, x, 0, d, "first_stream"), others], "out_streams"), "out_stacked")
    parts = [blocks.columns(g, x, i * d, d, f"out_stream_{i}") for i in range(n)]
    total = parts[0]
    for i, part in enumerate(parts[1:], 1):
        total = g.add(total, part, f"unembd_sum_{i}")
    return g.scale(total, 1 / n, "unembd_merged")
