"""More models whose layers differ: Ling 3, Muse Glimmer, Step-3.5."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert.archs.deepseek import MLA, dense_lead, mla_keys
from ikcli.convert.archs.deltanet import plus_one
from ikcli.convert.archs.llama import PAIRS
from ikcli.convert.archs.mixed import conv, decay
from ikcli.convert.build import Architecture, Build, Found, Table, fused_experts, to
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
from ikcli.convert.rope import RopeSettings, llama3_factors, read_rope
from ikcli.errors import UnsupportedError

Kinds = list[Any]


def _gate(m: Build, found: Found) -> None:
    """The gate of recurrent layers has a row per column of a value, that of the others one per head."""
    recurrent = m.metadata[f"{m.arch}.attention.head_count_kv"][found.block] == 0
    m.plain(found, f"blk.{found.block}.{'ssm_g_a' if recurrent else 'attn_gate'}{found.suffix}")


LING3: Table = LLAMA | expert_names() | shared_expert_names() | {
    "word_embeddings": "token_embd",
    **{name.replace("self_attn", "attention"): rule for name, rule in MLA.items()},
    "layers.*.attention.q_proj": "blk.*.attn_q",
    "layers.*.attention.k_proj": "blk.*.attn_k",
    "layers.*.attention.v_proj": "blk.*.attn_v",
    "layers.*.attention.dense": "blk.*.attn_output",
    "layers.*.attention.o_proj": "blk.*.attn_output",
    "layers.*.attention.g_proj": _gate,
    "layers.*.attention.f_proj": "blk.*.ssm_f_a",
    "layers.*.attention.b_proj": "blk.*.ssm_beta",
    "layers.*.attention.A_log": decay(np.exp),
    "layers.*.attention.dt_bias": to("blk.*.ssm_dt.bias"),
    "layers.*.attention.q_conv1d": conv("ssm_conv1d_q"),
    "layers.*.attention.k_conv1d": conv("ssm_conv1d_k"),
    "layers.*.attention.v_conv1d": conv("ssm_conv1d_v"),
    "layers.*.attention.o_norm": "blk.*.ssm_norm",
    "layers.*.mlp.gate.expert_bias": to(CHOICE_BIAS),
}  # fmt: skip


def _ling3(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    m.key("context_length", c.integer("model_max_length", "max_position_embeddings"))
    rms_eps(m)
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
    rope(m)
    m.key("leading_dense_block_count", dense_lead(m))
    experts(m, "num_experts", "num_local_experts")
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


def _kda_width(m: Build) -> int:
    """Columns of a recurrent head. Files of transformers have the rotated width as `head_dim` and say it elsewhere."""
    c = m.config
    return c.integer("linear_head_dim", "head_dim", least=1)


MUSE: Table = LLAMA | PAIRS | {
    "layers.*.input_layernorm": to("blk.*.attn_norm", value=plus_one),
    "layers.*.post_attention_layernorm": to("blk.*.post_attention_norm", value=plus_one),
    "layers.*.pre_feedforward_layernorm": to("blk.*.ffn_norm", value=plus_one),
    "layers.*.post_feedforward_layernorm": to("blk.*.post_ffw_norm", value=plus_one),
    "layers.*.self_attn.gate_proj": "blk.*.attn_gate",
}  # fmt: skip


def _muse(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    m.key("rope.dimension_count", head_dim(m))
    found = rope(m)
    n = m.n_layer
    kinds: Kinds = ["sliding_attention" if (n - 1 - i) % 4 else "full_attention" for i in range(n)]
    is_window = windows(m, 4, 0, c.items("layer_types") or kinds)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("attention.sliding_window_pattern", is_window)
    bases = c.items("layer_rope_theta")
    if bases is not None and bases != [found.theta * w for w in is_window]:
        raise c.refuse("layer_rope_theta", "the base of rope_parameters in layers with a window, 0 in the others")
    m.key("logit_scale", c.number("output_multiplier"))
    m.key("final_logit_softcapping", c.number("final_logit_softcapping"))
    c.expect("post_norm_eps", 1e-8)
    c.expect("attention_bias", False)
    c.ignore("vocab_size", "layer_types")


def _finish_muse(m: Build) -> None:
    """Norms of heads have no weights, and queries get a factor: weights that are all the same."""
    tied(m)
    width = int(m.metadata["muse-glimmer.rope.dimension_count"])
    for name, factor in (("q", m.config.number("qk_scale_factor")), ("k", 1.0)):
        for il in range(m.n_layer):
            m.constant(f"blk.{il}.attn_{name}_norm.weight", np.full(width, factor, np.float32))


STEP35: Table = LLAMA | HEAD_NORMS | shared_expert_names("share_expert") | {
    "norm": to("output_norm", value=plus_one),
    "layers.*.input_layernorm": to("blk.*.attn_norm", value=plus_one),
    "layers.*.post_attention_layernorm": to("blk.*.ffn_norm", value=plus_one),
    "layers.*.self_attn.q_norm": to("blk.*.attn_q_norm", value=plus_one),
    "layers.*.self_attn.k_norm": to("blk.*.attn_k_norm", value=plus_one),
    "layers.*.self_attn.g_proj": "blk.*.attn_gate",
    "layers.*.moe.gate": "blk.*.ffn_gate_inp",
    "layers.*.moe.router_bias": to(CHOICE_BIAS),
    "layers.*.moe.gate_proj": fused_experts("blk.*.ffn_gate_exps.weight"),
    "layers.*.moe.up_proj": fused_experts("blk.*.ffn_up_exps.weight"),
    "layers.*.moe.down_proj": fused_experts("blk.*.ffn_down_exps.weight"),
}  # fmt: skip


def _of_layers(m: Build, key: str) -> Kinds | None:
    """A list with a value per layer, of which those for further tokens are left out."""
    found = m.config.items(key)
    if found is not None and len(found) < m.n_layer:
        raise m.config.fail(key, f"has {len(found)} values for {m.n_layer} layers")
    return None if found is None else found[: m.n_layer]


def _same(m: Build, key: str, values: Kinds, default: float) -> float:
    """The one number of these layers."""
    if any(v != values[0] or isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise m.config.refuse(key, "one number for layers with a window, and one for those without")
    return float(values[0]) if values else default


def _step_ropes(m: Build, is_window: list[bool]) -> tuple[RopeSettings, RopeSettings]:
    """Rotations of layers that see all and of those with a window; older files have lists with a value per layer."""
    c = m.config
    if isinstance(c.values.get("rope_theta"), list):
        bases = _of_layers(m, "rope_theta") or []
        partial = _of_layers(m, "partial_rotary_factors") or [1.0] * m.n_layer
        old = c.inner("rope_scaling")
        scaled = c.items("yarn_only_types") or []
        made: dict[str, Any] = {}
        for kind, flag in (("full_attention", False), ("sliding_attention", True)):
            layers = [i for i in range(m.n_layer) if is_window[i] is flag]
            made[kind] = {
                "rope_theta": _same(m, "rope_theta", [bases[i] for i in layers], 10000.0),
                "partial_rotary_factor": _same(m, "partial_rotary_factors", [partial[i] for i in layers], 1.0),
            }
            if not scaled or kind in scaled:
                made[kind] |= old
        del c.values["rope_theta"]
        c.values |= {"rope_parameters": made}
        c.values.pop("rope_scaling", None)
    return read_rope(c), read_rope(c, "sliding_attention")


def _step35(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    width = head_dim(m)
    kinds = _of_layers(m, "layer_types") or ["full_attention"] * m.n_layer
    is_window = windows(m, 1, 0, kinds)
    other = c.inner("attention_other_setting")
    n_head, n_kv = c.integer("num_attention_heads"), c.integer("num_key_value_heads")
    own = c.inner_integer("attention_other_setting", "num_attention_heads", n_head)
    own = c.integer("num_sliding_attention_heads", default=own)
    m.key("attention.head_count", [own if w else n_head for w in is_window])
    if (other.get("num_attention_groups", n_kv), other.get("head_dim", width)) != (n_kv, width):
        raise c.refuse("attention_other_setting", "other num_attention_heads only")
    m.key("attention.head_count_kv", [n_kv] * m.n_layer)
    m.key("attention.sliding_window", c.integer("sliding_window", default=0) if any(is_window) else 0)
    m.key("attention.sliding_window_pattern", is_window)
    full, sliding = _step_ropes(m, is_window)
    if full.type not in ("default", "llama3") or (any(is_window) and sliding.type != "default"):
        raise UnsupportedError(f"{c.path}: rope_type {full.type} and {sliding.type} are not known for step35")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", sliding.theta)
    m.key("rope.dimension_count", width)
    m.key("rope.dimension_count_per_layer", [int(width * (sliding if w else full).partial) for w in is_window])
    if full.type == "llama3":
        m.key("rope.scaling.apply_mask", 1)
    experts(m, "n_routed_experts")
    m.key("expert_shared_feed_forward_length", c.integer("share_expert_dim"))
    m.key("expert_weights_scale", c.number("moe_router_scaling_factor"))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 2)
    m.key("leading_dense_block_count", _step_lead(m))
    m.key("moe_every_n_layers", 1)
    for key, name in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        limits = [v or 0 for v in _of_layers(m, key) or [0] * m.n_layer]
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in limits):
            raise c.fail(key, "should be numbers, one per layer")
        m.key(name, [float(v) for v in limits])
    for key, known in (
        ("query_pre_attn_scalar", width), ("norm_expert_weight", True), ("use_moe_router_bias", True),
        ("use_head_wise_attn_gate", True), ("use_qk_norm", True), ("att_impl_type", "GQA"), ("zero_centered", True),
        ("moe_router_activation", "sigmoid"), ("moe_every_n_layer", 1), ("moe_layer_offset", 0), ("sink", False),
        ("attention_bias", False), ("mlp_bias", False), ("use_moe", True),
    ):  # fmt: skip
        c.expect(key, known)
    c.ignore("vocab_size", "per_layer_config", "need_fp32_gate", "max_seq_len", "num_nextn_predict_layers")
    c.ignore("mtp_layer_types", "mtp_mlp_layer_types", "use_rope_layers", "yarn_only_types")
    if c.items("use_rope_layers"):
        raise c.refuse("use_rope_layers", "[]")


def _step_lead(m: Build) -> int:
    """Layers without experts, which come first."""
    c = m.config
    listed = c.get("moe_layers_enum")
    if listed is None:
        if (kinds := _of_layers(m, "mlp_layer_types")) is None:
            return min(3, m.n_layer)
        c.values["mlp_layer_types"] = kinds
        return dense_lead(m)
    try:
        layers = sorted(int(i) for i in (listed.split(",") if isinstance(listed, str) else listed))
    except (TypeError, ValueError):
        raise c.fail("moe_layers_enum", "should be numbers of layers with commas between them") from None
    lead = layers[0] if layers else m.n_layer
    if layers != list(range(lead, m.n_layer)):
        raise c.refuse("moe_layers_enum", "all layers but the first ones")
    return lead


def _finish_step35(m: Build) -> None:
    """Factors of the rotation of layers that see all; readers want as many as the widest rotation has."""
    tied(m)
    full = read_rope(m.config)
    if full.type == "llama3":
        width = int(m.metadata["step35.rope.dimension_count"])
        factors = np.ones(width // 2, np.float32)
        n_rot = int(width * full.partial)
        factors[: n_rot // 2] = llama3_factors(m, full, n_rot)
        m.constant("rope_freqs.weight", factors)


ARCHITECTURES = (
    Architecture(
        "bailingmoe3", ("BailingHybridForCausalLM", "BailingMoeV3ForCausalLM"), _ling3, LING3, tied, r"^model\.mtp",
        frozenset({"mtp_use_kda", "mtp_loss_scaling_factor"}), further=False,
    ),
    Architecture(
        "muse-glimmer", ("MuseGlimmerForConditionalGeneration", "MuseGlimmerForCausalLM"), _muse, MUSE, _finish_muse,
        r"vision_",
    ),
    Architecture(
        "step35", ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), _step35, STEP35, _finish_step35,
        r"vision_model|vit_large_projector|multi_modal_projector", further=False,
    ),
)  # fmt: skip
