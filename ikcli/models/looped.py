"""Nanbeige 4.2 and Ouro: all layers run several times, each time with caches of their own.

Ouro also norms what attention and the feed-forward part return.
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
    return expected.with_blocks(hp, _block_shapes)


def _block_shapes(hp: HParams, il: int) -> TensorSpecs:
    specs = expected.attention_specs(hp, il, bias=False) | expected.dense_specs(hp, il, hp.n_ff)
    return specs | (expected.post_norm_specs(hp, il) if hp.arch == "ouro" else {})


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=False)
    ffn: blocks.Block = partial(dense_ffn, g)
    if hp.arch == "ouro":
        attn = blocks.normed_after(g, attn, "post_attention_norm", hp.eps, "attn_post_norm")
        ffn = blocks.normed_after(g, ffn, "post_ffw_norm", hp.eps, "ffn_post_norm")
    return blocks.transformer(g, hp, w, attn, ffn)
