"""SmallThinker: experts with ReLU, chosen by the input of the layer, before attention; windows in most layers."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=False) | expected.expert_specs(hp, il, hp.n_ff_exp)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    x = blocks.embedded(g, hp, w)
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        logits = blocks.linear(g, layer.ffn_gate_inp, layer.get("ffn_gate_inp_bias"), x, "ffn_moe_logits")
        cur = attn(blocks.normed(g, hp, x, layer, "attn_norm"), layer)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_ffn_inp")
            logits = g.select_outputs(logits, "last_logits")
        x = g.add(cur, x, "ffn_inp")
        cur = blocks.normed(g, hp, x, layer, "ffn_norm")
        x = g.layer_out(g.add(moe_ffn(g, hp, cfg, cur, layer, "ffn_out", Glu("relu"), logits), x, "l_out"))
    g.il = -1
    return blocks.output(g, hp, w, x)
