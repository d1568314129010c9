"""Arctic: a dense feed-forward part after attention, and experts in parallel on the residual before both."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None)
        specs |= expected.dense_specs(hp, il, hp.n_embd)
        specs |= expected.expert_specs(hp, il, hp.n_ff_exp)
        specs[f"blk.{il}.ffn_norm_exps.weight"] = TensorSpec((hp.n_embd,))
    return specs


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)

    x = g.embed(w["token_embd.weight"])
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        normed = blocks.normed(g, hp, x, layer, "attn_norm")
        cur = blocks.self_attention(g, hp, cfg, normed, layer, tables[il], neox=False)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_inp")
        dense = g.add(cur, x, "ffn_inp")
        dense = g.add(dense_ffn(g, blocks.normed(g, hp, dense, layer, "ffn_norm"), layer), dense, "ffn_dense")
        experts = moe_ffn(g, hp, cfg, blocks.normed(g, hp, x, layer, "ffn_norm_exps"), layer)
        x = g.layer_out(g.add(experts, dense, "l_out"))
    g.il = -1
    return blocks.output(g, hp, w, x)
