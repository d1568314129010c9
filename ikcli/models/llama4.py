"""Llama 4: layers that see a chunk of positions, and rotate, and every fourth one that sees all, and does not.

Heads are normed without weights after the rotation (but in Maverick, which has 128 experts); experts are chosen by
sigmoid, whose value scales what goes into them.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = expected.base_specs(hp)
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None)
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        table = tables[layer.il]
        norm_heads = table is not None and hp.n_expert != 128
        return blocks.self_attention(g, hp, cfg, x, layer, table, neox=False, norm_heads=norm_heads)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return blocks.feed_forward(g, hp, cfg, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
