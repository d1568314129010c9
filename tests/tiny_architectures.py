"""Tiny random models of all architectures: what their metadata says beside the usual, and their optional tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from factories import MemoryModel, tiny_model

EXPERTS = {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 48}
SHARED = EXPERTS | {"expert_shared_count": 1, "leading_dense_block_count": 1}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": None}
MISTRAL4 = SHARED | {
    "attention.q_lora_rank": 48, "attention.kv_lora_rank": 64, "attention.key_length": 80, "attention.value_length": 64,
    "attention.head_count_kv": 1, "attention.key_length_mla": 48, "attention.value_length_mla": 32,
    "rope.dimension_count": 16, "leading_dense_block_count": 0, "expert_weights_scale": 1.0,
    "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 4,
}  # fmt: skip
LATENT = {
    "attention.kv_lora_rank": 64, "attention.key_length": 48, "attention.value_length": 32, "rope.dimension_count": 16,
    "attention.head_count_kv": 4,
}  # fmt: skip
GRANITE = {"embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 4.0, "attention.scale": 0.2}
DELTA = {
    "block_count": 5, "nextn_predict_layers": 1, "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2,
    "ssm.time_step_rank": 4, "ssm.inner_size": 64, "rope.dimension_count": 8,
}  # fmt: skip
KDA = SHARED | {
    "block_count": 3, "attention.head_count_kv": [0, 0, 4], "ssm.conv_kernel": 4, "kda.head_dim": 16,
    "attention.kv_lora_rank": 48, "attention.key_length": 64, "attention.value_length": 48, "rope.dimension_count": 16,
    "attention.key_length_mla": 48, "attention.value_length_mla": 32, "expert_gating_func": 2,
    "expert_weights_scale": 1.5,
}  # fmt: skip
QWEN4EXP = DELTA | EXPERTS | {
    "block_count": 4, "nextn_predict_layers": None, "expert_shared_feed_forward_length": 48, "context_length": 512,
    "attention.key_length": 32, "attention.value_length": 32, "hyper_connection.count": 4,
    "hyper_connection.low_rank": 32, "full_attention_interval": 2, "attention.compress_ratios": [0, 4, 0, 4],
    "attention.indexer.head_count": 4, "attention.indexer.key_length": 32, "attention.indexer.top_k": 24,
    "ple.layers": [2], "ple.ngram_size": 3, "ple.heads_per_ngram": 2, "ple.conv_kernel": 4, "ple.eos_token_id": 7,
    "embedding_length_per_layer_input": 16, "ple.layer_multipliers": np.array([23703573157769, 20109073645365,
    8052911324071], np.uint64), "ple.head_vocab_sizes": np.array([101, 103, 107, 109], np.uint64),
    "ple.head_offsets": np.array([0, 101, 204, 311], np.uint64),
}  # fmt: skip
WINDOW = {"block_count": 4, "attention.sliding_window": 6}
LISTED = WINDOW | {"attention.sliding_window_pattern": np.array([True, False, True, False])}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 4}
GATED = LISTED | SHARED | YARN | {
    "attention.head_count": np.array([8, 4, 8, 4], np.int32), "attention.key_length": 16, "attention.value_length": 16,
    "rope.freq_base_swa": 500.0, "expert_shared_feed_forward_length": 40, "expert_weights_norm": True,
}  # fmt: skip
# With windows, chunks, sinks, soft caps.
WINDOWED: dict[str, dict[str, Any]] = {
    "cohere2": WINDOW | LAYER_NORM | {"logit_scale": 0.5},
    "cohere2_moe": LISTED | SHARED | {"logit_scale": 0.5, "expert_shared_feed_forward_length": 96},
    "gemma2": WINDOW | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": WINDOW | {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 500.0},
    "gemma3n": LISTED | {
        "block_count": 6, "attention.sliding_window_pattern": np.array([True, False, True, False, True, False]),
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32, "rope.freq_base_swa": 500.0,
        "final_logit_softcapping": 3.0, "feed_forward_length": np.array([96, 64, 96, 96, 64, 64], np.int32),
        "altup.num_inputs": 4, "altup.active_idx": 0,
        "activation_sparsity_scale": np.float32([1.2, 0.4, -0.3, -np.inf, -np.inf, -np.inf]),
    },
    "gemma4": LISTED | {
        "block_count": 6, "attention.sliding_window_pattern": np.array([True, False, True, False, True, False]),
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 32, "attention.key_length": 32,
        "attention.value_length": 32, "attention.key_length_swa": 16, "attention.value_length_swa": 16,
        "rope.dimension_count_swa": 16, "rope.freq_base_swa": 500.0, "final_logit_softcapping": 3.0,
        "feed_forward_length": np.array([96, 96, 96, 96, 64, 64], np.int32), "expert_count": 8, "expert_used_count": 3,
        "expert_feed_forward_length": 48, "attention.head_count_kv": np.array([2, 4, 2, 4, 2, 4], np.int32),
    },
    "granite_swa": LISTED | GRANITE | {"attention.rope_pattern": np.array([True, True, False, True])},
    "dots3note": LISTED | SHARED | {
        "attention.head_count": np.array([2, 4, 2, 4], np.int32), "attention.head_count_kv": 1,
        "attention.q_lora_rank": 48, "attention.kv_lora_rank": 64, "attention.kv_lora_rank_swa": 48,
        "attention.key_length": 80, "attention.value_length": 64, "attention.key_length_mla": 48,
        "attention.value_length_mla": 32, "attention.key_length_swa": 64, "attention.value_length_swa": 48,
        "attention.key_length_mla_swa": 64, "attention.value_length_mla_swa": 48, "rope.dimension_count": 16,
        "rope.freq_base_swa": 500.0, "expert_weights_scale": 1.5, "expert_weights_norm": True,
        "attention.indexer.head_count": 16, "attention.indexer.key_length": 32, "attention.indexer.top_k": 8,
        "attention.indexer.types": np.array([False, True, False, True]),
    },
    "exaone4": WINDOW, "grok": EXPERTS | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "muse-glimmer": WINDOW | {"attention.sliding_window_pattern": 2, "logit_scale": 0.7, "rope.freq_base_swa": 500.0},
    "gpt-oss": WINDOW | EXPERTS | YARN, "laguna": GATED | {"rope.dimension_count_swa": 16, "rope.dimension_count": 8},
    "llama4": EXPERTS | {"block_count": 4, "interleave_moe_layer_step": 2, "expert_used_count": 2,
                         "attention.temperature_length": 4},
    "maple": LISTED | EXPERTS | {"rope.dimension_count": 8, "swiglu_clamp_exp": np.float32([0.5] * 4)},
    "mellum": WINDOW | EXPERTS | YARN | {"rope.freq_base_swa": 500.0},
    "mimo2": LISTED | SHARED | {
        "attention.head_count_kv": np.array([2, 4, 2, 4], np.int32), "attention.key_length": 48,
        "attention.value_length": 32, "attention.value_scale": 0.7, "rope.dimension_count": 16,
        "expert_shared_count": 0, "rope.freq_base_swa": 500.0,
    },
    "spark2_5": LISTED | {"rope.dimension_count": 4, "rope.dimension_count_swa": 16, "rope.freq_base_swa": 500.0},
    "phi3": WINDOW | {"rope.scaling.original_context_length": 8, "rope.scaling.attn_factor": 1.2},
    "starcoder2": WINDOW | LAYER_NORM,
    "plamo3": WINDOW | {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 500.0},
    "smallthinker": WINDOW | EXPERTS,
    "afmoe": WINDOW | SHARED | {"block_count": 4},
    "exaone-moe": WINDOW | SHARED | {"block_count": 4},
    "step35": GATED | {
        "swiglu_clamp_exp": np.float32([0, 0.3, 0, 0.3]), "swiglu_clamp_shexp": np.float32([0, 0, 1, 1]),
    },
}  # fmt: skip
MAMBA2 = {
    "block_count": 3, "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}  # fmt: skip
NEMOTRON_H = MAMBA2 | {"feed_forward_length": [0, 80, 0], "attention.head_count_kv": [0, 0, 2]}
SHORT_CONV = {"block_count": 3, "shortconv.l_cache": 3, "attention.head_count_kv": [0, 2, 0]}
TINY: dict[str, dict[str, Any]] = {
    "arctic": EXPERTS | {"expert_feed_forward_length": None}, "baichuan": {}, "chatglm": {"rope.dimension_count": 8},
    "bloom": LAYER_NORM | {"attention.head_count_kv": 4}, "codeshell": LAYER_NORM, "refact": {},
    "bitnet": {}, "bitnet-b1.58": {},
    "mpt": LAYER_NORM | {"attention.head_count": 6, "embedding_length": 96, "attention.max_alibi_bias": 8.0,
                         "attention.clamp_kqv": 0.5, "attention.head_count_kv": 6},
    "minicpm3": LATENT | {"attention.q_lora_rank": 48, "rope.scaling.original_context_length": 8,
                          "rope.scaling.attn_factor": 1.2},
    "plm": LATENT,
    "deepseek32": MISTRAL4 | {"expert_weights_norm": True, "rope.scaling.yarn_log_multiplier": 0.1},
    "dbrx": LAYER_NORM | {"attention.clamp_kqv": 0.5, "expert_count": 8, "expert_used_count": 3},
    "deepseek": SHARED | {"block_count": 3}, "exaone": {}, "gpt2": LAYER_NORM, "internlm2": {}, "minicpm": {},
    "nemotron": LAYER_NORM | {"rope.dimension_count": 8}, "orion": LAYER_NORM, "plamo": {},
    "qwen": {"attention.head_count_kv": 4}, "starcoder": LAYER_NORM | {"attention.head_count_kv": 1}, "xverse": {},
    "bailingmoe2": SHARED | {"block_count": 3, "expert_shared_feed_forward_length": 80, "expert_gating_func": 2,
                             "expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.5},
    "command-r": LAYER_NORM | {"logit_scale": 0.3}, "falcon": LAYER_NORM, "gemma": {"attention.key_length": 32,
    "attention.value_length": 32}, "gptneox": LAYER_NORM | {"rope.dimension_count": 8}, "mistral4": MISTRAL4,
    "olmo": LAYER_NORM | {"attention.clamp_kqv": 0.5},
    "flex-olmo": EXPERTS,
    "grovemoe": EXPERTS | {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.5},
    "nanbeige": {"num_loops": 3, "skip_loop_final_norm": True}, "ouro": {"num_loops": 2},
    "olmo2": {}, "phi2": LAYER_NORM | {"rope.dimension_count": 8}, "stablelm": LAYER_NORM | {"rope.dimension_count": 4},
    "minimax-01": EXPERTS | {"block_count": 3, "attention.recurrent_layers": [True, False, True], "residual_scale": 1.7,
                             "rope.dimension_count": 8, "attention.key_length": 32, "attention.value_length": 32},
    "minimax-m3": SHARED | {"block_count": 3, "rope.dimension_count": 8},
    "hy_v4": MISTRAL4 | {"block_count": 3, "leading_dense_block_count": 1, "rope.scaling.type": None,
                         "rope.scaling.factor": None, "expert_gating_func": 2, "expert_weights_norm": True,
                         "expert_weights_scale": 2.5, "swiglu_clamp_exp": np.float32([0.5] * 3),
                         "hyper_connection.count": 4, "hyper_connection.epsilon": 1e-6,
                         "hyper_connection.magnitude": 1.7},
    "dots1": SHARED | {"block_count": 3}, "ernie4_5": {}, "glm4": {"rope.dimension_count": 8},
    "ernie4_5-moe": EXPERTS | {"block_count": 4, "leading_dense_block_count": 1, "interleave_moe_layer_step": 2},
    "glm4moe": SHARED | {"block_count": 4, "nextn_predict_layers": 1, "rope.dimension_count": 8},
    "granite": GRANITE, "granitemoe": GRANITE | EXPERTS | {"expert_shared_feed_forward_length": 64},
    "mistral3": {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 4,
                 "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
    "qwen2moe": EXPERTS | {"expert_shared_feed_forward_length": 80},
    "apertus": {"xielu.alpha_p": np.float32([0.3, -0.4]), "xielu.alpha_n": np.float32([0.2, 0.7]),
                "xielu.beta": np.float32([0.5, 0.4])},
    "talkie": {"logit_scale": 0.6},
    "bailingmoe": SHARED | {"leading_dense_block_count": 0}, "maincoder": {}, "pangu-embedded": {}, "paddleocr": {},
    "cogvlm": {},
    "deci": {"block_count": 4, "attention.head_count": np.array([4, 4, 0, 4], np.int32),
             "attention.head_count_kv": np.array([2, 0, 0, 4], np.int32), "attention.key_length": 16,
             "attention.value_length": 16, "feed_forward_length": np.array([96, 64, 80, 0], np.int32)},
    "jais": LAYER_NORM | {"attention.head_count_kv": 4, "attention.max_alibi_bias": 8.0},
    "openelm": {"attention.head_count": np.array([4, 8], np.int32), "attention.key_length": 16,
                "attention.head_count_kv": np.array([2, 4], np.int32), "attention.value_length": 16,
                "feed_forward_length": np.array([96, 64], np.int32)},
    "phimoe": EXPERTS | {"expert_used_count": 2, "expert_feed_forward_length": None},
    "hunyuan-dense": {}, "hy_v3": SHARED | {"block_count": 3}, "arcee": {}, "jais2": LAYER_NORM, "olmoe": EXPERTS,
    "hunyuan-moe": EXPERTS | {"expert_shared_count": 1}, "minimax-m2": EXPERTS | {"rope.dimension_count": 8},
    "seed_oss": {"attention.key_length": 64, "attention.value_length": 64}, "smollm3": {"block_count": 4},
    "qwen35": DELTA, "qwen35moe": DELTA | EXPERTS | {"expert_shared_feed_forward_length": 48},
    "qwen3next": DELTA | EXPERTS, "kimi-linear": KDA, "qwen4exp": QWEN4EXP,
    "falcon-h1": MAMBA2, "nemotron_h": NEMOTRON_H, "lfm2": SHORT_CONV,
    "plamo2": MAMBA2 | {"attention.head_count": [0, 4, 0], "attention.head_count_kv": [0, 2, 0], "ssm.group_count": 0,
                        "attention.sliding_window": 6, "attention.key_length": 16, "attention.value_length": 16},
    "mamba2": MAMBA2 | {"attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0},
    "granitehybrid": MAMBA2 | GRANITE | EXPERTS | {
        "attention.head_count_kv": [0, 2, 0], "expert_shared_feed_forward_length": 64},
    "nemotron_h_moe": NEMOTRON_H | EXPERTS | {"expert_shared_feed_forward_length": 64, "expert_weights_scale": 2.5},
    "lfm2moe": SHORT_CONV | EXPERTS | {"leading_dense_block_count": 1, "expert_gating_func": 2},
    "jamba": {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "ssm.conv_kernel": 4, "ssm.inner_size": 96,
              "ssm.state_size": 16, "ssm.time_step_rank": 5, "expert_count": 8, "expert_used_count": 3},
    "mamba": {"attention.head_count": 0, "attention.head_count_kv": None, "feed_forward_length": 0,
              "ssm.conv_kernel": 4, "ssm.inner_size": 96, "ssm.state_size": 16, "ssm.time_step_rank": 5},
    "kimi-k3": KDA | {
        "block_count": 4, "attention.head_count_kv": [0, 1, 0, 1], "attention.q_lora_rank": 48,
        "attn_res.block_size": 2, "kda.gate_lower_bound": -5.0, "expert_latent_length": 32,
        "activation.situ_beta": 1.0, "activation.situ_linear_beta": 2.0,
    },
    "bailingmoe3": KDA | {"kda.gate_lower_bound": -5.0, "expert_group_count": 4, "expert_group_used_count": 2,
                          "swiglu_clamp_exp": [0.0, 0.5, 0.0], "swiglu_clamp_shexp": [0.7, 0.0, 0.4]},
}  # fmt: skip
OPTIONAL: dict[str, tuple[str, ...]] = {
    "bitnet": (".scale",),
    "kimi-k3": ("attn_gate.weight", "ffn_routed_norm.weight"),
    "lfm2": ("token_embd_norm.weight",), "lfm2moe": ("token_embd_norm.weight",), "mamba2": ("conv1d.bias",),
    "grok": ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"),
    "qwen3next": ("ssm_in.weight", "ssm_ba.weight"), "bailingmoe3": ("ssm_f_a.weight", "ssm_g.weight"),
    "gemma4": ("attn_v.weight", "layer_output_scale.weight", "ffn_down_exps.scale", "rope_freqs.weight"),
    "bailingmoe2": ("attn_qkv.bias",), "mimo2": ("blk.0.attn_sinks.weight",),
    "granite_swa": ("sinks.weight",), "gpt-oss": ("output.bias", "ffn_gate_inp.bias", "exps.bias"),
    "laguna": ("_norm.weight", "attn_gate.weight"), "phi3": ("attn_qkv.weight", "rope_factors_long.weight"),
    "minicpm": ("rope_factors_long.weight",), "minicpm3": ("rope_factors_long.weight",),
    "step35": ("_norm.weight", "attn_gate.weight", "rope_freqs.weight"),
}  # fmt: skip
"""Endings of optional tensors, beside those that all have that may."""


def tiny(arch: str, **keys: Any) -> MemoryModel:
    """The tiny model of an architecture; `keys` replace its own."""
    optional = ("exp_probs_b.bias", "_q.bias", "_k.bias", "_v.bias", "kv_b.weight", *OPTIONAL.get(arch, ()))
    return tiny_model(arch, optional=optional, **(WINDOWED | TINY)[arch] | keys)
