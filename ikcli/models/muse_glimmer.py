"""Muse Glimmer: normed embeddings, norms before and after each part, gated attention; layers with windows rotate."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

POST_NORM_EPS = 1e-8


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        own = hp.at(il)
        specs |= expected.attention_specs(hp, il, bias=None, qk_norm=True)
        specs[f"blk.{il}.attn_gate.weight"] = TensorSpec((hp.n_embd, own.n_head * own.head_dim_v))
        specs |= expected.dense_specs(hp, il, own.n_ff)
        for name in ("post_attention_norm", "post_ffw_norm"):
            specs[f"blk.{il}.{name}.weight"] = TensorSpec((hp.n_embd,))
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        cur = blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=False)
        return g.rms_norm(cur, layer.post_attention_norm, POST_NORM_EPS, "attn_post_norm")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return g.rms_norm(blocks.dense_ffn(g, x, layer), layer.post_ffw_norm, POST_NORM_EPS, "ffn_post_norm")

    return blocks.transformer(g, hp, w, attn, ffn, norm_embeddings=True)
