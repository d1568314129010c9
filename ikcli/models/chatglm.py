"""ChatGLM 2 and 3, GLM-4 9B: one matrix for q, k and v and one for gate and up, half rotary of adjacent pairs."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, fused=True)
        specs |= expected.fused_dense_specs(hp, il)
    specs |= expected.bias_specs(specs, "attn_qkv", required=False)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=False)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return blocks.fused_dense_ffn(g, hp, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
