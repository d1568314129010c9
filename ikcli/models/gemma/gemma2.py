"""Gemma 2, 3 and EmbeddingGemma: norms before and after each part, GELU, windows; soft caps (2) or norms of heads."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpecs, Weights

GELU = Glu("gelu")


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, qk_norm=hp.arch != "gemma2")
        specs |= expected.dense_specs(hp, il, hp.at(il).n_ff)
        specs |= expected.post_norm_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows, or their states."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    attn = blocks.normed_after(g, attn, "post_attention_norm", hp.eps, "post_attn_norm")
    ffn = blocks.normed_after(g, partial(dense_ffn, g, act=GELU), "post_ffw_norm", hp.eps, "post_ffw_norm")
    return blocks.transformer(g, hp, w, attn, ffn)
