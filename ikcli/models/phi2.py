"""Phi-1, Phi-1.5, Phi-2: attention and feed-forward part in parallel, biases everywhere, also of the logits, GELU."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import mlp
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, ffn_norm=None)
        specs |= expected.mlp_specs(hp, il)
    names = "output output_norm attn_norm attn_qkv attn_output ffn_up ffn_down"
    specs |= expected.bias_specs(specs, names)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    ffn = partial(mlp, g)
    return blocks.parallel_transformer(g, hp, w, attn, ffn)
