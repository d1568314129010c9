"""Llama 1-3, Mistral, Mixtral (experts), InternLM 2, XVERSE: RMS norm, rotated pairs (2i, 2i+1), SwiGLU.

With factors MiniCPM, with ALiBi Refact and Baichuan 13B, with rotated halves EXAONE 3. Biases are optional.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp) | (expected.long_rope(hp, 0) if hp.arch == "minicpm" else {})  # MiniCPM 4
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None)
        specs |= expected.expert_specs(hp, il, hp.n_ff_exp) if hp.n_expert else expected.dense_specs(hp, il, hp.n_ff)
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=hp.arch == "exaone", rotates=not hp.max_alibi_bias)
    ffn = partial(moe_ffn, g, hp, cfg) if hp.n_expert else partial(dense_ffn, g)
    return blocks.transformer(g, hp, w, attn, ffn)
