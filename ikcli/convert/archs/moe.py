"""Models with experts that are like no others: gpt-oss, MiniMax-M2."""

from __future__ import annotations

from ikcli.convert.build import Architecture, Build, Table, fused_experts, to
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
    sizes,
    tied,
    windows,
)

GPT_OSS: Table = LLAMA | {
    "layers.*.self_attn.sinks": to("blk.*.attn_sinks.weight"),
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.mlp.router": "blk.*.ffn_gate_inp",
    "layers.*.mlp.experts.gate_up_proj": fused_experts(
        "blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight", transposed=True, interleaved=True
    ),
    "layers.*.mlp.experts.gate_up_proj_bias": fused_experts(
        "blk.*.ffn_gate_exps.bias", "blk.*.ffn_up_exps.bias", interleaved=True
    ),
    "layers.*.mlp.experts.down_proj": fused_experts("blk.*.ffn_down_exps.weight", transposed=True),
    "layers.*.mlp.experts.down_proj_bias": fused_experts("blk.*.ffn_down_exps.bias"),
}
MINIMAX_M2: Table = LLAMA | HEAD_NORMS | expert_names("block_sparse_moe", names="w1 w3 w2") | {
    "layers.*.block_sparse_moe.e_score_correction_bias": CHOICE_BIAS,
}  # fmt: skip


def _gpt_oss(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    rope(m)
    rms_eps(m)
    experts(m, "num_local_experts", width=False)
    head_dim(m)
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    windows(m, 2, 2)
    m.key("expert_feed_forward_length", c.integer("intermediate_size"))
    c.expect("swiglu_limit", 7.0)
    c.expect("swiglu_alpha", 1.702)
    c.expect("attention_bias", True)
    c.ignore("vocab_size", "experts_per_token", "initial_context_length")


def _minimax_m2(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m)
    partial = rope(m).partial
    rms_eps(m)
    experts(m, "num_local_experts", width=False)
    c.expect("scoring_func", "sigmoid")
    m.key("expert_gating_func", 2)
    width = head_dim(m)
    m.key("expert_feed_forward_length", c.integer("intermediate_size"))
    m.key("rope.dimension_count", c.integer("rotary_dim", default=int(width * partial), least=2))
    c.expect("use_qk_norm", True)
    c.expect("qk_norm_type", "per_layer")
    c.expect("use_routing_bias", True)
    c.expect("shared_intermediate_size", 0)
    c.ignore("vocab_size", "attn_type_list")
    if any(kind != 1 for kind in c.items("attn_type_list") or ()):
        raise c.refuse("attn_type_list", "1 in all layers")


ARCHITECTURES = (
    Architecture("gpt-oss", ("GptOssForCausalLM",), _gpt_oss, GPT_OSS, tied),
    Architecture(
        "minimax-m2", ("MiniMaxM2ForCausalLM",), _minimax_m2, MINIMAX_M2, tied, r"\.mtp|^mtp",
        frozenset({
            "use_mtp", "num_mtp_modules", "mtp_transformer_layers", "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta", "layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode",
        }),
    ),
)  # fmt: skip
