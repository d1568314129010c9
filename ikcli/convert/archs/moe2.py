"""More models with experts: dots.llm1, Hunyuan, Llama 4, Mellum, Cohere 2, Ling 2."""

from __future__ import annotations

from ikcli.convert.archs.deepseek import dense_lead
from ikcli.convert.archs.glm import NEXT_TOKENS, n_further
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
    layer_eps,
    no_window,
    put_llama3,
    rms_eps,
    rope,
    shared_expert_names,
    sizes,
    tied,
    windows,
)
from ikcli.convert.rope import put_yarn, read_rope
from ikcli.errors import UnsupportedError

DOTS1: Table = LLAMA | HEAD_NORMS | expert_names() | shared_expert_names() | {
    "layers.*.mlp.gate.e_score_correction_bias": CHOICE_BIAS,
}  # fmt: skip
HUNYUAN: Table = LLAMA | expert_names(gate="gate.wg") | shared_expert_names("mlp.shared_mlp") | {
    "layers.*.self_attn.query_layernorm": "blk.*.attn_q_norm",
    "layers.*.self_attn.key_layernorm": "blk.*.attn_k_norm",
}  # fmt: skip
LLAMA4: Table = LLAMA | shared_expert_names("feed_forward.shared_expert") | {
    "layers.*.feed_forward.router": "blk.*.ffn_gate_inp",
    "layers.*.feed_forward.experts.gate_up_proj": fused_experts(
        "blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight", transposed=True
    ),
    "layers.*.feed_forward.experts.down_proj": fused_experts("blk.*.ffn_down_exps.weight", transposed=True),
    "layers.*.feed_forward.gate_proj": "blk.*.ffn_gate",
    "layers.*.feed_forward.up_proj": "blk.*.ffn_up",
    "layers.*.feed_forward.down_proj": "blk.*.ffn_down",
}  # fmt: skip
MELLUM: Table = LLAMA | HEAD_NORMS | expert_names()
COHERE2_MOE: Table = LLAMA | expert_names() | shared_expert_names()
LING2: Table = expert_names() | shared_expert_names() | NEXT_TOKENS | {
    "word_embeddings": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "layers.*.input_layernorm": "blk.*.attn_norm",
    "layers.*.post_attention_layernorm": "blk.*.ffn_norm",
    "layers.*.attention.query_key_value": "blk.*.attn_qkv",
    "layers.*.attention.dense": "blk.*.attn_output",
    "layers.*.attention.query_layernorm": "blk.*.attn_q_norm",
    "layers.*.attention.key_layernorm": "blk.*.attn_k_norm",
    "layers.*.mlp.gate_proj": "blk.*.ffn_gate",
    "layers.*.mlp.up_proj": "blk.*.ffn_up",
    "layers.*.mlp.down_proj": "blk.*.ffn_down",
    "layers.*.mlp.gate.expert_bias": to(CHOICE_BIAS),
    "layers.*.final_layernorm": "blk.*.layer_output_norm",
}  # fmt: skip


def _base(m: Build) -> None:
    activation(m, *SILU)
    sizes(m)
    rms_eps(m)
    head_dim(m)
    m.config.ignore("attention_bias", "mlp_bias", "vocab_size")


def _dots1(m: Build) -> None:
    c = m.config
    _base(m)
    rope(m)
    kinds = c.items("layer_types")
    if kinds and set(kinds) != {"full_attention"}:
        raise c.refuse("layer_types", "full_attention in all layers")
    c.ignore("sliding_window")
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace", default=0))
    experts(m, "n_routed_experts")
    m.key("expert_shared_count", c.integer("n_shared_experts", default=0))
    m.key("expert_weights_scale", c.number("routed_scaling_factor", default=1.0))
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    m.key("expert_gating_func", 2)
    n_group, used = c.integer("n_group", default=1), c.integer("topk_group", default=1)
    if n_group > 1:
        m.key("expert_group_count", n_group)
        m.key("expert_group_used_count", used)
    c.expect("scoring_func", "noaux_tc", "sigmoid")
    c.expect("moe_layer_freq", 1)
    c.ignore("topk_method", "max_window_layers", "use_sliding_window")


def _one(m: Build, key: str, default: int | None = None) -> int:
    """A number, which some configurations have once per layer, always the same."""
    value = m.config.get(key)
    if isinstance(value, list):
        if not value or any(v != value[0] for v in value) or not isinstance(value[0], int):
            raise m.config.refuse(key, "the same number for all layers")
        return int(value[0])
    return m.config.integer(key, default=default, least=1)


def _hunyuan(m: Build) -> None:
    c = m.config
    _base(m)
    found = read_rope(c)
    theta = found.theta
    if found.type == "dynamic":  # with alpha a larger base
        dim = c.integer("head_dim", default=c.integer("hidden_size") // c.integer("num_attention_heads"))
        theta *= found.number("alpha") ** (dim / (dim - 2))
        if found.values.get("factor", 1.0) != 1.0:
            raise c.refuse("rope_scaling", "alpha with factor 1")
    elif found.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {found.type} is not known for {m.arch}")
    m.key("rope.freq_base", theta)
    m.key("expert_count", c.integer("num_experts", least=1))
    m.key("expert_used_count", _one(m, "moe_topk"))
    m.key("expert_shared_count", _one(m, "num_shared_expert", 1))
    width = _one(m, "moe_intermediate_size", c.integer("intermediate_size"))
    m.key("expert_feed_forward_length", width)
    m.key("expert_shared_feed_forward_length", c.integer("intermediate_size"))
    c.expect("use_qk_norm", True)
    c.expect("use_mixed_mlp_moe", True)
    c.expect("norm_topk_prob", True)
    c.expect("use_cla", False)
    c.ignore("cla_share_factor", "attention_head_dim", "moe_drop_tokens", "moe_random_routing_dropped_token")


def _llama4(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m, n_ff=False)
    rms_eps(m)
    width = head_dim(m)
    rope(m)
    m.key("vocab_size", c.integer("vocab_size"))
    m.key("rope.dimension_count", width)
    m.key("feed_forward_length", c.integer("intermediate_size_mlp", least=1))
    m.key("expert_feed_forward_length", c.integer("intermediate_size", least=1))
    experts(m, "num_local_experts", width=False)
    step = c.integer("interleave_moe_layer_step", default=1, least=1)
    m.key("interleave_moe_layer_step", step)
    expected = [i for i in range(m.n_layer) if (i + 1) % step == 0]
    if (c.items("moe_layers") or expected) != expected:
        raise c.refuse("moe_layers", f"{expected}")
    m.key("attention.sliding_window", c.integer("attention_chunk_size", default=8192))
    c.expect("attention_chunk_size", 8192)
    rotated = c.items("no_rope_layers")
    if rotated and rotated != [int((i + 1) % 4 != 0) for i in range(m.n_layer)]:
        raise c.refuse("no_rope_layers", "every fourth layer without rotation")
    m.key("attention.temperature_scale", c.number("attn_scale") if c.flag("attn_temperature_tuning") else None)
    m.key("attention.temperature_length", c.integer("floor_scale"))
    c.expect("attn_temperature_tuning", True, 4)
    c.expect("use_qk_norm", c.integer("num_local_experts") != 128)
    c.ignore("layer_types", "no_rope_layer_interval", "attention_bias", "for_llm_compressor")


def _finish_llama4(m: Build) -> None:
    put_llama3(m, m.metadata["llama4.rope.dimension_count"])
    tied(m)


def _mellum(m: Build) -> None:
    c = m.config
    _base(m)
    full, own = read_rope(c), read_rope(c, "sliding_attention")
    m.key("rope.freq_base", full.theta)
    if full.type == "yarn":
        put_yarn(m, full)
    elif full.type != "default":
        raise UnsupportedError(f"{c.path}: rope_type {full.type} is not known for {m.arch}")
    experts(m, "num_local_experts", "num_experts")
    c.expect("norm_topk_prob", True)
    is_window = windows(m, 4)
    if any(is_window):
        m.key("attention.sliding_window", c.integer("sliding_window", least=1))
        m.key("attention.sliding_window_pattern", is_window)
        m.key("rope.freq_base_swa", own.theta)
    elif "mellum.attention.sliding_window_pattern" in m.metadata:
        del m.metadata["mellum.attention.sliding_window_pattern"]
        c.ignore("sliding_window")
    if set(c.items("mlp_layer_types") or ["sparse"]) != {"sparse"}:
        raise c.refuse("mlp_layer_types", "sparse in all layers")
    c.expect("decoder_sparse_step", 1)
    c.ignore("use_sliding_window", "max_window_layers", "mlp_only_layers")


def _cohere2moe(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    sizes(m, n_ff=False)
    head_dim(m)
    m.key("feed_forward_length", c.integer("prefix_dense_intermediate_size", default=c.integer("intermediate_size")))
    if c.get("rms_norm_eps") is not None:
        rms_eps(m)
    else:
        layer_eps(m)
    rope(m)
    m.key("vocab_size", c.integer("vocab_size"))
    m.key("logit_scale", c.number("logit_scale"))
    m.key("rope.dimension_count", c.integer("head_dim"))
    m.key("rope.scaling.type", "none")
    m.key("attention.sliding_window", c.integer("sliding_window", least=1))
    m.key("attention.sliding_window_pattern", windows(m, c.integer("sliding_window_pattern", default=4), 0))
    m.key("leading_dense_block_count", dense_lead(m))
    m.key("expert_count", c.integer("num_experts", least=1))
    m.key("expert_used_count", c.integer("num_experts_per_tok", least=1))
    width, n_shared = c.integer("intermediate_size"), c.integer("num_shared_experts", default=0)
    m.key("expert_feed_forward_length", width)
    if n_shared:
        m.key("expert_shared_count", n_shared)
        m.key("expert_shared_feed_forward_length", n_shared * width)
        c.expect("shared_expert_combination_strategy", "average")
    c.ignore("shared_expert_combination_strategy")
    m.key("expert_weights_norm", c.flag("norm_topk_prob"))
    c.expect("expert_selection_fn", "sigmoid", "softmax")
    m.key("expert_gating_func", 2 if c.get("expert_selection_fn") == "sigmoid" else 1)
    c.ignore("prefix_dense_sliding_window_pattern", "attention_bias", "use_qk_norm", "use_parallel_block")
    c.expect("use_qk_norm", False)
    c.expect("use_parallel_block", True)


def _ling2(m: Build) -> None:
    c = m.config
    activation(m, *SILU)
    further = n_further(m, "num_nextn_predict_layers")
    sizes(m, n_further=further)
    rms_eps(m)
    width = head_dim(m)
    found = rope(m)
    partial = found.partial if "partial_rotary_factor" in found.values else 0.5
    m.key("rope.dimension_count", int(width * partial))
    m.key("leading_dense_block_count", c.integer("first_k_dense_replace", default=0))
    m.key("vocab_size", c.integer("vocab_size"))
    experts(m, "num_experts")
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
    m.key("nextn_predict_layers", further)
    c.expect("use_qk_norm", True)
    c.expect("moe_router_enable_expert_bias", True)
    no_window(m)
    c.ignore("use_qkv_bias", "use_bias", "use_rmsnorm", "partial_rotary_factor", "num_mtp_layers")


ARCHITECTURES = (
    Architecture("dots1", ("Dots1ForCausalLM",), _dots1, DOTS1, tied),
    Architecture("hunyuan-moe", ("HunYuanMoEV1ForCausalLM", "HunYuanForCausalLM"), _hunyuan, HUNYUAN, tied),
    Architecture(
        "llama4", ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), _llama4, LLAMA4, _finish_llama4,
        r"vision_model|multi_modal_projector",
    ),
    Architecture("mellum", ("MellumForCausalLM",), _mellum, MELLUM, tied),
    Architecture("cohere2_moe", ("Cohere2MoeForCausalLM",), _cohere2moe, COHERE2_MOE, lambda m: tied(m, True)),
    Architecture(
        "bailingmoe2", ("BailingMoeV2ForCausalLM",), _ling2, LING2, tied, "",
        frozenset({"mtp_loss_scaling_factor", "moe_router_topk_scaling_factor", "multi_gate"}),
    ),
)  # fmt: skip
