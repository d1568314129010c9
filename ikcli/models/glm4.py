"""GLM-4 (0414): norms before and after attention and feed-forward part, whose gate and up are one matrix."""

from __future__ import annotations

from dataclasses import replace

from ikcli.graph import Graph, Node
from ikcli.models import blocks
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = blocks.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= blocks.attention_specs(hp, il, bias=None)
        more = {
            "post_attention_norm.weight": TensorSpec((hp.n_embd,)),
            "ffn_up.weight": TensorSpec((hp.n_embd, 2 * hp.n_ff)),
            "ffn_down.weight": TensorSpec((hp.n_ff, hp.n_embd)),
            "post_ffw_norm.weight": TensorSpec((hp.n_embd,)),
        }
        specs |= blocks.in_block(il, more)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    table = blocks.rope_table(g, hp, w)

    def attn(x: Node, layer: LayerWeights) -> Node:
        cur = blocks.self_attention(g, hp, cfg, x, layer, table, neox=False)
        return g.rms_norm(cur, layer.post_attention_norm, hp.eps, "post_attn_norm")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        gate = g.mul_mat(replace(layer.ffn_up, row0=0, n_rows=hp.n_ff), x, "ffn_gate")
        up = g.mul_mat(replace(layer.ffn_up, row0=hp.n_ff, n_rows=hp.n_ff), x, "ffn_up")
        down = g.mul_mat(layer.ffn_down, g.swiglu(gate, up, "ffn_gate_par"), "ffn_out")
        return g.rms_norm(down, layer.post_ffw_norm, hp.eps, "post_ffw_norm")

    return blocks.transformer(g, hp, w, attn, ffn)
