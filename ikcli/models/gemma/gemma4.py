"""Gemma 4: layers with and without windows differ in heads; the last ones use keys and values of earlier ones.

Values are normed without weights. Where a layer has no value matrix, its values are the keys before their norm. Layers
may have their own embeddings, a scale, and experts beside the dense part.
"""

from __future__ import annotations

import math

from ikcli.errors import FormatError
from ikcli.graph import Graph, Node, Rows
from ikcli.graph.activations import Glu
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

GELU = Glu("gelu")


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    n_own = hp.n_embd_per_layer
    specs = expected.base_specs(hp)
    n_rot = max((own.n_rot for own in map(hp.at, range(hp.n_layer)) if not own.window), default=hp.n_rot)
    specs["rope_freqs.weight"] = TensorSpec((n_rot // 2,), required=False)
    if n_own:
        specs |= own_specs(hp)
    for il in range(hp.n_layer):
        specs |= layer_specs(hp, il)
        specs[f"blk.{il}.layer_output_scale.weight"] = TensorSpec((1,), required=False)
        if hp.has_experts(il):
            specs |= _expert_specs(hp, il)
    return specs


def own_specs(hp: HParams) -> TensorSpecs:
    """Return the tensors of the layers' own embeddings that are outside of blocks."""
    n_own = hp.n_embd_per_layer
    return {
        "per_layer_token_embd.weight": TensorSpec((n_own * hp.n_layer, hp.n_vocab)),
        "per_layer_model_proj.weight": TensorSpec((hp.n_embd, n_own * hp.n_layer)),
        "per_layer_proj_norm.weight": TensorSpec((n_own,)),
    }


def layer_specs(hp: HParams, il: int) -> TensorSpecs:
    """Return the tensors of block il without those of experts."""
    row = TensorSpec((hp.n_embd,))
    attention = expected.attention_specs(hp, il, bias=False, qk_norm=True, fused=False)
    optional = ("attn_v.weight",) if il < hp.n_layer_kv else ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    for name in optional:
        attention[f"blk.{il}.{name}"] = TensorSpec(attention[f"blk.{il}.{name}"].shape, required=False)
    specs = {"post_attention_norm.weight": row, "post_ffw_norm.weight": row}
    if hp.n_embd_per_layer:
        specs["inp_gate.weight"] = TensorSpec((hp.n_embd, hp.n_embd_per_layer))
        specs["proj.weight"] = TensorSpec((hp.n_embd_per_layer, hp.n_embd))
        specs["post_norm.weight"] = row
    return attention | expected.dense_specs(hp, il, hp.at(il).n_ff) | expected.in_block(il, specs)


def _expert_specs(hp: HParams, il: int) -> TensorSpecs:
    row = TensorSpec((hp.n_embd,))
    specs = {
        "ffn_gate_inp.scale": row,
        "pre_ffw_norm_2.weight": row,
        "post_ffw_norm_1.weight": row,
        "post_ffw_norm_2.weight": row,
        "ffn_down_exps.scale": TensorSpec((hp.n_expert,), required=False),
    }
    return expected.expert_specs(hp, il, hp.n_ff_exp) | expected.in_block(il, specs)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    tables = blocks.rope_tables(g, hp, w, cfg)
    x = g.scale(g.embed(w["token_embd.weight"]), hp.embedding_scale, "inp_scaled")
    x = g.with_media(x)
    own = own_embeddings(g, hp, w, x) if hp.n_embd_per_layer else None
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        cur = attention(g, hp, cfg, g.rms_norm(x, layer.attn_norm, hp.eps, "attn_norm"), layer, tables[il])
        part = (
            None
            if own is None
            else blocks.columns(g, own, il * hp.n_embd_per_layer, hp.n_embd_per_layer, "inp_this_layer")
        )
        if il == hp.n_layer - 1:
            if g.wants_states is Rows.TOKENS:  # beside the output rows, which are computed as without them
                exact = g.exact
                g.states = blocks.states_of(g, hp, w, _second_half(g, hp, w, cfg, cur, x, part, layer))
                g.il, g.exact = il, exact
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_ffn_inp")
            part = None if part is None else g.select_outputs(part, "last_inp_this_layer")
        x = _second_half(g, hp, w, cfg, cur, x, part, layer)
    g.il = -1
    return blocks.output(g, hp, w, x)


def _second_half(
    g: Graph,
    hp: HParams,
    w: Weights,
    cfg: GraphConfig,
    cur: Node,
    x: Node,
    part: Node | None,
    layer: LayerWeights,
) -> Node:
    """Record the rest of a layer after its attention `cur`; x is the residual, `part` the layer's own embedding."""
    x = g.add(g.rms_norm(cur, layer.post_attention_norm, hp.eps, "attn_post_norm"), x, "attn_out")
    cur = _feed_forward(g, hp, cfg, x, layer)
    x = g.add(g.rms_norm(cur, layer.post_ffw_norm, hp.eps, "ffn_post_norm"), x, "ffn_residual")
    if part is not None:
        x = g.add(x, own_part(g, hp, x, part, layer), "per_layer_residual")
    if layer.get("layer_output_scale") is not None:
        x = g.scale(x, float(w.data(f"blk.{layer.il}.layer_output_scale.weight").item()), "l_out")
    return g.layer_out(x)


def attention(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, table: Node | None) -> Node:
    """Record the attention of a layer, with keys and values of its own or of an earlier layer."""
    own = hp.at(layer.il)
    q = g.mul_mat(layer.attn_q, x, "Qcur_proj")
    q = blocks.rotated(g, own, q, layer, table, "q", own.n_head, neox=True)
    if layer.il >= hp.n_layer_kv:
        return blocks.attend(g, own, cfg, q, None, x, layer, kv_layer=kv_layer(hp, layer.il))
    k = g.mul_mat(layer.attn_k, x, "Kcur_proj")
    matrix = layer.get("attn_v")
    v = g.norm(k if matrix is None else g.mul_mat(matrix, x, "Vcur_proj"), None, hp.eps, "Vcur", kind="rms",
               width=own.head_dim_v)  # fmt: skip
    k = blocks.rotated(g, own, k, layer, table, "k", own.n_head_kv, neox=True)
    return blocks.attend(g, own, cfg, q, (k, v), x, layer)


def kv_layer(hp: HParams, il: int) -> int:
    """Return the layer whose keys and values layer il uses: the last one of its kind that has any."""
    own = hp.at(il)
    found = next((i for i in reversed(range(min(hp.n_layer_kv, il + 1))) if hp.at(i).window == own.window), None)
    if found is None or hp.at(found).n_head_kv != own.n_head_kv:
        raise FormatError(
            f"{hp.source}: layer {il} should use keys and values of an earlier layer of its kind, but no layer has any "
            f"that fit; see {hp.arch}.attention.shared_kv_layers"
        )
    return found


def _feed_forward(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights) -> Node:
    """Record the dense part, and beside it experts with separate norms."""
    normed = g.rms_norm(x, layer.ffn_norm, hp.eps, "ffn_norm")
    if not hp.has_experts(layer.il):
        return dense_ffn(g, normed, layer, act=GELU)
    dense = dense_ffn(g, normed, layer, "ffn_mlp", act=GELU)
    dense = g.rms_norm(dense, layer.post_ffw_norm_1, hp.eps, "ffn_post_norm_1")
    routed = g.rms_norm(x, layer.ffn_gate_inp_scale, hp.eps, "ffn_moe_inp")
    logits = g.mul_mat(
        layer.ffn_gate_inp, g.scale(routed, 1 / math.sqrt(hp.n_embd), "ffn_moe_scaled"), "ffn_moe_logits"
    )
    normed = g.rms_norm(x, layer.pre_ffw_norm_2, hp.eps, "ffn_norm_2")
    experts = moe_ffn(g, hp.at(layer.il), cfg, normed, layer, act=GELU, logits=logits)
    return g.add(dense, g.rms_norm(experts, layer.post_ffw_norm_2, hp.eps, "ffn_post_norm_2"), "ffn_moe_combined")


def own_embeddings(g: Graph, hp: HParams, w: Weights, x: Node) -> Node:
    """Return the embeddings of all layers side by side: the token's, plus a projection of the first input."""
    own = g.embed(w["per_layer_token_embd.weight"], "inp_per_layer_embd")
    own = g.scale(own, math.sqrt(hp.n_embd_per_layer), "inp_per_layer_scaled")
    proj = g.mul_mat(w["per_layer_model_proj.weight"], x, "per_layer_proj")
    # The projection is divided by sqrt(n_embd), which the norm undoes, but for its epsilon.
    proj = g.rms_norm(proj, w["per_layer_proj_norm.weight"], hp.eps * hp.n_embd, "per_layer_proj_normed")
    return g.scale(g.add(proj, own, "per_layer_sum"), 1 / math.sqrt(2), "inp_per_layer")


def own_part(g: Graph, hp: HParams, x: Node, part: Node, layer: LayerWeights) -> Node:
    """Record the contribution of a layer's own embedding."""
    gated = g.swiglu(g.mul_mat(layer.inp_gate, x, "per_layer_gate"), part, "per_layer_gated", GELU)
    return g.rms_norm(g.mul_mat(layer.proj, gated, "per_layer_out"), layer.post_norm, hp.eps, "per_layer_embd_out")
