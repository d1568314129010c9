"""Talkie: norms without weights, a gain per query head, and a share of the embeddings that every layer adds again.

Its rotation turns the other way round, for which files negate half of the columns of queries and keys.
"""

from __future__ import annotations

from dataclasses import replace

from ikcli.graph import Graph, HeadSlice, Node, Rows
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    del specs["output_norm.weight"]
    specs["output.weight"] = replace(specs["output.weight"], required=True)
    for il in range(hp.n_layer):
        own = expected.attention_specs(hp, il, bias=False, ffn_norm=None) | expected.dense_specs(hp, il, hp.at(il).n_ff)
        del own[f"blk.{il}.attn_norm.weight"]
        own[f"blk.{il}.attn_q_norm.weight"] = TensorSpec((1, hp.n_head), also=((hp.n_head,),))
        own[f"blk.{il}.layer_output_scale.weight"] = TensorSpec((1,))
        specs |= own
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)
    ones = g.rope_table([0.0] * hp.n_head, 1.0, "ones_and_zeros")  # cosines and sines of 0
    x = first = _norm(g, hp, blocks.embedded(g, hp, w), "inp_normed")
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        share = float(w.data(f"blk.{il}.layer_output_scale.weight").item())
        cur = _attention(g, hp, cfg, _norm(g, hp, x, "attn_norm"), layer, tables[il], ones)
        if il == hp.n_layer - 1:
            if g.wants_states is Rows.TOKENS:  # beside the output rows, which are computed as without them
                exact = g.exact
                found = _second_half(g, hp, cur, x, first, share, layer)
                g.il = -1
                g.states = _norm(g, hp, found, "states_norm")
                g.il, g.exact = il, exact
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_ffn_inp")
            first = g.select_outputs(first, "last_inp")
        x = _second_half(g, hp, cur, x, first, share, layer)
    g.il = -1
    x = _norm(g, hp, x, "result_norm")
    if g.wants_states is Rows.OUTPUTS:
        g.states = x
    logits = g.mul_mat(w["output.weight"], x, "result_output" if hp.logit_scale == 1 else "result_unscaled")
    return g.scale(logits, hp.logit_scale, "result_output")


def _norm(g: Graph, hp: HParams, x: Node, name: str, width: int = 0) -> Node:
    return g.norm(x, None, hp.eps, name, kind="rms", width=width)


def _attention(
    g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, table: Node | None, ones: Node
) -> Node:
    d, heads = hp.head_dim_k, {"q": hp.n_head, "k": hp.n_head_kv}
    q, k, v = (g.mul_mat(blocks.attention_matrix(hp, layer, part), x, f"{part.upper()}cur_proj") for part in "qkv")
    if table is not None:
        q, k = (g.rope(y, table, heads[part], d, f"{part.upper()}cur", neox=True) for part, y in (("q", q), ("k", k)))
    q, k = _norm(g, hp, q, "Qcur_normed", d), _norm(g, hp, k, "Kcur_normed", d)
    gains = g.concat_heads([HeadSlice(ones, 0, 1, 2)], hp.n_head, "q_ones")
    gains = g.norm(gains, layer.attn_q_norm, 0.0, "q_gains", kind="none", width=1)  # the same in every row
    q = g.gate(q, gains, "Qcur_gained", "product")
    return blocks.attend(g, hp, cfg, q, (k, v), x, layer)


def _second_half(g: Graph, hp: HParams, cur: Node, x: Node, first: Node, share: float, layer: LayerWeights) -> Node:
    """Record the rest of a layer after its attention `cur`; x is the residual, `first` the normed embeddings."""
    x = g.add(cur, x, "ffn_inp")
    x = g.add(dense_ffn(g, _norm(g, hp, x, "ffn_norm"), layer), x, "ffn_residual")
    return g.layer_out(g.add(g.scale(first, share, "embd_skip"), x, "l_out"))
