"""Blocks shared by the architectures: the layer loop, attention with a K and a V cache, dense and expert FFN.

Node names are those of the reference graphs (`attn_norm-0`, `ffn_moe_logits-3`, `l_out-3`, `result_output`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ikcli.graph import Graph, HeadSlice, Node, Per, Weight
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.rope import inverse_frequencies, magnitude, yarn_log
from ikcli.models.tensors import LayerWeights, TensorSpec, TensorSpecs, Weights

Block = Callable[[Node, LayerWeights], Node]


def transformer(g: Graph, hp: HParams, w: Weights, attn: Block, ffn: Block, ffn_norm: str = "ffn_norm") -> Node:
    """Pre-norm residual layers and the output head; `ffn_norm` names the norm of the feed-forward part.

    After the last attention only the rows whose logits were asked for go on.
    """
    x = g.scale(g.embed(w["token_embd.weight"]), hp.embedding_scale, "inp_scaled")
    for il in range(hp.n_layer):
        g.il = il
        layer = w.layer(il)
        cur = attn(g.rms_norm(x, layer.attn_norm, hp.eps, "attn_norm"), layer)
        if il == hp.n_layer - 1:
            cur = g.select_outputs(cur, "last_attn")
            x = g.select_outputs(x, "last_ffn_inp")
        x = g.add(g.scale(cur, hp.residual_scale, "attn_scaled"), x, "ffn_inp")
        cur = ffn(g.rms_norm(x, getattr(layer, ffn_norm), hp.eps, "ffn_norm"), layer)
        x = g.add(g.scale(cur, hp.residual_scale, "ffn_scaled"), x, "l_out")
    g.il = -1
    x = g.rms_norm(x, w["output_norm.weight"], hp.eps, "result_norm")
    head = w.get("output.weight") or w["token_embd.weight"]
    if hp.logit_scale == 1:
        return g.mul_mat(head, x, "result_output")
    return g.scale(g.mul_mat(head, x, "result_unscaled"), hp.logit_scale, "result_output")


def rope_table(g: Graph, hp: HParams, w: Weights) -> Node:
    """Rotation table shared by all layers."""
    factors = w.data("rope_freqs.weight") if "rope_freqs.weight" in w else None
    inv_freq = inverse_frequencies(hp.rope, hp.n_rot, factors)
    # What a file says about K*Q (log_mul) cancels YaRN's factor on cosine and sine.
    factor = hp.rope.attn_factor / (yarn_log(hp.rope, 0.1 * hp.rope.log_mul) if hp.arch == "mistral3" else 1.0)
    return g.rope_table(inv_freq.tolist(), magnitude(hp.rope, factor))


def linear(g: Graph, w: Weight, bias: Weight | None, x: Node, name: str) -> Node:
    """Matrix product and optional bias."""
    if bias is None:
        return g.mul_mat(w, x, name)
    return g.add(g.mul_mat(w, x, f"{name}_mm"), bias, name)


def self_attention(
    g: Graph,
    hp: HParams,
    cfg: GraphConfig,
    x: Node,
    layer: LayerWeights,
    table: Node | None,
    *,
    neox: bool,
    norm_last: bool = False,
) -> Node:
    """Grouped-query attention with rotated q and k, optional biases and optional norms of q and k heads.

    No `table`: without rotation. `norm_last`: q and k are normed after the rotation.
    """
    hp = hp.at(layer.il)
    q = _project(g, hp, x, layer, table, "q", hp.n_head, neox, norm_last)
    k = _project(g, hp, x, layer, table, "k", hp.n_head_kv, neox, norm_last)
    if hp.temperature_scale:
        q = g.pos_scale(q, hp.temperature_scale, hp.rope.n_ctx_orig, "Qcur_tempered")
    v = linear(g, layer.attn_v, layer.get("attn_v_bias"), x, "Vcur")
    if cfg.k_hadamard:
        q = g.hadamard(q, hp.n_head, hp.head_dim_k, "Qcur_hadamard")
        k = g.hadamard(k, hp.n_head_kv, hp.head_dim_k, "Kcur_hadamard")
    if cfg.v_hadamard:
        v = g.hadamard(v, hp.n_head_kv, hp.head_dim_v, "Vcur_hadamard")
    per = Per.WINDOW if hp.window and cfg.n_window else Per.CELL
    k_cache = g.cache("k", hp.n_head_kv * hp.head_dim_k, cfg.type_k, per=per)
    v_cache = g.cache("v", hp.n_head_kv * hp.head_dim_v, cfg.type_v, per=per)
    g.kv_store(k_cache, k, "k_cache_view")
    g.kv_store(v_cache, v, "v_cache_view")
    kqv = g.attention(
        [HeadSlice(q, 0, hp.head_dim_k, hp.head_dim_k)],
        [HeadSlice(k_cache, 0, hp.head_dim_k, hp.head_dim_k)],
        HeadSlice(v_cache, 0, hp.head_dim_v, hp.head_dim_v),
        "kqv",
        n_head=hp.n_head,
        n_head_kv=hp.n_head_kv,
        scale=hp.attention_scale or 1.0 / math.sqrt(hp.head_dim_k),
        flash=cfg.flash_attn,
        heads_per_step=heads_per_step(cfg, hp.n_head),
        window=hp.window,
    )
    if cfg.v_hadamard:
        kqv = g.hadamard(kqv, hp.n_head, hp.head_dim_v, "kqv_hadamard")
    return linear(g, layer.attn_output, layer.get("attn_output_bias"), kqv, "kqv_out")


def _project(
    g: Graph,
    hp: HParams,
    x: Node,
    layer: LayerWeights,
    table: Node | None,
    which: str,
    n_head: int,
    neox: bool,
    norm_last: bool,
) -> Node:
    """q or k: projection, norm of each head (or of all together) if the model has one, rotation."""
    name = f"{which.upper()}cur"
    cur = linear(g, getattr(layer, f"attn_{which}"), layer.get(f"attn_{which}_bias"), x, f"{name}_proj")
    norm = layer.get(f"attn_{which}_norm")
    if norm is not None and not norm_last:
        cur = g.rms_norm(cur, norm, hp.eps, f"{name}_normed")
    if table is not None:
        cur = g.rope(cur, table, n_head, hp.head_dim_k, name, neox=neox)
    if norm is not None and norm_last:
        cur = g.rms_norm(cur, norm, hp.eps, f"{name}_normed")
    return cur


def heads_per_step(cfg: GraphConfig, n_head: int) -> int:
    """Heads whose K*Q is materialised at once under `-amb` without flash attention; 0 = all."""
    mib = cfg.n_ctx * n_head * cfg.n_ubatch * 4 >> 20
    if cfg.flash_attn or cfg.amb <= 0 or mib <= cfg.amb:
        return 0
    steps = min(-(-mib // cfg.amb), n_head)
    return -(-n_head // steps)


def feed_forward(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights) -> Node:
    """The feed-forward part of a block: dense, or routed experts with shared ones (perhaps gated) beside them."""
    if not hp.has_experts(layer.il):
        return dense_ffn(g, x, layer)
    hp = hp.at(layer.il)
    if not hp.n_ff_shexp:
        return moe_ffn(g, hp, cfg, x, layer, "ffn_out")
    moe_out = moe_ffn(g, hp, cfg, x, layer)
    shared = dense_ffn(g, x, layer, "ffn_shexp", "_shexp")
    gate = layer.get("ffn_gate_inp_shexp")
    if gate is not None:
        gates = g.mul_mat(replace(gate, shape=(hp.n_embd, 1)), x, "shared_expert_gate")
        shared = g.gate(shared, gates, "ffn_shexp_gated")
    return g.add(moe_out, shared, "ffn_out")


def dense_ffn(g: Graph, x: Node, layer: LayerWeights, name: str = "ffn_out", suffix: str = "") -> Node:
    """down(silu(gate x) * up x); suffix "_shexp" for the shared expert."""
    up = linear(g, getattr(layer, f"ffn_up{suffix}"), layer.get(f"ffn_up{suffix}_bias"), x, f"ffn_up{suffix}")
    gate = linear(g, getattr(layer, f"ffn_gate{suffix}"), layer.get(f"ffn_gate{suffix}_bias"), x, f"ffn_gate{suffix}")
    par = g.swiglu(gate, up, f"ffn_gate_par{suffix}")
    return linear(g, getattr(layer, f"ffn_down{suffix}"), layer.get(f"ffn_down{suffix}_bias"), par, name)


def moe_ffn(g: Graph, hp: HParams, cfg: GraphConfig, x: Node, layer: LayerWeights, name: str = "ffn_moe_out") -> Node:
    """Routed experts: choose, group tokens by expert, compute, add up weighted."""
    logits = g.mul_mat(layer.ffn_gate_inp, x, "ffn_moe_logits")
    # Group-limited routing belongs to sigmoid gating (DeepSeek-V3); older files select over all experts.
    grouped = hp.expert_gating == "sigmoid"
    route = g.moe_route(
        logits,
        layer.get("exp_probs_b_bias"),
        "ffn_moe_topk",
        n_used=hp.n_expert_used,
        gating=hp.expert_gating,
        norm=hp.expert_weights_norm,
        scale=hp.expert_weights_scale,
        n_group=hp.n_expert_groups if grouped else 1,
        n_group_used=hp.n_expert_groups_used if grouped else 1,
        ser=cfg.ser,
    )
    plan = g.moe_sort(route, hp.n_expert, "ffn_moe_plan")
    up, gate = layer.ffn_up_exps, layer.ffn_gate_exps
    if cfg.fmoe and up.type == gate.type:
        par = g.moe_up_gate(up, gate, x, plan, "ffn_moe_gate_par")
    else:
        up_x = g.mul_mat_id(up, x, plan, "ffn_moe_up")
        par = g.swiglu(g.mul_mat_id(gate, x, plan, "ffn_moe_gate"), up_x, "ffn_moe_gate_par")
    experts = g.mul_mat_id(layer.ffn_down_exps, par, plan, "ffn_moe_down", sorted_in=True)
    return g.moe_sum(experts, route, plan, name)


# --- expected tensors -------------------------------------------------------------------------------------------------
def base_specs(hp: HParams) -> TensorSpecs:
    """Tensors outside the blocks."""
    return {
        "token_embd.weight": TensorSpec((hp.n_embd, hp.n_vocab)),
        "output_norm.weight": TensorSpec((hp.n_embd,)),
        "output.weight": TensorSpec((hp.n_embd, hp.n_vocab), required=False),
    }


def attention_specs(
    hp: HParams, il: int, *, bias: bool | None, qk_norm: bool | None = False, ffn_norm: str = "ffn_norm"
) -> TensorSpecs:
    """Norms and projections of one block; bias, qk_norm None = they are optional."""
    hp = hp.at(il)
    q, k, v = hp.n_head * hp.head_dim_k, hp.n_head_kv * hp.head_dim_k, hp.n_head_kv * hp.head_dim_v
    specs = {
        "attn_norm.weight": TensorSpec((hp.n_embd,)),
        "attn_q.weight": TensorSpec((hp.n_embd, q)),
        "attn_k.weight": TensorSpec((hp.n_embd, k)),
        "attn_v.weight": TensorSpec((hp.n_embd, v)),
        "attn_output.weight": TensorSpec((hp.n_head * hp.head_dim_v, hp.n_embd)),
        "attn_output.bias": TensorSpec((hp.n_embd,), required=False),
        f"{ffn_norm}.weight": TensorSpec((hp.n_embd,)),
    }
    if bias is not False:
        for name, n in (("q", q), ("k", k), ("v", v)):
            specs[f"attn_{name}.bias"] = TensorSpec((n,), required=bool(bias))
    if qk_norm is not False:
        norm = TensorSpec((hp.head_dim_k,), required=bool(qk_norm))
        specs["attn_q_norm.weight"] = specs["attn_k_norm.weight"] = norm
    return in_block(il, specs)


def feed_forward_specs(hp: HParams, il: int) -> TensorSpecs:
    """What `feed_forward` needs."""
    hp = hp.at(il)
    if not hp.has_experts(il):
        return dense_specs(hp, il, hp.n_ff)
    specs = expert_specs(hp, il, hp.n_ff_exp)
    specs[f"blk.{il}.exp_probs_b.bias"] = TensorSpec((hp.n_expert,), required=False)
    return specs | (dense_specs(hp, il, hp.n_ff_shexp, "_shexp") if hp.n_ff_shexp else {})


def dense_specs(hp: HParams, il: int, n_ff: int, suffix: str = "") -> TensorSpecs:
    """A dense feed-forward block."""
    specs = {
        f"ffn_gate{suffix}.weight": TensorSpec((hp.n_embd, n_ff)),
        f"ffn_up{suffix}.weight": TensorSpec((hp.n_embd, n_ff)),
        f"ffn_down{suffix}.weight": TensorSpec((n_ff, hp.n_embd)),
        f"ffn_gate{suffix}.bias": TensorSpec((n_ff,), required=False),
        f"ffn_up{suffix}.bias": TensorSpec((n_ff,), required=False),
        f"ffn_down{suffix}.bias": TensorSpec((hp.n_embd,), required=False),
    }
    return in_block(il, specs)


def expert_specs(hp: HParams, il: int, n_ff: int) -> TensorSpecs:
    """Router and routed experts."""
    specs = {
        "ffn_gate_inp.weight": TensorSpec((hp.n_embd, hp.n_expert)),
        "ffn_gate_exps.weight": TensorSpec((hp.n_embd, n_ff, hp.n_expert)),
        "ffn_up_exps.weight": TensorSpec((hp.n_embd, n_ff, hp.n_expert)),
        "ffn_down_exps.weight": TensorSpec((n_ff, hp.n_embd, hp.n_expert)),
    }
    return in_block(il, specs)


def in_block(il: int, specs: TensorSpecs) -> TensorSpecs:
    """Names with the prefix of block il."""
    return {f"blk.{il}.{name}": spec for name, spec in specs.items()}
