"""OLMo 2 and 3: norms only after attention and feed-forward part, norms over all query and over all key heads.

OLMo 3 has windows in three of four layers. So has the larger EXAONE 4, where only these rotate; its heads are normed
one by one.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Expected tensors of the file."""
    specs = expected.base_specs(hp)
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, ffn_norm="post_attention_norm")
        del specs[f"blk.{il}.attn_norm.weight"]
        specs |= expected.dense_specs(hp, il, hp.at(il).n_ff)
        specs[f"blk.{il}.post_ffw_norm.weight"] = TensorSpec((hp.n_embd,))
        own = hp.at(il)
        for which, n_head in (("q", own.n_head), ("k", own.n_head_kv)):
            n_normed = 1 if hp.arch == "exaone4" else n_head
            specs[f"blk.{il}.attn_{which}_norm.weight"] = TensorSpec((n_normed * own.head_dim_k,))
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph; returns the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        cur = blocks.self_attention(g, hp, cfg, x, layer, tables[layer.il], neox=True)
        return g.rms_norm(cur, layer.post_attention_norm, hp.eps, "attn_post_norm")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        return g.rms_norm(blocks.dense_ffn(g, x, layer), layer.post_ffw_norm, hp.eps, "ffn_post_norm")

    return blocks.transformer(g, hp, w, attn, ffn)
