"""gpt-oss: every other layer with a window, sinks, biases everywhere, clamped activation in the experts."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights

ACTIVATION = Glu("swiglu_oai", limit=7.0)


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, ffn_norm="post_attention_norm")
        specs[f"blk.{il}.attn_sinks.weight"] = TensorSpec((hp.at(il).n_head,))
        specs |= expected.feed_forward_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    ffn = partial(feed_forward, g, hp, cfg, act=ACTIVATION)
    return blocks.transformer(g, hp, w, attn, ffn, "post_attention_norm")
