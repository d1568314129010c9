"""SmolLM3: llama without rotation in every fourth layer."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpecs, Weights

NO_ROPE_STEP = 4


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = blocks.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= blocks.attention_specs(hp, il, bias=None)
        specs |= blocks.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    table = blocks.rope_table(g, hp, w)

    def attn(x: Node, layer: LayerWeights) -> Node:
        rotation = None if (layer.il + 1) % NO_ROPE_STEP == 0 else table
        return blocks.self_attention(g, hp, cfg, x, layer, rotation, neox=False)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return blocks.feed_forward(g, hp, cfg, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
