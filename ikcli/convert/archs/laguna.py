"""Laguna and Spark-X2.5, whose attention has gates and whose rotation differs in layers with a window."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import RopeSettings, put_yarn, read_rope
from ikcli.errors import UnsupportedError

LAGUNA: b.Table = {
    "layers.*.self_attn.g_proj": "blk.*.attn_gate",
    "layers.*.mlp.experts.e_score_correction.bias": "blk.*.exp_probs_b.bias",
}  # fmt: skip
SPARK: b.Table = {
    "embedding": "token_embd",
    "layers.*.self_attn.q_k_v_proj": "blk.*.attn_qkv",
    "layers.*.self_attn.g_proj": "blk.*.attn_gate",
    "layers.*.self_attn.out_proj": "blk.*.attn_output",
}


def _rotations(m: b.Build, width: int, known: tuple[str, ...]) -> RopeSettings:
    """Write the rotations of layers without and with a window; return the former, of which the types are `known`."""
    full, own = read_rope(m.config), read_rope(m.config, "sliding_attention")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", own.theta)
    m.key("rope.dimension_count", int(width * full.partial))
    m.key("rope.dimension_count_swa", int(width * own.partial))
    if full.type not in known or own.type != "default":
        raise UnsupportedError(f"{m.config.path}: rope_type {full.type} and {own.type} are not known for {m.arch}")
    return full


def _laguna(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    width = k.head_dim(m)
    per_layer = c.items("num_attention_heads_per_layer")
    if per_layer is not None:
        m.key("attention.head_count", per_layer)
    is_window = k.windows(m, 4, 0)
    window = c.integer("sliding_window", default=0)  # also in checkpoints without such layers
    m.key("attention.sliding_window", window if any(is_window) else 0)
    m.key("attention.sliding_window_pattern", is_window)
    full = _rotations(m, width, ("default", "yarn"))
    if full.type == "yarn":
        put_yarn(m, full)
    k.experts(m, "num_experts")
    m.key("expert_shared_feed_forward_length", c.integer("shared_expert_intermediate_size"))
    m.key("expert_shared_count", 1)
    m.key("expert_weights_scale", c.number("moe_routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", True)
    m.key("expert_gating_func", 2)
    m.key("leading_dense_block_count", k.dense_lead(m))
    c.expect("moe_apply_router_weight_on_input", False)
    c.expect("moe_router_logit_softcapping", 0.0, 0)
    c.expect("gating", True, "per-head", "per-element")
    c.ignore("vocab_size", "attention_bias", "qkv_bias")


def _spark(m: b.Build) -> None:
    c = m.config
    k.activation(m, "gelu")
    k.sizes(m)
    k.rms_eps(m, 1e-6)
    m.key("attention.sliding_window_pattern", k.windows(m, 4, 0))
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    _rotations(m, k.head_dim(m), ("default",))
    c.expect("headwise_attn_output_gate", True)
    c.expect("gate_attn_act_mode", "sigmoid")
    options = "gsq_int4 hadamard_spin dv_ssq selective_attention_preservation key_value_binding_sharpening"
    for key in ("attention_bias", "mlp_bias", *options.split()):
        c.expect(key, False)
    c.ignore("vocab_size", "kv_focus_factor")


ARCHITECTURES = (
    b.Architecture("laguna", ("LagunaForCausalLM",), _laguna, LAGUNA, k.tied, names="dots1"),
    b.Architecture("spark2_5", ("Spark2_5ForCausalLM",), _spark, SPARK, k.tied, names="llama"),
)
