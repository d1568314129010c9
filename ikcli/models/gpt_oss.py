"""gpt-oss: every other layer with a window, sinks, biases everywhere, clamped activation in the experts."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

ACTIVATION = Glu("swiglu_oai", limit=7.0)


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, ffn_norm="post_attention_norm")
        specs[f"blk.{il}.attn_sinks.weight"] = TensorSpec((hp.at(il).n_head,))
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=True)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return blocks.feed_forward(g, hp, cfg, x, layer, ACTIVATION)

    return blocks.transformer(g, hp, w, attn, ffn, "post_attention_norm")
