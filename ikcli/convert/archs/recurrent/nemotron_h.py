"""Nemotron-H, dense and with experts: a layer is Mamba 2's mixer, attention, or a feed-forward part."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k
from ikcli.convert.archs.recurrent.mamba2 import mixer, no_limits, sizes

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SAME = {"linear_attention": "mamba", "full_attention": "attention"}


def _kinds(m: b.Build) -> list[str]:
    """Return what each layer is, from a list or letters."""
    c = m.config
    pattern, listed = c.get("hybrid_override_pattern"), c.items("layers_block_type", "layer_types")
    found = [_LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else listed or []
    kinds = [_SAME.get(str(kind), str(kind)) for kind in found]
    if not kinds or set(kinds) - set(_LETTERS.values()) or {"mlp", "moe"} <= set(kinds):
        key = "hybrid_override_pattern" if pattern else "layers_block_type"
        raise c.refuse(key, "mamba, attention, and either mlp or moe for every layer")
    return kinds


def _keys(m: b.Build) -> None:
    c = m.config
    kinds = _kinds(m)
    m.arch = "nemotron_h_moe" if "moe" in kinds else "nemotron_h"
    c.values["num_hidden_layers"] = len(kinds)
    k.activation(m, "relu2", keys=("mlp_hidden_act",))
    k.activation(m, *k.SILU, keys=("mamba_hidden_act",))
    k.sizes(m, n_ff=False)
    m.key("vocab_size", c.integer("vocab_size", least=1))
    heads = c.integer("num_key_value_heads", least=1)
    m.key("attention.head_count_kv", [heads if kind == "attention" else 0 for kind in kinds])
    width = c.integer("head_dim", "attention_head_dim", default=k.head_width(m), least=1)
    m.key("attention.key_length", width)
    m.key("attention.value_length", width)
    m.key("attention.layer_norm_rms_epsilon", c.number("layer_norm_epsilon", "norm_eps", "rms_norm_eps", default=1e-5))
    dense = "moe_intermediate_size" if "moe" in kinds else "intermediate_size"
    n_ff = c.integer(dense, least=1)
    m.key("feed_forward_length", [n_ff if kind in ("mlp", "moe") else 0 for kind in kinds])
    if "moe" in kinds:
        _experts(m)
    sizes(m, "conv_kernel", "ssm_state_size", "n_groups", c.integer("mamba_num_heads", least=1),
          c.integer("mamba_head_dim", least=1))  # fmt: skip
    no_limits(m, "time_step_limit")
    c.expect("use_conv_bias", True)
    c.expect("mamba_proj_bias", False)
    c.expect("use_bias", False)
    c.expect("sliding_window")
    c.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "norm_eps")
    c.ignore("intermediate_size", "rms_norm_eps", "attention_bias", "mlp_bias", "expand", *_EXPERTS)


_EXPERTS = (
    "moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap",
    "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok",
    "routed_scaling_factor", "topk_group",
)  # fmt: skip


def _experts(m: b.Build) -> None:
    c = m.config
    k.experts(m, "n_routed_experts")
    c.expect("mlp_bias", False)
    c.expect("n_shared_experts", 1)
    m.key("expert_shared_count", 1)
    m.key("expert_shared_feed_forward_length", c.integer("moe_shared_expert_intermediate_size", least=1))
    m.key("expert_weights_norm", c.flag("norm_topk_prob", default=True))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_gating_func", 2)
    m.key("moe_latent_size", c.get("moe_latent_size"))
    groups = c.integer("n_group", default=1, least=1)
    m.key("expert_group_count", groups)
    m.key("expert_group_used_count", c.integer("topk_group", default=groups, least=1))


NEMOTRON_H: b.Table = mixer("mixer") | {
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "layers.*.norm": "blk.*.attn_norm",
    "layers.*.mixer.in_proj": "blk.*.ssm_in",
    "layers.*.mixer.out_proj": "blk.*.ssm_out",
    "layers.*.mixer.q_proj": "blk.*.attn_q",
    "layers.*.mixer.k_proj": "blk.*.attn_k",
    "layers.*.mixer.v_proj": "blk.*.attn_v",
    "layers.*.mixer.o_proj": "blk.*.attn_output",
    "layers.*.mixer.up_proj": "blk.*.ffn_up",
    "layers.*.mixer.down_proj": "blk.*.ffn_down",
    "layers.*.mixer.gate": "blk.*.ffn_gate_inp",
    "layers.*.mixer.gate.e_score_correction.bias": "blk.*.exp_probs_b.bias",
    "layers.*.mixer.experts.#.up_proj": b.expert("blk.*.ffn_up_exps"),
    "layers.*.mixer.experts.#.down_proj": b.expert("blk.*.ffn_down_exps"),
    "layers.*.mixer.shared_experts.up_proj": "blk.*.ffn_up_shexp",
    "layers.*.mixer.shared_experts.down_proj": "blk.*.ffn_down_shexp",
    "layers.*.mixer.fc1_latent_proj": "blk.*.ffn_latent_down",
    "layers.*.mixer.fc2_latent_proj": "blk.*.ffn_latent_up",
}

_HARMLESS = frozenset(
    {
        "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_max", "time_step_min",
        "time_step_rank", "chunk_size", "num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype",
        "rope_theta", "partial_rotary_factor", "rope_scaling", "mamba_dt_init_floor", "mamba_dt_max", "mamba_dt_min",
        "mamba_chunk_size", "mamba_expand", "mamba_d_conv", "mamba_n_groups", "mamba_dt_limit", "use_moe_latent",
    }
)  # fmt: skip

ARCHITECTURES = (
    b.Architecture(
        "nemotron_h", ("NemotronHForCausalLM",), _keys, NEMOTRON_H, k.tied, drop=r"^mtp\.", harmless=_HARMLESS,
        strip="backbone.",
    ),
)  # fmt: skip
"""Heads that predict further tokens (`mtp.*`) are left out."""
