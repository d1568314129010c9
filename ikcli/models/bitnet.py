"""BitNet b1.58: matrices of -1, 0 and 1 whose scales may be beside them, norms before the last matrix of each part.

`bitnet` has SiLU (unless the file says otherwise), `bitnet-25` and `bitnet-b1.58` a squared ReLU.
"""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

_SCALED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    specs["rope_freqs.weight"] = TensorSpec((hp.n_rot // 2,), required=False)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None, fused=False)
        specs |= expected.dense_specs(hp, il, hp.n_ff)
        norms = {"attn_sub_norm.weight": hp.n_head * hp.head_dim_v, "ffn_sub_norm.weight": hp.n_ff}
        specs |= expected.in_block(il, {name: TensorSpec((width,)) for name, width in norms.items()})
        specs |= expected.in_block(il, {f"{name}.scale": TensorSpec((1,), required=False) for name in _SCALED})
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    def product(x: Node, layer: LayerWeights, which: str, name: str) -> Node:
        return blocks.linear(g, getattr(layer, which), layer.get(f"{which}_bias"), x, name)

    def attn(x: Node, layer: LayerWeights) -> Node:
        q, k, v = (product(x, layer, f"attn_{which}", f"{which.upper()}cur_proj") for which in "qkv")
        q = blocks.rotated(g, hp, q, layer, tables[layer.il], "q", hp.n_head, True)
        k = blocks.rotated(g, hp, k, layer, tables[layer.il], "k", hp.n_head_kv, True)
        heads = blocks.attended(g, hp, cfg, q, (k, v), x, layer)
        return product(blocks.normed(g, hp, heads, layer, "attn_sub_norm"), layer, "attn_output", "kqv_out")

    def ffn(x: Node, layer: LayerWeights) -> Node:
        up, gate = product(x, layer, "ffn_up", "ffn_up"), product(x, layer, "ffn_gate", "ffn_gate")
        par = g.swiglu(gate, up, "ffn_gate_par", Glu(hp.act))
        return product(blocks.normed(g, hp, par, layer, "ffn_sub_norm"), layer, "ffn_down", "ffn_out")

    return blocks.transformer(g, hp, w, attn, ffn)
