"""Command-R: attention and feed-forward part in parallel after one LayerNorm; norms of heads in R+.

PLaMo 13B: the same with RMS norms.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, ffn_norm=None)
        specs |= expected.norms_of_all_heads(hp, il, each=True, required=False)
        specs |= expected.dense_specs(hp, il, hp.at(il).n_ff)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=False)
    ffn = partial(dense_ffn, g)
    return blocks.parallel_transformer(g, hp, w, attn, ffn)
