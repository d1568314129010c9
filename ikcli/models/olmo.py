"""OLMo 1: LayerNorm without weights; q, k and v may be clamped."""

from __future__ import annotations

from ikcli.graph import Graph, Node
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    specs = expected.base_specs(hp)
    for il in range(hp.n_layer):
        specs |= expected.attention_specs(hp, il, bias=None) | expected.dense_specs(hp, il, hp.n_ff)
    return {name: spec for name, spec in specs.items() if not name.endswith("norm.weight")}


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)
    x = blocks.embedded(g, hp, w)
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        cur = blocks.self_attention(g, hp, cfg, g.norm(x, None, hp.eps, "attn_norm"), layer, tables[il], neox=False)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_ffn_inp")
        x = g.add(cur, x, "ffn_inp")
        x = g.layer_out(g.add(dense_ffn(g, g.norm(x, None, hp.eps, "ffn_norm"), layer), x, "l_out"))
    g.il = -1
    head = w.get("output.weight") or w["token_embd.weight"]
    return blocks.linear(g, head, None, g.norm(x, None, hp.eps, "result_norm"), "result_output")
