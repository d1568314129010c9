"""Ling 2 and 3 (bailing)."""

from __future__ import annotations

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.deepseek import mla_keys, split_kv_b
from ikcli.convert.archs.recurrent.kimi import conv, decay


def _gate(m: b.Build, found: b.Found) -> None:
    """Name the gate: recurrent layers have a row per value column, the others one per head."""
    recurrent = m.metadata[f"{m.arch}.attention.head_count_kv"][found.block] == 0
    m.plain(found, f"blk.{found.block}.{'ssm_g_a' if recurrent else 'attn_gate'}{found.suffix}")


LING2: b.Table = {"layers.*.mlp.gate.expert_bias": "blk.*.exp_probs_b.bias"}
LING3: b.Table = {
    "layers.*.attention.q_a_proj": "blk.*.attn_q_a",
    "layers.*.attention.q_a_layernorm": "blk.*.attn_q_a_norm",
    "layers.*.attention.q_b_proj": "blk.*.attn_q_b",
    "layers.*.attention.kv_a_proj_with_mqa": "blk.*.attn_kv_a_mqa",
    "layers.*.attention.kv_a_layernorm": "blk.*.attn_kv_a_norm",
    "layers.*.attention.kv_b_proj": split_kv_b,
    "layers.*.attention.q_proj": "blk.*.attn_q",
    "layers.*.attention.k_proj": "blk.*.attn_k",
    "layers.*.attention.v_proj": "blk.*.attn_v",
    "layers.*.attention.o_proj": "blk.*.attn_output",
    "layers.*.attention.g_proj": _gate,
    "layers.*.attention.f_proj": "blk.*.ssm_f_a",
    "layers.*.attention.b_proj": "blk.*.ssm_beta",
    "layers.*.attention.A_log": decay(np.exp),
    "layers.*.attention.dt_bias": b.to("blk.*.ssm_dt.bias"),
    "layers.*.attention.q_conv1d": conv("ssm_conv1d_q"),
    "layers.*.attention.k_conv1d": conv("ssm_conv1d_k"),
    "layers.*.attention.v_conv1d": conv("ssm_conv1d_v"),
    "layers.*.attention.o_norm": "blk.*.ssm_norm",
    "layers.*.mlp.gate.expert_bias": "blk.*.exp_probs_b.bias",
}  # fmt: skip


def _fused_pairs(m: b.Build, n: int) -> b.Order:
    """Return an order of the rows of q, k and v in which rotated pairs of q and k are adjacent."""
    c = m.config
    width = c.integer("head_dim", default=k.embd(m) // c.integer("num_attention_heads"), least=2)
    rotated = (c.integer("num_attention_heads") + c.integer("num_key_value_heads")) * width
    return np.concatenate([b.in_pairs(np.arange(rotated).reshape(-1, width)), np.arange(rotated, n)])


LING1: b.Table = {
    "layers.*.attention.query_key_value": b.to("blk.*.attn_qkv", order=_fused_pairs),
    "layers.*.attention.dense": "blk.*.attn_output",
    "word_embeddings": "token_embd",
}


def _ling1(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    m.key("rope.dimension_count", k.head_dim(m))
    k.rope(m)
    m.key("vocab_size", c.integer("vocab_size"))
    k.experts(m, "num_experts")
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace", default=0))
    m.key("expert_shared_count", c.integer("num_shared_experts", default=0))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("norm_topk_prob", default=True))
    k.no_window(m)
    c.expect("norm_head", False)
    c.expect("norm_softmax", False)
    c.expect("multi_gate", False)
    c.ignore("use_qkv_bias", "use_bias", "embedding_dropout", "moe_intermediate_size")


def _ling2(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, further=True)
    k.rms_eps(m)
    width = k.head_dim(m)
    found = k.rope(m)
    partial = found.partial if "partial_rotary_factor" in found.values else 0.5
    m.key("rope.dimension_count", int(width * partial))
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace", default=0))
    m.key("vocab_size", c.integer("vocab_size"))
    k.experts(m, "num_experts")
    n_shared = c.integer("num_shared_experts", default=0)
    own = c.integer("moe_intermediate_size")
    m.key("expert_shared_feed_forward_length", c.integer("moe_shared_expert_intermediate_size", default=own))
    m.key("expert_shared_count", n_shared)
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("norm_topk_prob", default=True))
    m.key("expert_group_count", c.integer("n_group", default=1))
    m.key("expert_group_used_count", c.integer("topk_group", default=1))
    c.expect("score_function", "sigmoid", "softmax")
    m.key("expert_gating_func", 1 if c.get("score_function") == "softmax" else 2)
    m.key("nextn_predict_layers", m.n_further)
    c.expect("use_qk_norm", True)
    c.expect("moe_router_enable_expert_bias", True)
    k.no_window(m)
    c.ignore("use_qkv_bias", "use_bias", "use_rmsnorm", "partial_rotary_factor")


def _ling3(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    m.key("context_length", c.integer("model_max_length", "max_position_embeddings"))
    k.rms_eps(m)
    mla_keys(m)
    group = c.integer("layer_group_size", least=1)
    kinds = c.items("layer_types") or ["linear_attention" if (i + 1) % group else "full_attention" for i in
                                       range(m.n_layer)]  # fmt: skip
    if len(kinds) != m.n_layer or set(kinds) - {"full_attention", "linear_attention"}:
        raise c.refuse("layer_types", "full_attention or linear_attention for every layer")
    m.key("attention.head_count_kv", [int(kind == "full_attention") for kind in kinds])
    m.key("ssm.conv_kernel", c.integer("short_conv_kernel_size", "linear_conv_kernel_dim", least=2))
    m.key("kda.head_dim", _kda_width(m))
    if c.get("linear_num_heads") not in (None, c.integer("num_attention_heads")):
        raise c.refuse("linear_num_heads", "num_attention_heads")
    c.expect("kda_safe_gate", True)
    m.key("kda.safe_gate", True)
    m.key("kda.gate_lower_bound", c.number("kda_lower_bound"))
    k.rope(m)
    m.key("leading_dense_block_count", k.dense_lead(m))
    k.experts(m, "num_experts", "num_local_experts")
    width = c.integer("moe_intermediate_size")
    m.key("expert_shared_feed_forward_length", c.integer("moe_shared_expert_intermediate_size", default=width))
    m.key("expert_shared_count", c.integer("num_shared_experts", "n_shared_experts"))
    m.key("expert_group_count", c.integer("num_expert_group", "n_group", least=1))
    m.key("expert_group_used_count", c.integer("topk_group", least=1))
    m.key("expert_weights_scale", c.number("routed_scaling_factor"))
    m.key("expert_weights_norm", c.flag("moe_renormalize", "norm_topk_prob"))
    m.key("expert_gating_func", 2)
    for key, known in (
        ("score_function", "sigmoid"), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("group_norm_size", 1),
        ("gated_attention_proj_granularity_type", "head_wise"), ("no_kda_lora", True), ("use_kda_lora", False),
        ("use_mla_nope", False), ("moe_router_enable_expert_bias", True), ("rope_interleave", True),
        ("linear_silu", True), ("use_qk_norm", True), ("num_kv_heads_for_linear_attn", 0),
        ("rotary_dim", c.integer("qk_rope_head_dim")),
    ):  # fmt: skip
        c.expect(key, known)
    for key in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if any(c.items(key) or ()):
            raise c.refuse(key, "null")
    c.ignore("vocab_size", "partial_rotary_factor", "rope_theta", "num_nextn_predict_layers", "max_window_layers")


def _kda_width(m: b.Build) -> int:
    """Return the columns of a recurrent head. In transformers files `head_dim` is the rotated width instead."""
    c = m.config
    return c.integer("linear_head_dim", "head_dim", least=1)


ARCHITECTURES = (
    b.Architecture("bailingmoe", ("BailingMoeForCausalLM",), _ling1, LING1, k.tied),
    b.Architecture(
        "bailingmoe2", ("BailingMoeV2ForCausalLM",), _ling2, LING2, k.tied, "",
        frozenset({"mtp_loss_scaling_factor", "moe_router_topk_scaling_factor", "multi_gate"}),
    ),
    b.Architecture(
        "bailingmoe3", ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"), _ling3, LING3, k.tied, r"^model\.mtp",
        frozenset({"mtp_use_kda", "mtp_loss_scaling_factor"}), further=False, names="kimi-linear",
    ),
)  # fmt: skip
