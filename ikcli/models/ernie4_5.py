"""ERNIE 4.5, dense and with experts: rotation of adjacent pairs, softmax gating with a bias for the choice.

DeepSeek 1: as these, weights of experts are not normalised.
"""

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
        specs |= expected.attention_specs(hp, il, bias=None)
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=False)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return blocks.feed_forward(g, hp, cfg, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
