"""Qwen3-MoE: the attention of Qwen3; routed experts chosen by softmax, weights of the chosen ones sum to 1."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = blocks.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= blocks.attention_specs(hp, il, bias=False, qk_norm=True)
        specs |= blocks.expert_specs(hp, il, hp.n_ff_exp)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    table = blocks.rope_table(g, hp, w)

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, table, neox=True)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return blocks.moe_ffn(g, hp, cfg, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
