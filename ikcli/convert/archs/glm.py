"""ChatGLM and GLM-4 9B, GLM-4 (0414), GLM-4.5 to 4.7, and Solar Open, which has their layers."""

from __future__ import annotations

from ikcli.convert import build as b
from ikcli.convert import keys as k


def _chatglm(m: b.Build) -> None:
    c = m.config
    n_head = c.integer("num_attention_heads", least=1)
    multi = c.flag("multi_query_attention")
    m.key("block_count", m.n_layer)
    m.key("context_length", c.integer("seq_length", least=1))
    m.key("embedding_length", k.embd(m))
    m.key("feed_forward_length", c.integer("ffn_hidden_size", default=4 * k.embd(m)))
    m.key("attention.head_count", n_head)
    m.key("attention.head_count_kv", c.integer("multi_query_group_num", least=1) if multi else n_head)
    m.key("attention.layer_norm_rms_epsilon", c.number("layernorm_epsilon", default=1e-5))
    width = c.integer("kv_channels", default=k.embd(m) // n_head)
    m.key("rope.dimension_count", width // 2)
    m.key("rope.freq_base", 10000.0 * c.number("rope_ratio", default=1.0))
    c.expect("rmsnorm", True)
    c.expect("apply_residual_connection_post_layernorm", False)
    c.expect("post_layer_norm", True)
    c.expect("original_rope", True)
    c.ignore("add_bias_linear", "add_qkv_bias", "padded_vocab_size", "vocab_size", "multi_query_group_num")
    c.ignore("bias_dropout_fusion", "fp32_residual_connection", "apply_query_key_layer_scaling", "pre_seq_len")
    c.ignore("prefix_projection", "quantization_bit")


def _rotation(m: b.Build) -> None:
    partial = k.rope(m).partial
    m.key("rope.dimension_count", int(k.head_dim(m) * partial))


def _glm4(m: b.Build) -> None:
    k.activation(m, *k.SILU)
    k.sizes(m)
    k.rms_eps(m)
    _rotation(m)
    m.config.ignore("attention_bias", "vocab_size")


def _solar_open(m: b.Build) -> None:
    """Write the keys of Solar Open: experts in all layers, whole heads rotate."""
    c = m.config
    for key, default in (("first_k_dense_replace", 0), ("intermediate_size", c.values.get("moe_intermediate_size"))):
        c.values.setdefault(key, default)
    _glm4moe(m)


def _glm4moe(m: b.Build) -> None:
    c = m.config
    k.activation(m, *k.SILU)
    k.sizes(m, further=True)
    k.rms_eps(m)
    _rotation(m)
    k.experts(m, "n_routed_experts")
    m.key("expert_group_count", c.integer("n_group", default=1))
    m.key("expert_group_used_count", c.integer("topk_group", default=1))
    m.key("expert_shared_count", c.integer("n_shared_experts", least=0))
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace"))
    c.expect("scoring_func", "sigmoid")
    m.key("expert_gating_func", 2)
    m.key("expert_weights_scale", c.number("routed_scaling_factor"))
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("nextn_predict_layers", m.n_further)
    c.ignore("attention_bias", "vocab_size", "use_qk_norm")


ARCHITECTURES = (
    b.Architecture(
        "chatglm", ("ChatGLMModel", "ChatGLMForConditionalGeneration"), _chatglm, finish=k.tied, strip="transformer."
    ),
    b.Architecture("chatglm", ("GlmForCausalLM",), _glm4, finish=k.tied),
    b.Architecture("glm4", ("Glm4ForCausalLM",), _glm4, finish=k.tied),
    b.Architecture("glm4moe", ("Glm4MoeForCausalLM",), _glm4moe, finish=k.tied),
    b.Architecture("glm4moe", ("SolarOpenForCausalLM",), _solar_open, finish=k.tied),
)  # fmt: skip
