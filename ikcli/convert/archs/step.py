"""Step-3.5."""

from __future__ import annotations

from typing import Any

import numpy as np

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import RopeSettings, llama3_factors, read_rope
from ikcli.errors import UnsupportedError

STEP35: b.Table = {
    "norm": b.to("output_norm", value=b.plus_one),
    "layers.*.input_layernorm": b.to("blk.*.attn_norm", value=b.plus_one),
    "layers.*.post_attention_layernorm": b.to("blk.*.ffn_norm", value=b.plus_one),
    "layers.*.self_attn.q_norm": b.to("blk.*.attn_q_norm", value=b.plus_one),
    "layers.*.self_attn.k_norm": b.to("blk.*.attn_k_norm", value=b.plus_one),
    "layers.*.enorm": b.to("blk.*.nextn.enorm", value=b.plus_one),
    "layers.*.hnorm": b.to("blk.*.nextn.hnorm", value=b.plus_one),
    "layers.*.shared_head.norm": b.to("blk.*.nextn.shared_head_norm", value=b.plus_one),
    "layers.*.moe.router_bias": "blk.*.exp_probs_b.bias",
}  # fmt: skip


def _of_layers(m: b.Build, key: str) -> list[Any] | None:
    """Return a list with a value per layer, without layers for further tokens."""
    found = m.config.items(key)
    if found is not None and len(found) < m.n_layer:
        raise m.config.fail(key, f"has {len(found)} values for {m.n_layer} layers")
    return None if found is None else found[: m.n_layer]


def _of_heads(m: b.Build, key: str, default: Any, own: str = "") -> list[Any]:
    """Return a value per layer for further tokens: what follows those of the model, or a list under a key `own`."""
    later = (m.config.items(key) or [])[m.n_layer :] or (m.config.items(own) or [] if own else [])
    return [*later, *[default] * m.n_further][: m.n_further]


def _same(m: b.Build, key: str, values: list[Any], default: float) -> float:
    """Return the number that these layers share; refuse layers that differ."""
    if any(v != values[0] or isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        raise m.config.refuse(key, "one number for layers with a window, and one for those without")
    return float(values[0]) if values else default


def _step_ropes(m: b.Build, is_window: list[bool]) -> tuple[RopeSettings, RopeSettings]:
    """Return the rotations of full and windowed layers, which older configurations list per layer."""
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


def _step35(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, further=True)
    k.rms_eps(m)
    width = k.head_dim(m)
    kinds = _of_layers(m, "layer_types") or ["full_attention"] * m.n_layer
    is_window = k.windows(m, 1, 0, kinds)
    full, sliding = _step_ropes(m, is_window)
    later = _of_heads(m, "layer_types", "full_attention", "mtp_layer_types")
    if strange := set(later) - {"sliding_attention", "full_attention"}:
        raise c.fail("layer_types", f"has {min(strange)}; known are sliding_attention and full_attention")
    is_window += [kind == "sliding_attention" for kind in later]
    other = c.inner("attention_other_setting")
    n_head, n_kv = c.integer("num_attention_heads"), c.integer("num_key_value_heads")
    own = c.inner_integer("attention_other_setting", "num_attention_heads", n_head)
    own = c.integer("num_sliding_attention_heads", default=own)
    m.key("attention.head_count", [own if w else n_head for w in is_window])
    if (other.get("num_attention_groups", n_kv), other.get("head_dim", width)) != (n_kv, width):
        raise c.refuse("attention_other_setting", "other num_attention_heads only")
    m.key("attention.head_count_kv", [n_kv] * len(is_window))
    m.key("attention.sliding_window", c.integer("sliding_window", default=0) if any(is_window) else 0)
    m.key("attention.sliding_window_pattern", is_window)
    if full.type not in ("default", "llama3") or (any(is_window) and sliding.type != "default"):
        raise UnsupportedError(f"{c.path}: rope_type {full.type} and {sliding.type} are not known for step35")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", sliding.theta)
    m.key("rope.dimension_count", width)
    m.key("rope.dimension_count_per_layer", [int(width * (sliding if w else full).partial) for w in is_window])
    if full.type == "llama3":
        m.key("rope.scaling.apply_mask", 1)
    k.experts(m, "n_routed_experts")
    m.key("expert_shared_feed_forward_length", c.integer("share_expert_dim"))
    m.key("expert_weights_scale", c.number("moe_router_scaling_factor"))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 2)
    m.key("leading_dense_block_count", _step_lead(m))
    m.key("moe_every_n_layers", 1)
    for key, name in (("swiglu_limits", "swiglu_clamp_exp"), ("swiglu_limits_shared", "swiglu_clamp_shexp")):
        limits = [v or 0 for v in [*(_of_layers(m, key) or [0] * m.n_layer), *_of_heads(m, key, 0)]]
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
    c.ignore("vocab_size", "per_layer_config", "need_fp32_gate", "max_seq_len")
    c.ignore("mtp_layer_types", "mtp_mlp_layer_types", "use_rope_layers", "yarn_only_types")
    if c.items("use_rope_layers"):
        raise c.refuse("use_rope_layers", "[]")


def _step_lead(m: b.Build) -> int:
    """Return the number of leading layers without experts."""
    c = m.config
    listed = c.get("moe_layers_enum")
    if listed is None:
        if (kinds := _of_layers(m, "mlp_layer_types")) is None:
            return min(3, m.n_layer)
        c.values["mlp_layer_types"] = kinds
        return k.dense_lead(m)
    try:
        layers = sorted(int(i) for i in (listed.split(",") if isinstance(listed, str) else listed))
    except (TypeError, ValueError):
        raise c.fail("moe_layers_enum", "should be numbers of layers with commas between them") from None
    lead = layers[0] if layers else m.n_layer
    if layers != list(range(lead, m.n_layer)):
        raise c.refuse("moe_layers_enum", "all layers but the first ones")
    return lead


def _finish_step35(m: b.Build) -> None:
    """Add the factors of full attention layers, padded with 1 to the widest rotation as readers expect."""
    k.tied(m)
    full = read_rope(m.config)
    if full.type == "llama3":
        width = int(m.metadata["step35.rope.dimension_count"])
        factors = np.ones(width // 2, np.float32)
        n_rot = int(width * full.partial)
        factors[: n_rot // 2] = llama3_factors(m, full, n_rot)
        m.constant("rope_freqs.weight", factors)


ARCHITECTURES = (
    b.Architecture(
        "step35", ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"), _step35, STEP35, _finish_step35,
        r"vision_model|vit_large_projector|multi_modal_projector",
    ),
)  # fmt: skip
