"""Rearrangements of single architectures, each against what it should be written out in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BASE, bf16, build, values, write_safetensors

from ikcli.convert import archs
from ikcli.convert.archs import ARCHITECTURES, architecture_of, by_class
from ikcli.convert.build import Architecture, Build, convert_tensors
from ikcli.convert.config import Config
from ikcli.convert.names import gguf_names
from ikcli.convert.rope import check_factors
from ikcli.convert.source import SafetensorsSource
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.models import ARCHITECTURES as MODELS

Arrays = dict[str, np.ndarray]


def numbers(*shape: int) -> np.ndarray:
    """Different values, which bfloat16 has, too."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 250 + 1


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "kv_lora_rank": 6, "q_lora_rank": 4,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 4, "moe_intermediate_size": 4,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip


def test_latent_keys_are_turned_and_values_are_not(tmp_path: Path) -> None:
    kv = numbers(4 * (4 + 3), 6)
    m = build(tmp_path, DEEPSEEK, {"model.layers.0.self_attn.kv_b_proj.weight": bf16(kv)})
    heads = kv.reshape(4, 7, 6)
    assert m.tensors["blk.0.attn_k_b.weight"].shape == (4, 6, 4)
    np.testing.assert_array_equal(values(m, "blk.0.attn_k_b.weight"), heads[:, :4].transpose(0, 2, 1))
    np.testing.assert_array_equal(values(m, "blk.0.attn_v_b.weight"), heads[:, 4:])
    wanted = {"key_length": 8, "key_length_mla": 6, "value_length": 6, "value_length_mla": 3, "head_count_kv": 1}
    assert {k: m.metadata[f"deepseek2.attention.{k}"] for k in wanted} == wanted
    assert m.metadata["deepseek2.expert_group_count"] == 2


def test_a_latent_matrix_of_another_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"kv_b_proj\.weight has 27 rows, not 4 \* \(4 \+ 3\)"):
        build(tmp_path, DEEPSEEK, {"model.layers.0.self_attn.kv_b_proj.weight": numbers(27, 6)})


def test_yarn_of_deepseek(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.7}
    m = build(tmp_path, DEEPSEEK | {"rope_scaling": scaling | {"original_max_position_embeddings": 16}}, {})
    assert m.metadata["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.07)
    assert m.metadata["deepseek2.rope.scaling.original_context_length"] == 16
    with pytest.raises(FormatError, match="mscale"):
        build(tmp_path, DEEPSEEK | {"rope_scaling": scaling | {"mscale": 1.0}}, {})


QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "head_dim": 8, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 2, "linear_value_head_dim": 3, "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0],
                        "partial_rotary_factor": 0.5},
}  # fmt: skip


def test_value_heads_of_delta_nets_take_turns_between_key_heads(tmp_path: Path) -> None:
    qkv, z, out = numbers(2 * 4 + 18, 8), numbers(18, 8), numbers(8, 18)
    logs, conv = np.linspace(-1, 1, 6).astype(np.float32), numbers(26, 1, 4)
    part = "model.layers.0.linear_attn."
    m = build(tmp_path, QWEN35, {
        f"{part}in_proj_qkv.weight": bf16(qkv), f"{part}in_proj_z.weight": bf16(z), f"{part}out_proj.weight": bf16(out),
        f"{part}A_log": logs, f"{part}conv1d.weight": bf16(conv), f"{part}norm.weight": numbers(3),
        "model.layers.0.input_layernorm.weight": bf16(numbers(8)),
    })  # fmt: skip
    heads = [0, 3, 1, 4, 2, 5]  # the first one of each key head, then the second ones
    rows = [3 * h + i for h in heads for i in range(3)]
    np.testing.assert_array_equal(values(m, "blk.0.attn_qkv.weight"), qkv[[*range(8), *(8 + r for r in rows)]])
    np.testing.assert_array_equal(values(m, "blk.0.attn_gate.weight"), z[rows])
    np.testing.assert_array_equal(values(m, "blk.0.ssm_out.weight"), out[:, rows])
    np.testing.assert_allclose(values(m, "blk.0.ssm_a"), -np.exp(logs[heads]), rtol=1e-6)
    want = conv[[*range(8), *(8 + r for r in rows)], 0]
    np.testing.assert_array_equal(values(m, "blk.0.ssm_conv1d.weight"), want)
    np.testing.assert_array_equal(values(m, "blk.0.ssm_norm.weight"), numbers(3))
    np.testing.assert_array_equal(values(m, "blk.0.attn_norm.weight"), numbers(8) + 1)
    assert m.metadata["qwen35.attention.recurrent_layers"] == [True, False]
    assert m.metadata["qwen35.rope.dimension_count"] == 4


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 4, "num_local_experts": 3,
    "num_experts_per_tok": 2, "sliding_window": 8,
}  # fmt: skip


def test_gate_and_up_of_gpt_oss_take_turns_in_columns(tmp_path: Path) -> None:
    x, down, bias = numbers(3, 8, 24), numbers(3, 12, 8), numbers(3, 24)
    part = "model.layers.1.mlp.experts."
    m = build(tmp_path, GPT_OSS, {
        f"{part}gate_up_proj": bf16(x), f"{part}down_proj": bf16(down), f"{part}gate_up_proj_bias": bf16(bias),
    })  # fmt: skip
    np.testing.assert_array_equal(values(m, "blk.1.ffn_gate_exps.weight"), x[:, :, 0::2].transpose(0, 2, 1))
    np.testing.assert_array_equal(values(m, "blk.1.ffn_up_exps.weight"), x[:, :, 1::2].transpose(0, 2, 1))
    np.testing.assert_array_equal(values(m, "blk.1.ffn_down_exps.weight"), down.transpose(0, 2, 1))
    np.testing.assert_array_equal(values(m, "blk.1.ffn_up_exps.bias"), bias[:, 1::2])
    assert m.metadata["gpt-oss.rope.scaling.type"] == "yarn"  # the default of the class
    with pytest.raises(UnsupportedError, match="key swiglu_limit is 5"):
        build(tmp_path, GPT_OSS | {"swiglu_limit": 5.0}, {})


def test_layers_with_windows_are_listed_where_they_are_unusual(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    assert (
        "gpt-oss.attention.sliding_window_pattern" not in build(tmp_path, GPT_OSS | {"layer_types": kinds}, {}).metadata
    )
    m = build(tmp_path, GPT_OSS | {"layer_types": kinds[::-1]}, {})
    assert m.metadata["gpt-oss.attention.sliding_window_pattern"] == [False, True]


def test_one_matrix_for_queries_keys_and_values(tmp_path: Path) -> None:
    internlm = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "rope_theta": 1e6}
    x = numbers(16, 8)  # per key head: two queries, key and value, each of two rows
    m = build(tmp_path, internlm, {"model.layers.0.attention.wqkv.weight": bf16(x)})
    np.testing.assert_array_equal(values(m, "blk.0.attn_q.weight"), x[[0, 1, 2, 3, 8, 9, 10, 11]])
    np.testing.assert_array_equal(values(m, "blk.0.attn_k.weight"), x[[4, 5, 12, 13]])
    np.testing.assert_array_equal(values(m, "blk.0.attn_v.weight"), x[[6, 7, 14, 15]])

    neox = {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu"}
    x, bias = numbers(24, 8), numbers(24)
    part = "gpt_neox.layers.0.attention.query_key_value"
    m = build(tmp_path, neox, {f"{part}.weight": bf16(x), f"{part}.bias": bf16(bias)})
    order = [6 * head + 2 * i + row for i in range(3) for head in range(4) for row in range(2)]
    np.testing.assert_array_equal(values(m, "blk.0.attn_qkv.weight"), x[order])
    np.testing.assert_array_equal(values(m, "blk.0.attn_qkv.bias"), bias[order])


def test_turned_matrices_of_gpt2(tmp_path: Path) -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 4}
    x = numbers(8, 24)
    m = build(tmp_path, gpt2, {"transformer.h.1.attn.c_attn.weight": bf16(x)})
    np.testing.assert_array_equal(values(m, "blk.1.attn_qkv.weight"), x.T)


def test_factors_of_long_contexts(tmp_path: Path) -> None:
    long = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.5]}
    phi = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "original_max_position_embeddings": 16}
    m = build(tmp_path, phi | {"rope_scaling": long}, {})
    assert values(m, "rope_factors_long.weight").tolist() == [2.5]
    assert m.metadata["phi3.rope.scaling.attn_factor"] == pytest.approx((1 + np.log(4) / np.log(16)) ** 0.5)
    with pytest.raises(FormatError, match="should have 1 numbers as long_factor"):
        build(tmp_path, phi | {"rope_scaling": long | {"long_factor": [1.0, 2.0]}}, {})


def test_factors_that_would_not_be_stored_or_mean_something_else(tmp_path: Path) -> None:
    """MiniCPM 4 and Phi-3.5-MoE have factors of frequencies, too; the latter scales cosine and sine by a number."""
    long = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.5]}
    mini = {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "rope_scaling": long}
    assert values(build(tmp_path, mini, {}), "rope_factors_short.weight").tolist() == [1.0]
    phi = {"architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "num_local_experts": 4,
           "num_experts_per_tok": 2, "rope_scaling": long | {"short_mscale": 1.25, "long_mscale": 1.25}}  # fmt: skip
    assert build(tmp_path, phi, {}).metadata["phimoe.rope.scaling.attn_factor"] == 1.25
    phi3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    window = {"architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa"}
    for config, message in (
        (phi | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1; known is 0.01"),
        (phi | {"rope_scaling": long | {"short_mscale": 1.2, "long_mscale": 1.3}}, "known is equal mscales"),
        (phi3 | {"rope_scaling": long | {"long_mscale": 1.2}}, "known is no short_mscale"),
        (window | {"layer_rope_theta": [10000.0, 500.0]}, r"known is 0 or 10000\.0 for every layer"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            build(tmp_path, config, {})
    seed = {"architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}  # fmt: skip
    m = build(tmp_path, seed, {})
    with pytest.raises(UnsupportedError, match="rope_type llama3 is not known for seed_oss"):
        check_factors(m)


def test_embeddings_of_tokens_without_an_output_are_left_out(tmp_path: Path) -> None:
    text = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 16, "output_vocab_size": 12}
    apertus = {"architectures": ["Apertus1p5ForConditionalGeneration"], "model_type": "apertus1p5", "text_config": text}
    x = bf16(numbers(16, 8))
    tensors = {
        "model.language_model.embed_tokens.weight": x, "lm_head.weight": bf16(numbers(12, 8)),
        "model.vision_tokenizer.encoder.weight": bf16(numbers(4, 4)),
    }  # fmt: skip
    m = build(tmp_path, apertus, tensors)
    kept = (x[:12].astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(values(m, "token_embd.weight"), kept)
    assert m.tensors["output.weight"].shape == (8, 12)
    assert m.notes == ["tokens from 12 on, of images and sounds, are left out"]


def test_layers_for_further_tokens_are_counted_where_they_are(tmp_path: Path) -> None:
    glm = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": 4, "head_dim": 2,
        "moe_intermediate_size": 4, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    m = build(tmp_path, glm, {"model.layers.0.input_layernorm.weight": bf16(numbers(8))})
    assert (m.metadata["glm4moe.block_count"], m.metadata["glm4moe.nextn_predict_layers"]) == (2, 0)
    m = build(tmp_path, glm, {"model.layers.2.eh_proj.weight": bf16(numbers(8, 16))})
    assert (m.metadata["glm4moe.block_count"], m.metadata["glm4moe.nextn_predict_layers"]) == (3, 1)
    assert m.tensors["blk.2.nextn.eh_proj.weight"].shape == (16, 8)


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, 3e4),
        ({"rope_scaling": None, "rope_theta": 2e4}, 2e4),
    ],
)
def test_three_generations_of_rotations(tmp_path: Path, config: dict[str, Any], theta: float) -> None:
    m = build(tmp_path, {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | config, {})
    assert m.metadata["llama.rope.freq_base"] == theta


def test_null_is_no_default(tmp_path: Path) -> None:
    """transformers has a default of 1536; null says that there is no such matrix."""
    m = build(tmp_path, DEEPSEEK | {"q_lora_rank": None}, {})
    assert "deepseek2.attention.q_lora_rank" not in m.metadata
    without = {k: v for k, v in DEEPSEEK.items() if k != "q_lora_rank"}
    assert build(tmp_path, without, {}).metadata["deepseek2.attention.q_lora_rank"] == 1536


def test_text_parts_of_models_that_see(tmp_path: Path) -> None:
    text = BASE | {"sliding_window": 8, "query_pre_attn_scalar": 256}
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "vision_config": {"image_size": 8}, "mm_tokens_per_image": 4,
    }))  # fmt: skip
    write_safetensors(tmp_path / "model.safetensors", {
        "language_model.model.layers.0.input_layernorm.weight": bf16(numbers(8)),
        "vision_tower.encoder.layers.0.weight": bf16(numbers(8)),
    })  # fmt: skip
    config = Config(tmp_path)
    architecture = architecture_of(config)
    m = Build(config, SafetensorsSource(tmp_path), architecture.name)
    architecture.keys(m)
    convert_tensors(m, architecture)
    assert list(m.tensors) == ["blk.0.attn_norm.weight"] and m.dropped == ["vision_tower.encoder.layers.0.weight"]
    assert m.metadata["gemma3.attention.key_length"] == 256  # of the class
    assert config.not_understood(architecture.harmless) == []


def test_every_class_has_one_conversion() -> None:
    folder = Path(archs.__file__).parent
    for files, listed in ((folder, archs._FAMILIES), (folder / "recurrent", archs._RECURRENT)):
        assert {path.stem for path in files.glob("*.py")} - {"__init__"} == set(listed.split())
    assert len(by_class()) == sum(len(a.classes) for a in ARCHITECTURES)


OTHER_NAMES = {"bitnet-25", "cohere2moe", "granite-swa", "nemotron_h_moe"}
"""Names of other programs, and that of Nemotron-H with experts, which the record of Nemotron-H writes."""


def test_every_architecture_that_runs_has_a_conversion() -> None:
    heads = {"gemma4-assistant", "eagle3", "dflash-draft"}
    assert {a.name for a in ARCHITECTURES} == set(MODELS) - OTHER_NAMES | heads


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.classes[0])
def test_gguf_has_names_of_every_architecture(architecture: Architecture) -> None:
    names = gguf_names(architecture.names or architecture.name, architecture.strip)
    assert "token_embd" in names.values() and any(
        place.startswith(("blk.*.", "enc.blk.*.")) for place in names.values()
    )


def test_names_of_one_architecture_leave_those_of_others_alone() -> None:
    """Arctic calls the norm before its experts what others call the norm before the feed-forward part."""
    gguf_names.cache_clear()
    assert gguf_names("arctic", "")["layers.*.post_attention_layernorm"] == "blk.*.ffn_norm_exps"
    assert gguf_names("llama", "")["layers.*.post_attention_layernorm"] == "blk.*.ffn_norm"


def test_two_norms_of_falcon(tmp_path: Path) -> None:
    """`attn_norm_2` is the norm before attention, unless the layer has only one."""
    config = {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "new_decoder_architecture": True}
    config |= {"layer_norm_epsilon": 1e-5, "num_kv_heads": 2}
    attention, feed_forward, single = numbers(8), numbers(8) + 8, numbers(8) + 16
    tensors = {
        "transformer.h.0.ln_attn.weight": attention,
        "transformer.h.0.ln_mlp.weight": feed_forward,
        "transformer.h.1.input_layernorm.weight": single,
    }
    m = build(tmp_path, config, tensors)
    np.testing.assert_array_equal(values(m, "blk.0.attn_norm_2.weight"), attention)
    np.testing.assert_array_equal(values(m, "blk.0.attn_norm.weight"), feed_forward)
    np.testing.assert_array_equal(values(m, "blk.1.attn_norm.weight"), single)


ARCTIC = {
    "architectures": ["ArcticForCausalLM"], "model_type": "arctic", "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_layer_frequency": 1, "parallel_attn_mlp_res": True, "tie_word_embeddings": True,
}  # fmt: skip
DBRX = {
    "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "n_layers": 2, "n_heads": 4, "d_model": 8,
    "max_seq_len": 64, "attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 12},
}  # fmt: skip
PLAMO = {"architectures": ["PlamoForCausalLM"], "model_type": "plamo", "n_shared_head": 2}
LING = {
    "architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid", "layer_group_size": 2,
    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "kv_lora_rank": 6, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 4, "first_k_dense_replace": 1, "head_dim": 2,
}  # fmt: skip
MUSE = {"architectures": ["MuseGlimmerForCausalLM"], "model_type": "muse_glimmer_text", "head_dim": 2}
STEP = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "head_dim": 2, "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"], "rope_theta": [1e4, 1e4], "moe_layers_enum": "1",
    "partial_rotary_factors": [0.5, 1.0], "moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Grok1ForCausalLM"]}, "Grok 2 .* convert_hf_to_gguf"),
        (ARCTIC | {"moe_layer_frequency": 2}, "moe_layer_frequency should be 1"),
        (ARCTIC | {"parallel_attn_mlp_res": False}, "parallel_attn_mlp_res should be true"),
        (DBRX | {"ffn_config": {"moe_normalize_expert_weights": 2}}, "known is moe_normalize_expert_weights 1"),
        (DBRX | {"ffn_config": {"ffn_hidden_size": "x"}}, 'ffn_config has ffn_hidden_size "x"'),
        (DBRX | {"attn_config": 7}, "attn_config should be an object"),
        (DBRX | {"attn_config": {"clip_qkv": "x"}}, 'attn_config has clip_qkv "x"'),
        (PLAMO | {"n_shared_head": 3}, "n_shared_head is 3"),
        (LING | {"kda_safe_gate": False}, "kda_safe_gate"),
        (LING | {"expert_swiglu_limit_list": [0, 7]}, "expert_swiglu_limit_list"),
        (MUSE | {"layer_rope_theta": [1e4, 1e4]}, "layer_rope_theta"),
        (STEP | {"moe_layers_enum": "0"}, "moe_layers_enum"),
        (STEP | {"moe_layers_enum": "a,b"}, "moe_layers_enum should be numbers"),
        (STEP | {"rope_theta": [1e4]}, "rope_theta has 1 values for 2 layers"),
        (STEP | {"rope_theta": [1e4, "x"]}, "rope_theta"),
        (STEP | {"attention_other_setting": 5}, "attention_other_setting should be an object"),
        (STEP | {"attention_other_setting": {"head_dim": 3}}, "attention_other_setting"),
        (STEP | {"swiglu_limits": ["x", 0]}, "swiglu_limits"),
    ],
)
def test_what_further_models_are_not_known_to_have_is_named(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises((FormatError, UnsupportedError), match=message):
        build(tmp_path, config, {})


@pytest.mark.parametrize("value", ["x", [1, 2], {}, -1, 0, 10**12, 1.5, True, [None], ["full_attention"]])
def test_odd_values_end_in_a_sentence(tmp_path: Path, value: Any) -> None:
    """Whatever a key holds: it is understood, or an error names a key or tensor."""
    kv = {"model.layers.0.self_attn.kv_b_proj.weight": bf16(numbers(28, 6))}
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
    cases = [(DEEPSEEK | {"rope_parameters": scaling}, kv), (QWEN35, {}), (GPT_OSS, {})]
    cases += [(c, {}) for c in (ARCTIC, DBRX, PLAMO, LING, MUSE, STEP)]
    for config, tensors in cases:
        for key in BASE | config:
            if key not in ("architectures", "model_type"):
                _no_traceback(tmp_path, config | {key: value}, tensors)
    for key in scaling:
        _no_traceback(tmp_path, DEEPSEEK | {"rope_parameters": scaling | {key: value}}, kv)


def _no_traceback(tmp_path: Path, config: dict[str, Any], tensors: Arrays) -> None:
    try:
        build(tmp_path, config, tensors)
    except IkError as problem:
        assert str(problem)


@pytest.mark.parametrize("shape", [(), (7,), (28, 6, 1), (1, 2, 3, 4)])
def test_odd_shapes_end_in_a_sentence(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(IkError, match="kv_b_proj"):
        build(
            tmp_path,
            DEEPSEEK,
            {"model.layers.0.self_attn.kv_b_proj.weight": numbers(*shape) if shape else np.ones((), np.float32)},
        )


def test_mixers_of_mamba_2(tmp_path: Path) -> None:
    """Numbers per head become a column, the norm a row per group; the decay is no longer a logarithm."""
    logs, norm, conv = np.linspace(-1, 1, 4).astype(np.float32), numbers(16), numbers(16 + 2 * 2 * 4, 1, 4)
    config = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "num_heads": 4, "head_dim": 4,
              "n_groups": 2, "state_size": 4, "time_step_limit": [0.0, float("inf")]}  # fmt: skip
    part = "backbone.layers.1.mixer."
    tensors = {f"{part}A_log": logs, f"{part}D": numbers(4), f"{part}dt_bias": numbers(4),
               f"{part}norm.weight": norm, f"{part}conv1d.weight": bf16(conv), f"{part}in_proj.weight": numbers(36, 8),
               "backbone.embeddings.weight": numbers(16, 8), "backbone.norm_f.weight": numbers(8),
               "backbone.layers.1.norm.weight": numbers(8)}  # fmt: skip
    m = build(tmp_path, config, tensors)
    shapes = {"ssm_a": (1, 4), "ssm_d": (1, 4), "ssm_dt.bias": (4,), "ssm_norm.weight": (8, 2),
              "ssm_conv1d.weight": (4, 32), "ssm_in.weight": (8, 36), "attn_norm.weight": (8,)}  # fmt: skip
    assert {name: m.tensors[f"blk.1.{name}"].shape for name in shapes} == shapes
    np.testing.assert_allclose(values(m, "blk.1.ssm_a")[:, 0], -np.exp(logs), rtol=1e-6)
    np.testing.assert_array_equal(values(m, "blk.1.ssm_d")[:, 0], numbers(4))
    np.testing.assert_array_equal(values(m, "blk.1.ssm_norm.weight"), norm.reshape(2, 8))
    np.testing.assert_array_equal(values(m, "blk.1.ssm_conv1d.weight"), conv[:, 0])
    with pytest.raises(UnsupportedError, match="time_step_limit"):
        build(tmp_path, config | {"time_step_limit": [0.001, 0.1]}, tensors)


@pytest.mark.parametrize("n_expert", [0, 4])
def test_granite_4_with_and_without_experts(tmp_path: Path, n_expert: int) -> None:
    config = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "mamba_n_heads": 4,
              "mamba_d_head": 4, "mamba_d_state": 4, "mamba_n_groups": 1, "layer_types": ["mamba", "attention"],
              "shared_intermediate_size": 6, "num_local_experts": n_expert, "num_experts_per_tok": 2 * (n_expert > 0),
              "position_embedding_type": "nope", "tie_word_embeddings": True}  # fmt: skip
    both = numbers(12, 8)
    m = build(tmp_path, config, {
        "model.layers.0.shared_mlp.input_linear.weight": both, "model.layers.0.mamba.D": numbers(4),
        "model.layers.0.shared_mlp.output_linear.weight": numbers(8, 6),
    })  # fmt: skip
    suffix = "_shexp" if n_expert else ""
    np.testing.assert_array_equal(values(m, f"blk.0.ffn_gate{suffix}.weight"), both[:6])
    np.testing.assert_array_equal(values(m, f"blk.0.ffn_up{suffix}.weight"), both[6:])
    np.testing.assert_array_equal(values(m, f"blk.0.ffn_down{suffix}.weight"), numbers(8, 6))
    assert m.metadata["granitehybrid.attention.head_count_kv"] == [0, 2]
    assert m.metadata["granitehybrid.rope.scaling.finetuned"] is False
    assert m.metadata["granitehybrid.feed_forward_length"] == (12 if n_expert else 6)


def test_convolutions_and_widths_of_lfm2(tmp_path: Path) -> None:
    config = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv", "full_attention"],
              "conv_L_cache": 3, "block_auto_adjust_ff_dim": True, "block_multiple_of": 5, "norm_eps": 1e-5,
              "block_ffn_dim_multiplier": 1.0}  # fmt: skip
    taps = numbers(8, 1, 3)
    m = build(tmp_path, config, {
        "model.layers.0.conv.conv.weight": taps, "model.layers.0.operator_norm.weight": numbers(8),
        "model.embed_tokens.weight": numbers(16, 8), "model.embedding_norm.weight": numbers(8),
        "model.layers.1.self_attn.out_proj.weight": numbers(8, 8),
        "model.layers.1.feed_forward.w1.weight": numbers(10, 8),
    })  # fmt: skip
    np.testing.assert_array_equal(values(m, "blk.0.shortconv.conv.weight"), taps[:, 0])
    wanted = {"blk.0.attn_norm.weight", "token_embd_norm.weight", "blk.1.attn_output.weight", "blk.1.ffn_gate.weight"}
    assert wanted <= set(m.tensors)
    assert m.metadata["lfm2.feed_forward_length"] == 10  # two thirds of 12, in steps of 5
    assert m.metadata["lfm2.attention.head_count_kv"] == [0, 2]


def test_alpha_of_dense_hunyuan(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    config = {"architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 8,
              "rope_theta": 1e4, "rope_scaling": scaling, "use_qk_norm": True, "tie_word_embeddings": True}  # fmt: skip
    m = build(tmp_path, config, {
        "model.layers.0.self_attn.query_layernorm.weight": numbers(8),
        "model.layers.0.self_attn.key_layernorm.weight": numbers(8), "model.embed_tokens.weight": numbers(16, 8),
    })  # fmt: skip
    assert {"blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"} <= set(m.tensors)
    assert m.metadata["hunyuan-dense.rope.freq_base"] == pytest.approx(1e4 * 1000 ** (8 / 6))
    assert "hunyuan-dense.expert_count" not in m.metadata


def test_embedding_models_have_no_output_matrix(tmp_path: Path) -> None:
    """Those of sentence-transformers leave it out, also where config.json does not tie it to the embeddings."""
    config = BASE | {
        "architectures": ["Qwen3Model"],
        "model_type": "qwen3",
        "head_dim": 2,
        "tie_word_embeddings": False,
    }
    tensors = {"embed_tokens.weight": np.zeros((16, 8), np.float32), "norm.weight": np.zeros(8, np.float32)}
    with pytest.raises(FormatError, match="tie_word_embeddings is false, and the checkpoint has no lm_head"):
        build(tmp_path, config, tensors)
    (tmp_path / "modules.json").write_text("[]")
    assert list(build(tmp_path, config, tensors).tensors) == ["token_embd.weight", "output_norm.weight"]
