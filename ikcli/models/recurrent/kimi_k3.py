"""Kimi K3: the layers of Kimi Linear, which attend to earlier outputs, and experts between narrower projections.

The residual starts anew every few layers: what it was by then is kept, and what a later part reads is the residual and
all that is kept, mixed by a soft-max over scores (`ResidualAttn`). Latent attention is gated per element. Experts work
on fewer columns than the model has, but are chosen by all; all feed-forward parts have the activation SiTU.
"""

from __future__ import annotations

from dataclasses import replace

from ikcli.graph import Graph, Node, Weight
from ikcli.graph.activations import Glu
from ikcli.graph.ops_streams import ResidualAttn
from ikcli.models import blocks, expected
from ikcli.models.config import GraphConfig
from ikcli.models.feed_forward import dense_ffn, moe_ffn
from ikcli.models.hparams import HParams
from ikcli.models.recurrent import kimi_linear
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights


def tensor_shapes(hp: HParams) -> TensorSpecs:
    """Return the expected tensors of the file."""
    return expected.with_blocks(hp, block_shapes) | {"output_res_score.weight": TensorSpec((hp.n_embd,))}


def block_shapes(hp: HParams, il: int) -> TensorSpecs:
    """Return the expected tensors of block il."""
    specs = kimi_linear.block_shapes(hp, il)
    if not hp.is_recurrent(il):
        specs[f"blk.{il}.attn_gate.weight"] = TensorSpec((hp.n_embd, hp.n_head * hp.head_dim_v), required=False)
    own = {f"{part}_res_score.weight": TensorSpec((hp.n_embd,)) for part in ("attn", "ffn")}
    if hp.has_experts(il) and hp.n_embd_exp:
        specs |= expected.expert_specs(replace(hp, n_embd=hp.n_embd_exp), il, hp.n_ff_exp)
        own["ffn_gate_inp.weight"] = TensorSpec((hp.n_embd, hp.n_expert))
        own["ffn_routed_down.weight"] = TensorSpec((hp.n_embd, hp.n_embd_exp))
        own["ffn_routed_norm.weight"] = TensorSpec((hp.n_embd_exp,), required=False)
        own["ffn_routed_up.weight"] = TensorSpec((hp.n_embd_exp, hp.n_embd))
    return specs | expected.in_block(il, own)


def build(g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
    """Record the graph and return the logits of the output rows."""
    attn = kimi_linear.layers(g, hp, w, cfg).attn
    x = blocks.embedded(g, hp, w)
    kept: Node | None = None
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        cur = x if kept is None else _mixed(g, hp, kept, x, layer.attn_res_score, "attn_res")
        starts = il % hp.residual_block == 0
        if kept is None or starts:
            kept = x if kept is None else g.concat([kept, x], "res_kept")
        cur = attn(blocks.normed(g, hp, cur, layer, "attn_norm"), layer)
        if il == hp.n_layer - 1:
            cur, x = g.select_outputs(cur, "last_attn"), g.select_outputs(x, "last_x")
            kept = g.select_outputs(kept, "last_kept")
        x = cur if starts else g.add(cur, x, "ffn_inp")
        mixed = _mixed(g, hp, kept, x, layer.ffn_res_score, "ffn_res")
        cur = _feed_forward(g, hp, cfg, blocks.normed(g, hp, mixed, layer, "ffn_norm"), layer)
        x = g.layer_out(g.add(cur, x, "l_out"))
    assert kept is not None
    g.il = -1
    return blocks.output(g, hp, w, _mixed(g, hp, kept, x, w["output_res_score.weight"], "output_res"))


def _mixed(g: Graph, hp: HParams, kept: Node, x: Node, score: Weight, name: str) -> Node:
    return g.record(ResidualAttn(kept, x, score, hp.eps), name)


def _feed_forward(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights) -> Node:
    """Record a dense part, or experts beside shared ones."""
    act = Glu("situ", hp.situ_linear_beta, hp.situ_beta)
    if not hp.has_experts(layer.il):
        return dense_ffn(g, x, layer, act=act)
    down, logits, inputs = layer.get("ffn_routed_down"), None, x
    if down is not None:
        logits = g.mul_mat(layer.ffn_gate_inp, x, "ffn_moe_logits")
        inputs = g.mul_mat(down, x, "ffn_routed_down")
    out = moe_ffn(g, hp, cfg, inputs, layer, act=act, logits=logits)
    norm = layer.get("ffn_routed_norm")
    if norm is not None:
        out = g.rms_norm(out, norm, hp.eps, "ffn_routed_norm")
    if down is not None:
        out = g.mul_mat(layer.ffn_routed_up, out, "ffn_routed_up")
    if not hp.n_ff_shexp:
        return out
    return g.add(out, dense_ffn(g, x, layer, "ffn_shexp", "_shexp", act), "ffn_out")
