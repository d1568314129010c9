"""Llama 4: layers with RoPE that see a chunk of positions; every fourth one sees all positions without RoPE (NoPE).

Heads are normed without weights after the rotation (except in Maverick, which has 128 experts). A sigmoid chooses
experts, and its value scales their input.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None)
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        table = tables[layer.il]
        norm_heads = table is not None and hp.n_expert != 128
        return blocks.self_attention(g, hp, cfg, x, layer, table, neox=False, norm_heads=norm_heads)

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return feed_forward(g, hp, cfg, x, layer)

    return blocks.transformer(g, hp, w, attn, ffn)
