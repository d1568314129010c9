"""BERT and its relatives, text encoders: bidirectional attention, norms after each part, no next token.

BERT embeds positions. nomic-bert uses RoPE, one matrix for q, k and v, and SwiGLU, or experts in every other layer.
jina-bert-v2 uses ALiBi in both directions and GEGLU, and in some models norms of q and k and a second norm after
attention, jina-bert-v3 RoPE. Rerankers tell query and document apart by embeddings of token types.
"""

from __future__ import annotations

from dataclasses import replace

from ikcli.graph import Graph, Node
from ikcli.graph.activations import SILU, Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, mlp, moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

GELU = Glu("gelu_erf")
_GATED = {"nomic-bert": SILU, "jina-bert-v2": GELU}


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    wide = TensorSpec((hp.n_embd,))
    specs = {"token_embd.weight": TensorSpec((hp.n_embd, hp.n_vocab)), "token_embd_norm.weight": wide}
    specs["token_types.weight"] = TensorSpec((hp.n_embd, hp.n_token_types), required=False)
    if hp.n_positions:
        specs["position_embd.weight"] = TensorSpec((hp.n_embd, hp.n_positions))
    for il in range(hp.n_layer):
        own = expected.attention_specs(hp, il, bias=None, ffn_norm="attn_output_norm")
        own |= _expert_specs(hp, il) if hp.has_experts(il) else expected.mlp_specs(hp, il)
        if hp.arch in _GATED:  # which may be behind one another in `ffn_up`
            own[f"blk.{il}.ffn_up.weight"] = TensorSpec((hp.n_embd, hp.n_ff), also=((hp.n_embd, 2 * hp.n_ff),))
            own[f"blk.{il}.ffn_gate.weight"] = TensorSpec((hp.n_embd, hp.n_ff), required=False)
        del own[f"blk.{il}.attn_norm.weight"]
        own[f"blk.{il}.layer_output_norm.weight"] = wide
        own |= expected.bias_specs(own, "attn_output_norm layer_output_norm")
        for name in ("attn_norm_2", "attn_q_norm", "attn_k_norm"):
            own[f"blk.{il}.{name}.weight"] = own[f"blk.{il}.{name}.bias"] = TensorSpec((hp.n_embd,), required=False)
        own |= expected.bias_specs(own, "ffn_up ffn_gate ffn_down", required=False)
        specs |= own
    specs |= expected.bias_specs(specs, "token_embd_norm")
    return specs


def _expert_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return router and experts without gates (nomic-bert-moe)."""
    specs = expected.expert_specs(hp, il, hp.n_ff_exp)
    names = ("ffn_gate_inp", "ffn_up_exps", "ffn_down_exps")
    return {f"blk.{il}.{name}.weight": replace(specs[f"blk.{il}.{name}.weight"], unless="") for name in names}


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the states of the output rows."""
    x = g.embed(w["token_embd.weight"])
    if hp.n_token_types:
        x = g.add(x, g.embed_types(w["token_types.weight"], hp.separator), "inp_typed")
    if hp.n_positions:
        x = g.add(x, g.embed(w["position_embd.weight"], "pos_embd", by_position=True), "inp_placed")
    x = blocks.norm(g, hp, x, w["token_embd_norm.weight"], "inp_norm", w.get("token_embd_norm.bias"))
    rotates = hp.arch in ("jina-bert-v3", "nomic-bert", "nomic-bert-moe")
    tables = blocks.rope_tables(g, hp, w, cfg) if rotates else (None,) * hp.n_layer
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        cur = blocks.self_attention(g, hp, cfg, x, layer, tables[il], neox=True)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_inp")
        cur = blocks.normed(g, hp, g.add(cur, x, "attn_residual"), layer, "attn_output_norm")
        if layer.get("attn_norm_2") is not None:
            cur = blocks.normed(g, hp, g.add(cur, x, "attn_residual_2"), layer, "attn_norm_2")
        part = moe_ffn(g, hp, cfg, cur, layer, act=GELU) if hp.has_experts(il) else _ffn(g, hp, cur, layer)
        cur = g.add(part, cur, "ffn_residual")
        x = g.layer_out(blocks.normed(g, hp, cur, layer, "layer_output_norm", "l_out"))
    g.il = -1
    return x


def _ffn(g: Graph, hp: HParams, x: Node, layer: LayerWeights) -> Node:
    act = _GATED.get(hp.arch)
    if act is None:
        return mlp(g, x, layer, "gelu_erf")
    if layer.ffn_up.ne1 == hp.n_ff:
        return dense_ffn(g, x, layer, act=act)
    gate = g.mul_mat(layer.ffn_up.rows(0, hp.n_ff), x, "ffn_gate")
    up = g.mul_mat(layer.ffn_up.rows(hp.n_ff, hp.n_ff), x, "ffn_up")
    par = g.swiglu(gate, up, "ffn_gate_par", act)
    return blocks.linear(g, layer.ffn_down, layer.get("ffn_down_bias"), par, "ffn_out")
