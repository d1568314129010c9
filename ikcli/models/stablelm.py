"""StableLM 1 to 2: LayerNorm, partial RoPE, norms of heads (12B); Orion: rotated pairs (2i, 2i+1).

A layer without a norm for the feed-forward part computes attention and feed-forward part in parallel.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None)
        specs[f"blk.{il}.ffn_norm.weight"] = TensorSpec((hp.n_embd,), required=False)
        specs |= expected.norms_of_all_heads(hp, il, each=True, required=False)
        specs |= expected.dense_specs(hp, il, hp.at(il).n_ff)
    specs |= expected.bias_specs(specs, "output_norm attn_norm") | expected.bias_specs(
        specs, "ffn_norm", required=False
    )
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=hp.arch == "stablelm")
    ffn = partial(dense_ffn, g)
    if "blk.0.ffn_norm.weight" not in w:
        return blocks.parallel_transformer(g, hp, w, attn, ffn)
    return blocks.transformer(g, hp, w, attn, ffn)
