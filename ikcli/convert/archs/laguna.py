"""Laguna."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.rope import put_yarn, read_rope
from ikcli.errors import UnsupportedError

LAGUNA: b.Table = {
    "layers.*.self_attn.g_proj": "blk.*.attn_gate",
    "layers.*.mlp.experts.e_score_correction.bias": "blk.*.exp_probs_b.bias",
}  # fmt: skip


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
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    m.key("rope.freq_base", full.theta)
    m.key("rope.freq_base_swa", own.theta)
    m.key("rope.dimension_count", int(width * full.partial))
    m.key("rope.dimension_count_swa", int(width * own.partial))
    if full.type == "yarn":
        put_yarn(m, full)
    if full.type not in ("default", "yarn") or own.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {full.type} and {own.type} are not known for laguna")
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


ARCHITECTURES = (b.Architecture("laguna", ("LagunaForCausalLM",), _laguna, LAGUNA, k.tied, names="dots1"),)
