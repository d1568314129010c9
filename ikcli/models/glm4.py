"""GLM-4 (0414): norms before and after attention and feed-forward part, whose gate and up are one matrix."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None)
        specs |= expected.fused_dense_specs(hp, il)
        for name in ("post_attention_norm", "post_ffw_norm"):
            specs[f"blk.{il}.{name}.weight"] = TensorSpec((hp.n_embd,))
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        cur = blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=False)
        return g.rms_norm(cur, layer.post_attention_norm, hp.eps, "post_attn_norm")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return g.rms_norm(blocks.fused_dense_ffn(g, hp, x, layer), layer.post_ffw_norm, hp.eps, "post_ffw_norm")

    return blocks.transformer(g, hp, w, attn, ffn)
