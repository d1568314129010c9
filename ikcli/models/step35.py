"""Step-3.5 and Laguna: layers with and without windows differ in heads and rotation; attention has a gate per head."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import limited_feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    factors = TensorSpec((hp.n_rot // 2,), required=False)
    return expected.with_blocks(hp, block_shapes) | {"rope_freqs.weight": factors}


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    specs, own = expected.attention_specs(hp, il, bias=None, qk_norm=None), hp.at(il)
    every = (hp.n_embd, own.n_head * own.head_dim_v)  # a gate per element
    specs[f"blk.{il}.attn_gate.weight"] = TensorSpec((hp.n_embd, own.n_head), required=False, also=(every,))
    return specs | expected.feed_forward_specs(hp, il)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    own = layers(g, hp, w, cfg)
    return blocks.transformer(g, hp, w, own.attn, own.ffn, own.ffn_norm)


def layers(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig, only: int | None = None) -> blocks.Layers:
    """Return the layers, after what they share has been recorded."""
    tables = blocks.rope_tables(g, hp, w, cfg, only)
    gating = "softplus" if hp.arch == "laguna" else "sigmoid"

    def attn(x: Node, layer: LayerWeights) -> Node:
        return blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=True, gating=gating)

    return blocks.Layers(attn, partial(limited_feed_forward, g, hp, cfg))
