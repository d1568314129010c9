"""DeciLM and Nemotron (NAS): Llama with layers that lack attention, a feed-forward part, or both.

A layer without key heads has one matrix in place of attention, and none if it has no query heads either.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        own = hp.at(il)
        norm, matrix = TensorSpec((hp.n_embd,)), TensorSpec((hp.n_embd, hp.n_embd))
        if own.n_head_kv:
            specs |= expected.attention_specs(hp, il, bias=None, ffn_norm=None)
        elif own.n_head:
            specs |= expected.in_block(il, {"attn_norm.weight": norm, "attn_output.weight": matrix})
        if own.n_ff:
            specs |= expected.in_block(il, {"ffn_norm.weight": norm}) | expected.dense_specs(hp, il, own.n_ff)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=False)
    x = blocks.embedded(g, hp, w)
    for il in range(hp.n_layer):
        g.il = il
        own, layer = hp.at(il), w.layer(il)
        cur = x
        if own.n_head:
            cur = blocks.normed(g, hp, x, layer, "attn_norm")
            cur = attn(cur, layer) if own.n_head_kv else g.mul_mat(layer.attn_output, cur, "attn_linear")
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_ffn_inp")
        x = g.add(cur, x, "ffn_inp") if own.n_head else x
        if own.n_ff:
            x = g.add(dense_ffn(g, blocks.normed(g, hp, x, layer, "ffn_norm"), layer), x, "l_out")
        x = g.layer_out(x)
    g.il = -1
    return blocks.output(g, hp, w, x)
