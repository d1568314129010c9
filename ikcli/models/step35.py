"""Step-3.5 and Laguna: layers with and without windows differ in heads and rotation; attention has a gate per head."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, qk_norm=None)
        own = hp.at(il)
        every = (hp.n_embd, own.n_head * own.head_dim_v)  # a gate per element
        specs[f"blk.{il}.attn_gate.weight"] = TensorSpec((hp.n_embd, own.n_head), required=False, also=(every,))
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)
    gating = "softplus" if hp.arch == "laguna" else "sigmoid"

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=True, gating=gating)

    return blocks.transformer(g, hp, w, attn, partial(blocks.limited_feed_forward, g, hp, cfg))
