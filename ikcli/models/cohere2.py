"""Cohere2 (Command-R7B, Command A), dense and with experts: attention and feed-forward part in parallel.

Layers with windows use RoPE, others do not, except for dense ones at the beginning of a model with experts.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, ffn_norm=None)
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=False)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        out = feed_forward(g, hp, cfg, x, layer)
        averaged = hp.has_experts(layer.il) and hp.n_ff_shexp > 0  # routed and shared experts
        return g.scale(out, 0.5, "ffn_averaged") if averaged else out

    return blocks.parallel_transformer(g, hp, w, attn, ffn)
