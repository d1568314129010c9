"""Muse Glimmer: normed embeddings, norms before and after each part, gated attention; layers with windows use RoPE."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights

POST_NORM_EPS = 1e-8


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        own = hp.at(il)
        specs |= expected.attention_specs(hp, il, bias=None, qk_norm=True)
        specs[f"blk.{il}.attn_gate.weight"] = TensorSpec((hp.n_embd, own.n_head * own.head_dim_v))
        specs |= expected.dense_specs(hp, il, own.n_ff)
        specs |= expected.post_norm_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=False)
    attn = blocks.normed_after(g, attn, "post_attention_norm", POST_NORM_EPS, "attn_post_norm")
    ffn = blocks.normed_after(g, partial(dense_ffn, g), "post_ffw_norm", POST_NORM_EPS, "ffn_post_norm")
    return blocks.transformer(g, hp, w, attn, ffn, norm_embeddings=True)
