"""OLMo 2 and 3: norms only after attention and feed-forward part, norms over all query and over all key heads.

OLMo 3 has windows in three of four layers. So has the larger EXAONE 4, where only these layers use RoPE and heads are
normed one by one. FlexOlmo has experts.
"""

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
    specs, one_by_one = expected.base_specs(hp), hp.arch == "exaone4"
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, qk_norm=one_by_one, ffn_norm="post_attention_norm")
        del specs[f"blk.{il}.attn_norm.weight"]
        specs |= expected.feed_forward_specs(hp, il)
        specs[f"blk.{il}.post_ffw_norm.weight"] = TensorSpec((hp.n_embd,))
        if not one_by_one:
            specs |= expected.norms_of_all_heads(hp, il)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    attn = blocks.normed_after(g, attn, "post_attention_norm", hp.eps, "attn_post_norm")
    parts = partial(feed_forward, g, hp, cfg)
    ffn = blocks.normed_after(g, parts, "post_ffw_norm", hp.eps, "ffn_post_norm")
    return blocks.transformer(g, hp, w, attn, ffn)
