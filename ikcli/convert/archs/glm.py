"""GLM-4 (0414) and GLM-4.5 to 4.7."""

from __future__ import annotations

from ikcli.convert.build import Architecture, Build, Rule, Table
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
)

GLM4: Table = LLAMA | {
    "layers.*.mlp.gate_up_proj": "blk.*.ffn_up",
    "layers.*.post_self_attn_layernorm": "blk.*.post_attention_norm",
    "layers.*.post_mlp_layernorm": "blk.*.post_ffw_norm",
}
NEXT_TOKENS: dict[str, str | Rule] = {
    "layers.*.eh_proj": "blk.*.nextn.eh_proj",
    "layers.*.enorm": "blk.*.nextn.enorm",
    "layers.*.hnorm": "blk.*.nextn.hnorm",
    "layers.*.embed_tokens": "blk.*.nextn.embed_tokens",
    "layers.*.shared_head.head": "blk.*.nextn.shared_head_head",
    "layers.*.shared_head.norm": "blk.*.nextn.shared_head_norm",
}
"""Layers that predict further tokens come after the others."""
GLM4MOE: Table = LLAMA | HEAD_NORMS | expert_names() | shared_expert_names() | NEXT_TOKENS | {
    "layers.*.post_attention_layernorm": "blk.*.post_attention_norm",
    "layers.*.mlp.gate.e_score_correction_bias": CHOICE_BIAS,
}  # fmt: skip


def n_further(m: Build, *keys: str) -> int:
    """Layers for further tokens that the checkpoint has."""
    announced = m.config.integer(*keys, default=0)
    first = m.config.integer("num_hidden_layers")
    return announced if m.has(rf"layers\.{first}\.") else 0


def _rotation(m: Build) -> None:
    partial = rope(m).partial
    m.key("rope.dimension_count", int(head_dim(m) * partial))


def _glm4(m: Build) -> None:
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    _rotation(m)
    m.config.ignore("attention_bias", "vocab_size")


def _glm4moe(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    further = n_further(m, "num_nextn_predict_layers", "num_mtp_layers")
    sizes(m, n_further=further)
    rms_eps(m)
    _rotation(m)
    experts(m, "n_routed_experts")
    m.key("expert_group_count", c.integer("n_group", default=1))
    m.key("expert_group_used_count", c.integer("topk_group", default=1))
    m.key("expert_shared_count", c.integer("n_shared_experts", least=0))
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace"))
    c.expect("scoring_func", "sigmoid")
    m.key("expert_gating_func", 2)
    m.key("expert_weights_scale", c.number("routed_scaling_factor"))
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("nextn_predict_layers", further)
    c.ignore("attention_bias", "vocab_size", "use_qk_norm")


ARCHITECTURES = (
    Architecture("glm4", ("Glm4ForCausalLM",), _glm4, GLM4, tied),
    Architecture("glm4moe", ("Glm4MoeForCausalLM",), _glm4moe, GLM4MOE, tied),
)
