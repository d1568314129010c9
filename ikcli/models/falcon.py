"""Falcon: attention and feed-forward part in parallel, one norm for both (7B) or one each (40B), GELU."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import mlp
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, fused=True, ffn_norm=None)
        specs[f"blk.{il}.attn_norm_2.weight"] = TensorSpec((hp.n_embd,), required=False)
        specs |= expected.mlp_specs(hp, il)
    specs |= expected.bias_specs(specs, "output_norm attn_norm attn_norm_2")
    specs |= expected.bias_specs(specs, "attn_qkv attn_output ffn_up ffn_down", required=False)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    ffn = partial(mlp, g)
    attn_norm = "attn_norm_2" if "blk.0.attn_norm_2.weight" in w else "attn_norm"
    return blocks.parallel_transformer(g, hp, w, attn, ffn, attn_norm)
