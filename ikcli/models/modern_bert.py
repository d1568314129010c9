"""ModernBERT, a text encoder: norms before each part, rotation, windows in most layers, gate and up in one matrix."""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, Node
from ikcli.graph.activations import SILU, Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import fused_dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    wide = TensorSpec((hp.n_embd,))
    specs = expected.base_specs(hp) | {"token_embd_norm.weight": wide}
    del specs["output.weight"]
    for il in range(hp.n_layer):
        own = expected.attention_specs(hp, il, bias=None)
        own[f"blk.{il}.attn_norm.weight"] = TensorSpec((hp.n_embd,), required=il > 0)  # that of the embeddings serves
        own |= expected.fused_dense_specs(hp, il)
        specs |= own | expected.bias_specs(own, "attn_norm ffn_norm ffn_up ffn_down", required=False)
    return specs | expected.bias_specs(specs, "token_embd_norm output_norm", required=False)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the states of the output rows."""
    attn = blocks.attention_block(g, hp, w, cfg, neox=True)
    ffn = partial(fused_dense_ffn, g, hp, act=SILU if hp.act == "silu" else Glu("gelu_erf"))
    return blocks.transformer(g, hp, w, attn, ffn)
