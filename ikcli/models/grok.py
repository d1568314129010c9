"""Grok 1 and 2: soft caps, norms before and after each part, experts with GELU; Grok 2 adds a dense part."""

from __future__ import annotations

import math

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

GELU = Glu("gelu")


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None)
        specs |= expected.expert_specs(hp, il, hp.n_ff_exp)
        for name, spec in expected.dense_specs(hp, il, hp.at(il).n_ff).items():
            specs[name] = TensorSpec(spec.shape, required=False)
        first, second = f"blk.{il}.layer_output_norm.weight", f"blk.{il}.post_ffw_norm.weight"
        specs[f"blk.{il}.attn_output_norm.weight"] = TensorSpec((hp.n_embd,))
        specs[first] = TensorSpec((hp.n_embd,), unless=second)
        specs[second] = TensorSpec((hp.n_embd,), required=False)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    attn = blocks.normed_after(g, attn, "attn_output_norm", hp.eps, "attn_out_norm")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        cur = moe_ffn(g, hp, cfg, x, layer, act=GELU)
        if layer.get("ffn_up") is not None:
            both = g.add(dense_ffn(g, x, layer, "ffn_mlp", act=GELU), cur, "ffn_both")
            cur = g.scale(both, math.sqrt(2) / 2, "ffn_out")
        norm = layer.get("layer_output_norm") or layer.post_ffw_norm
        return g.rms_norm(cur, norm, hp.eps, "ffn_post_norm")

    return blocks.transformer(g, hp, w, attn, ffn)
