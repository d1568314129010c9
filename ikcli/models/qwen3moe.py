"""Qwen3-MoE: the attention of Qwen3; routed experts chosen by softmax, weights of the chosen ones sum to 1."""

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
        specs |= expected.attention_specs(hp, il, bias=False, qk_norm=True)
        specs |= expected.expert_specs(hp, il, hp.n_ff_exp)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=True)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return blocks.moe_ffn(g, hp, cfg, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
