"""GLM-4 (0414) and PLaMo 3: norms before and after attention and feed-forward part, one matrix for gate and up.

PLaMo 3 normalises heads and has windows in seven of eight layers.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import fused_dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        plamo, norms = hp.arch == "plamo3", expected.post_norm_specs(hp, il)
        specs |= expected.attention_specs(hp, il, bias=None, qk_norm=plamo)
        specs |= expected.fused_dense_specs(hp, il)
        specs |= expected.without_ending(norms) if plamo else norms
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    # Converters permute queries and keys of the models with images (GLM-4.1V), whose rotation has sections.
    attn = blocks.attention_block(g, hp, w, cfg, neox=bool(hp.rope.sections) or hp.arch == "plamo3")
    attn = blocks.normed_after(g, attn, "post_attention_norm", hp.eps, "post_attn_norm")
    ffn = blocks.normed_after(g, partial(fused_dense_ffn, g, hp), "post_ffw_norm", hp.eps, "post_ffw_norm")
    return blocks.transformer(g, hp, w, attn, ffn)
