"""AFMoE (Trinity): gated attention between norms, experts; only layers with windows use RoPE."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import feed_forward
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, qk_norm=True)
        specs[f"blk.{il}.attn_gate.weight"] = TensorSpec((hp.n_embd, hp.n_head * hp.head_dim_v))
        specs |= expected.feed_forward_specs(hp, il)
        specs |= expected.post_norm_specs(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    attn = blocks.normed_after(g, attn, "post_attention_norm", hp.eps, "attn_post_norm")
    ffn = blocks.normed_after(g, partial(feed_forward, g, hp, cfg), "post_ffw_norm", hp.eps, "ffn_post_norm")
    return blocks.transformer(g, hp, w, attn, ffn)
