"""Models whose layers differ: Laguna, MiMo-V2, Kimi Linear; and MiniMax-M3."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert.archs.deepseek import MLA, dense_lead, mla_keys
from ikcli.convert.archs.deltanet import minus_exp, plus_one
from ikcli.convert.build import Architecture, Build, Found, Rule, Table, split, to
from ikcli.convert.common import (
    CHOICE_BIAS,
    HEAD_NORMS,
    LLAMA,
    SILU,
    activation,
    expert_names,
    experts,
    head_dim,
    rms_eps,
    rope,
    shared_expert_names,
    sizes,
    tied,
    windows,
)
from ikcli.convert.pieces import Value
from ikcli.convert.rope import put_yarn, read_rope
from ikcli.errors import FormatError, UnsupportedError

LAGUNA: Table = LLAMA | HEAD_NORMS | expert_names() | shared_expert_names("mlp.shared_expert") | {
    "layers.*.self_attn.g_proj": "blk.*.attn_gate",
    "layers.*.mlp.experts.e_score_correction_bias": CHOICE_BIAS,
    "layers.*.mlp.gate.e_score_correction_bias": CHOICE_BIAS,
}  # fmt: skip
MIMO2: Table = LLAMA | expert_names() | {
    "layers.*.mlp.gate.e_score_correction_bias": CHOICE_BIAS,
    "layers.*.self_attn.attention_sink_bias": to("blk.*.attn_sinks.weight"),
}  # fmt: skip
MINIMAX_M3: Table = LLAMA | expert_names() | expert_names("block_sparse_moe", names="w1 w3 w2") | {
    "norm": to("output_norm", value=plus_one),
    "layers.*.input_layernorm": to("blk.*.attn_norm", value=plus_one),
    "layers.*.post_attention_layernorm": to("blk.*.ffn_norm", value=plus_one),
    "layers.*.self_attn.q_norm": to("blk.*.attn_q_norm", value=plus_one),
    "layers.*.self_attn.k_norm": to("blk.*.attn_k_norm", value=plus_one),
    "layers.*.mlp.gate_up_proj": split("blk.*.ffn_gate", "blk.*.ffn_up"),
    "layers.*.mlp.gate.e_score_correction_bias": CHOICE_BIAS,
    "layers.*.mlp.shared_experts.gate_up_proj": split("blk.*.ffn_gate_shexp", "blk.*.ffn_up_shexp"),
    "layers.*.mlp.shared_experts.down_proj": "blk.*.ffn_down_shexp",
    "layers.*.block_sparse_moe.e_score_correction_bias": CHOICE_BIAS,
    "layers.*.block_sparse_moe.shared_experts.gate_proj": "blk.*.ffn_gate_shexp",
    "layers.*.block_sparse_moe.shared_experts.up_proj": "blk.*.ffn_up_shexp",
    "layers.*.block_sparse_moe.shared_experts.down_proj": "blk.*.ffn_down_shexp",
}  # fmt: skip


def conv(name: str) -> Rule:
    """The taps of a column, in three dimensions."""

    def rule(m: Build, found: Found) -> None:
        m.plain(found, f"blk.{found.block}.{name}.weight", (found.shape[0], 1, found.shape[-1]))

    return rule


def decay(value: Value) -> Rule:
    """A logarithm per head, whatever dimensions of 1 there are."""

    def rule(m: Build, found: Found) -> None:
        n = max(found.shape)
        if int(np.prod(found.shape)) != n:
            raise FormatError(f"{m.config.path.parent}: tensor {found.name} has the shape {list(found.shape)}")
        m.plain(found, f"blk.{found.block}.ssm_a", (n, 1), value=value)

    return rule


KIMI_LINEAR: Table = LLAMA | MLA | expert_names("block_sparse_moe", names="w1 w3 w2") | {
    **shared_expert_names("block_sparse_moe.shared_experts"),
    "layers.*.block_sparse_moe.gate.e_score_correction_bias": CHOICE_BIAS,
    "layers.*.block_sparse_moe.gate_proj": "blk.*.ffn_gate",
    "layers.*.block_sparse_moe.up_proj": "blk.*.ffn_up",
    "layers.*.block_sparse_moe.down_proj": "blk.*.ffn_down",
    "layers.*.self_attn.A_log": decay(minus_exp),
    "layers.*.self_attn.b_proj": "blk.*.ssm_beta",
    "layers.*.self_attn.dt_bias": to("blk.*.ssm_dt.bias"),
    "layers.*.self_attn.f_a_proj": "blk.*.ssm_f_a",
    "layers.*.self_attn.f_b_proj": "blk.*.ssm_f_b",
    "layers.*.self_attn.g_a_proj": "blk.*.ssm_g_a",
    "layers.*.self_attn.g_b_proj": "blk.*.ssm_g_b",
    "layers.*.self_attn.q_conv1d": conv("ssm_conv1d_q"),
    "layers.*.self_attn.k_conv1d": conv("ssm_conv1d_k"),
    "layers.*.self_attn.v_conv1d": conv("ssm_conv1d_v"),
    "layers.*.self_attn.o_norm": "blk.*.ssm_norm",
}  # fmt: skip


def _laguna(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    width = head_dim(m)
    per_layer = c.items("num_attention_heads_per_layer")
    if per_layer is not None:
        m.key("attention.head_count", per_layer)
    is_window = windows(m, 4, 0)
    window = c.integer("sliding_window", default=0)  # checkpoints without such layers have it, too
    m.key("attention.sliding_window", window if any(is_window) else 0)
    m.key("attention.sliding_window_pattern", is_window)
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", own.theta)
    m.key("rope.dimension_count", int(width * full.partial))
    m.key("rope.dimension_count_swa", int(width * own.partial))
    if full.type == "yarn":
        put_yarn(m, full)
    if full.type not in ("default", "yarn") or own.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {full.type} and {own.type} are not known for laguna")
    experts(m, "num_experts")
    m.key("expert_shared_feed_forward_length", c.integer("shared_expert_intermediate_size"))
    m.key("expert_shared_count", 1)
    m.key("expert_weights_scale", c.number("moe_routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 2)
    m.key("leading_dense_block_count", dense_lead(m))
    c.expect("moe_apply_router_weight_on_input", False)
    c.expect("moe_router_logit_softcapping", 0.0, 0)
    c.expect("gating", True, "per-head", "per-element")
    c.ignore("vocab_size", "attention_bias", "qkv_bias")


def _mimo2(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    m.key("attention.layer_norm_rms_epsilon", c.number("layernorm_epsilon", "rms_norm_eps"))
    pattern = c.items("hybrid_layer_pattern")
    kinds: Any = None if pattern is None else ["sliding_attention" if p else "full_attention" for p in pattern]
    is_window = windows(m, 4, 0, kinds)
    m.key("attention.sliding_window", c.integer("sliding_window", "sliding_window_size", least=1))
    m.key("attention.sliding_window_pattern", is_window)
    n_kv = c.integer("num_key_value_heads")
    of_windows = c.integer("swa_num_key_value_heads", default=2 * n_kv)
    m.key("attention.head_count_kv", [of_windows if w else n_kv for w in is_window])
    k, v = c.integer("head_dim", least=1), c.integer("v_head_dim", least=1)
    m.key("attention.key_length", k)
    m.key("attention.value_length", v)
    for key, same in (("swa_head_dim", k), ("swa_v_head_dim", v), ("swa_num_attention_heads", None)):
        c.expect(key, c.integer("num_attention_heads") if same is None else same)
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    if (full.type, own.type, full.partial) != ("default", "default", own.partial):
        raise c.refuse("rope_parameters", "default, with the same partial_rotary_factor in all layers")
    local = c.given("swa_rope_theta")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", own.theta if local is None else c.number("swa_rope_theta"))
    m.key("rope.dimension_count", int(k * full.partial))
    m.key("attention.value_scale", c.number("attention_value_scale", default=1.0))
    experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=0))
    frequencies = c.items("moe_layer_freq")
    if frequencies is not None:
        lead = frequencies.index(1) if 1 in frequencies else len(frequencies)
        if any(f != 1 for f in frequencies[lead:]):
            raise c.refuse("moe_layer_freq", "0 in the first layers, then 1")
        m.key("leading_dense_block_count", lead)
    else:
        m.key("leading_dense_block_count", dense_lead(m))
    m.key("expert_gating_func", 2)
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    c.expect("scoring_func", "sigmoid")
    c.expect("n_group", 1)
    c.expect("attention_bias", False)
    c.expect("add_full_attention_sink_bias", False)
    c.expect("add_swa_attention_sink_bias", True)
    c.ignore("vocab_size", "topk_group", "topk_method", "attention_chunk_size", "hybrid_block_size")


def _kimi_linear(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    c.ignore("model_max_length")
    sizes(m)
    m.key("context_length", c.integer("model_max_length", "max_position_embeddings"))
    rms_eps(m)
    mla_keys(m)
    own: Any = c.get("linear_attn_config")
    kinds = c.items("layer_types")
    if isinstance(own, dict):
        full = own.get("full_attn_layers") or []
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(m.n_layer)]
        taps, width = own.get("short_conv_kernel_size", 4), own.get("head_dim")
        n_head = own.get("num_heads")
    else:
        taps, width = c.integer("linear_conv_kernel_dim"), c.integer("linear_head_dim")
        n_head = c.integer("linear_num_heads")
    if kinds is None or len(kinds) != m.n_layer or set(kinds) - {"full_attention", "linear_attention"}:
        raise c.refuse("layer_types", "full_attention or linear_attention for every layer")
    if n_head != c.integer("num_attention_heads"):
        raise c.refuse("num_attention_heads", f"the {n_head} heads of linear layers")
    m.key("attention.head_count_kv", [c.integer("num_attention_heads") * (k == "full_attention") for k in kinds])
    m.key("ssm.conv_kernel", int(taps))
    m.key("kda.head_dim", int(width or 0))
    m.key("rope.freq_base", read_rope(c).theta)
    m.key("leading_dense_block_count", dense_lead(m))
    experts(m, "num_experts")
    m.key("expert_shared_count", c.integer("num_shared_experts", default=0))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("moe_renormalize", default=True))
    m.key("expert_gating_func", 2)
    c.expect("moe_router_activation_func", "sigmoid")
    c.expect("num_expert_group", 1)
    c.expect("mla_use_nope", True)
    c.expect("moe_layer_freq", 1)
    c.ignore("topk_group", "use_grouped_topk", "topk_method", "num_nextn_predict_layers")
    m.key("vocab_size", c.integer("vocab_size"))


def _minimax_m3(m: Build) -> None:
    c = m.config
    activation(m, *SILU, "swigluoai")
    sizes(m, n_ff=False)
    m.key("feed_forward_length", c.integer("dense_intermediate_size", least=1))
    found = rope(m)
    rms_eps(m)
    n_rot = int(head_dim(m) * found.partial)
    if "partial_rotary_factor" in found.values:
        c.expect("rotary_dim", n_rot)
    m.key("rope.dimension_count", n_rot if "partial_rotary_factor" in found.values else c.integer("rotary_dim"))
    experts(m, "num_local_experts", width=False)
    m.key("expert_feed_forward_length", c.integer("intermediate_size"))
    shared = c.integer("shared_intermediate_size")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=1))
    m.key("expert_shared_feed_forward_length", shared)
    m.key("leading_dense_block_count", dense_lead(m))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 2)
    c.expect("swiglu_limit", 7.0)
    c.expect("swiglu_alpha", 1.702)
    c.ignore("vocab_size", "layer_types", "index_block_size", "index_head_dim", "index_local_blocks", "index_n_heads")
    c.ignore("index_topk_blocks")
    if m.has("index"):
        m.notes.append("attention of minimax-m3 is over all positions; the indexer is left out")


ARCHITECTURES = (
    Architecture("laguna", ("LagunaForCausalLM",), _laguna, LAGUNA, tied),
    Architecture(
        "mimo2", ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"), _mimo2, MIMO2, tied, r"\.mtp\.|^mtp",
        frozenset({"attention_projection_layout"}),
    ),
    Architecture("kimi-linear", ("KimiLinearForCausalLM",), _kimi_linear, KIMI_LINEAR, tied),
    Architecture(
        "minimax-m3", ("MiniMaxM3VLForCausalLM", "MiniMaxM3VLForConditionalGeneration"), _minimax_m3, MINIMAX_M3, tied,
        r"vision|multi_modal_projector|indexer|\.index_",
    ),
)  # fmt: skip
