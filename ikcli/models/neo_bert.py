"""NeoBERT, a text encoder: norms before each part, rotated pairs, gate and up in one matrix.

The matrix for q, k and v has the three of a head behind one another, head by head, as in the checkpoint.
"""

from __future__ import annotations

from functools import partial

from ikcli.graph import Graph, HeadSlice, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import fused_dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    wide = TensorSpec((hp.n_embd,))
    specs = {"token_embd.weight": TensorSpec((hp.n_embd, hp.n_vocab)), "enc.output_norm.weight": wide}
    for il in range(hp.n_layer):
        own = expected.attention_specs(hp, il, bias=False, fused=True) | expected.fused_dense_specs(hp, il)
        specs |= {name: spec for name, spec in own.items() if name.endswith(".weight")}
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the states of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def attn(x: Node, layer: LayerWeights) -> Node:
        d, cur = hp.head_dim_k, g.mul_mat(layer.attn_qkv, x, "wqkv")
        q, k, v = (
            g.concat_heads([HeadSlice(cur, i * d, d, 3 * d)], hp.n_head, f"{part}cur_proj")
            for i, part in enumerate("QKV")
        )
        q, k = (
            blocks.rotated(g, hp, part, layer, tables[layer.il], which, hp.n_head, neox=False)
            for part, which in ((q, "q"), (k, "k"))
        )
        return blocks.attend(g, hp, cfg, q, (k, v), x, layer)

    return blocks.transformer(g, hp, w, attn, partial(fused_dense_ffn, g, hp))
