"""Layers that predict further tokens in conversions: names, keys, and files with or without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import BASE, N_VOCAB, bf16, build, drawn, values, write_checkpoint
from tiny_architectures import tiny

from ikcli.convert.heads import count_heads, usual_name
from ikcli.errors import UnsupportedError
from ikcli.gguf.heads import Heads
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.models import HParams, check_tensors, find
from ikcli.models.heads import external, mtp

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 4}
MLA = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 2, "v_head_dim": 2, "q_lora_rank": 8}
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_key_head_dim": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 2,
    "linear_conv_kernel_dim": 4, "head_dim": 4, "full_attention_interval": 2,
}  # fmt: skip
ROPE_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}}
APPENDED = {
    "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm",
    "input_layernorm": "attn_norm",
}  # fmt: skip
SHARED_HEAD = {"shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head"}
ARCHS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {
    "glm4moe": (
        {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 4, "head_dim": 2, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, **EXPERTS},
        "model.layers.2.", APPENDED | SHARED_HEAD | {"embed_tokens": "nextn.embed_tokens"},
    ),
    "deepseek2": (
        {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 1, **EXPERTS, **MLA},
        "model.layers.2.", APPENDED | SHARED_HEAD | {"embed_tokens": "nextn.embed_tokens"},
    ),
    "glm-dsa": (
        {"architectures": ["GlmMoeDsaForCausalLM"], "n_routed_experts": 4, "n_shared_experts": 1, "index_n_heads": 2,
         "index_head_dim": 4, "index_topk": 8, **EXPERTS, **MLA},
        "model.layers.2.", APPENDED | SHARED_HEAD,
    ),
    "bailingmoe2": (
        {"architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 4, "head_dim": 2, **EXPERTS},
        "model.layers.2.", APPENDED | {"final_layernorm": "layer_output_norm"},
    ),
    "qwen35": (
        {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1, **DELTA_NET, **ROPE_SECTIONS},
        "mtp.", {
            "fc": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
            "norm": "nextn.shared_head_norm", "layers.0.input_layernorm": "attn_norm",
            "layers.0.mlp.gate_proj": "ffn_gate",
        },
    ),
    "qwen35moe": (
        {"architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 4, "shared_expert_intermediate_size": 4,
         "mtp_num_hidden_layers": 1, **EXPERTS, **DELTA_NET, **ROPE_SECTIONS},
        "model.mtp.", {
            "fc": "nextn.eh_proj", "norm": "nextn.shared_head_norm", "layers.0.self_attn.q_norm": "attn_q_norm",
            "layers.0.post_attention_layernorm": "post_attention_norm",
        },
    ),
    "qwen3next": (
        {"architectures": ["Qwen3NextForCausalLM"], "num_experts": 4, "shared_expert_intermediate_size": 4,
         "norm_topk_prob": True, **EXPERTS, **DELTA_NET},
        "mtp.", {"fc": "nextn.eh_proj", "pre_fc_norm_hidden": "nextn.hnorm", "layers.0.self_attn.q_proj": "attn_q"},
    ),
    "step35": (
        {"architectures": ["Step3p5ForCausalLM"], "n_routed_experts": 4, "head_dim": 4, "share_expert_dim": 4,
         "moe_router_scaling_factor": 1.0, "sliding_window": 4, "num_sliding_attention_heads": 6,
         "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
         "swiglu_limits": [0, 0, 7], **EXPERTS},
        "model.layers.2.", APPENDED | {
            "transformer.shared_head.norm": "nextn.shared_head_norm",
            "transformer.shared_head.output": "nextn.shared_head_head",
        },
    ),
    "mimo2": (
        {"architectures": ["MiMoV2FlashForCausalLM"], "n_routed_experts": 4, "head_dim": 4, "v_head_dim": 2,
         "sliding_window": 4, "layernorm_epsilon": 1e-5, "norm_topk_prob": True, **EXPERTS},
        "model.mtp.layers.0.", APPENDED | {
            "pre_mlp_layernorm": "ffn_norm", "final_layernorm": "layer_output_norm", "mlp.up_proj": "ffn_up",
        },
    ),
}  # fmt: skip


def tensor(checkpoint_name: str) -> np.ndarray:
    """A norm or matrix of the width of the model."""
    shape: tuple[int, ...] = (8,) if "norm" in checkpoint_name else (8, 8)
    if checkpoint_name.endswith(("eh_proj", "fc")):
        shape = (8, 16)
    return drawn(checkpoint_name, shape)


def test_an_assistant_of_gemma4(tmp_path: Path) -> None:
    """Its file fits the model that it assists; the ordering of its vocabulary is left out."""
    full = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    text = BASE | {
        "model_type": "gemma4_text", "num_hidden_layers": 3, "hidden_size": 32, "head_dim": 16, "global_head_dim": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8,
        "num_kv_shared_layers": 3, "num_key_value_heads": 2, "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        "intermediate_size": 64, "vocab_size": N_VOCAB, "tie_word_embeddings": True,
    }  # fmt: skip
    model = tiny("gemma4", vocab_size=N_VOCAB)
    width = model.metadata["gemma4.embedding_length"]
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "text_config": text,
              "backbone_hidden_size": width, "use_ordered_embeddings": True, "num_centroids": 4}  # fmt: skip
    shapes = {"pre_projection": (32, 2 * width), "post_projection": (width, 32), "model.embed_tokens": (N_VOCAB, 32),
              "model.norm": (32,), "masked_embedding.centroids": (4, 32)}  # fmt: skip
    for il, d in enumerate((16, 16, 32)):
        layer = {"input_layernorm": (32,), "self_attn.q_proj": (4 * d, 32), "self_attn.q_norm": (d,),
                 "self_attn.o_proj": (32, 4 * d), "post_attention_layernorm": (32,), "mlp.gate_proj": (64, 32),
                 "pre_feedforward_layernorm": (32,), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64),
                 "post_feedforward_layernorm": (32,)}  # fmt: skip
        shapes |= {f"model.layers.{il}.{name}": shape for name, shape in layer.items()}
    checkpoint = {f"{name}.weight": bf16(drawn(name, shape)) for name, shape in shapes.items()}
    checkpoint |= {f"model.layers.{il}.layer_scalar": bf16(drawn("norm", (1,))) for il in range(3)}
    out = tmp_path / "head.gguf"
    assert main(["convert", str(write_checkpoint(tmp_path / "checkpoint", config, checkpoint)), "-o", str(out)]) == 0
    made = open_gguf(out)
    assert made.arch == "gemma4-assistant" and made.get("gemma4-assistant.embedding_length_out") == width
    assert made.get("gemma4-assistant.nextn_predict_layers") == 3
    assert made.tensors["rope_freqs.weight"].shape == (16,) and not any("centroids" in name for name in made.tensors)
    hp = HParams.from_gguf(model.metadata, model.tensors, "m.gguf")
    head = external.find(model.metadata | made.metadata, hp)
    assert head is not None
    joined = {head.prefix + name: tensor for name, tensor in made.tensors.items()}
    wanted = head.module.tensor_shapes(head.head, hp, joined, head.prefix)
    check_tensors(wanted, joined, "m.gguf")
    assert {*joined} - {f"{head.prefix}rope_freqs.weight"} <= {*wanted}


@pytest.mark.parametrize("arch", ARCHS)
def test_names_and_keys_are_those_of_established_converters(tmp_path: Path, arch: str) -> None:
    config, prefix, names = ARCHS[arch]
    checkpoint = {f"{prefix}{name}.weight": bf16(tensor(name)) for name in names}
    checkpoint |= {f"model.layers.{il}.input_layernorm.weight": bf16(tensor("norm")) for il in range(2)}
    m = build(tmp_path, {"model_type": "any"} | config, checkpoint)
    assert m.arch == arch and m.n_further == 1
    assert (m.metadata[f"{arch}.block_count"], m.metadata[f"{arch}.nextn_predict_layers"]) == (3, 1)
    plus_one = arch in ("qwen35", "qwen35moe", "qwen3next", "step35")
    for name, placed in names.items():
        expected = tensor(name) + (plus_one and "norm" in name)
        got = values(m, f"blk.2.{placed}.weight").reshape(expected.shape)
        assert np.allclose(got, expected, rtol=0.01, atol=0.01), placed
    without = build(tmp_path, {"model_type": "any"} | config, checkpoint, Heads.DROPPED)
    assert not [name for name in without.tensors if name.startswith("blk.2.")]
    assert len(without.dropped) == len(names) and without.metadata[f"{arch}.block_count"] == 2
    assert not without.metadata.get(f"{arch}.nextn_predict_layers")


def test_lists_by_layer_cover_the_heads(tmp_path: Path) -> None:
    config, prefix, names = ARCHS["step35"]
    m = build(tmp_path, {"model_type": "any"} | config, {f"{prefix}{n}.weight": bf16(tensor(n)) for n in names})
    assert m.metadata["step35.attention.sliding_window_pattern"] == [False, True, True]
    assert m.metadata["step35.attention.head_count"] == [4, 6, 6]
    assert m.metadata["step35.swiglu_clamp_exp"] == [0, 0, 7]
    config, prefix, names = ARCHS["mimo2"]
    m = build(tmp_path, {"model_type": "any"} | config, {f"{prefix}{n}.weight": bf16(tensor(n)) for n in names})
    assert m.metadata["mimo2.attention.head_count_kv"] == [4, 4, 4]
    assert m.metadata["mimo2.attention.sliding_window_pattern"][-1] is True


def test_names_in_either_list() -> None:
    assert usual_name("model.language_model.mtp.layers.1.mlp.up_proj.weight", 4) == "layers.5.mlp.up_proj.weight"
    assert usual_name("mtp.norm.weight", 4) == "layers.4.shared_head.norm.weight"
    assert usual_name("model.layers.3.transformer.x", 4) == "model.layers.3.transformer.x"
    assert usual_name("model.layers.4.transformer.shared_head.output.weight", 4).endswith("4.shared_head.head.weight")
    assert count_heads(["model.layers.0.a", "model.layers.5.b", "mtp.fc.weight"], 4) == 2
    assert count_heads(["model.layers.3.a", "lm_head.weight"], 4) == 0


def glm(directory: Path, n_further: int = 1) -> Path:
    """A whole GLM-4.5 of two layers with a head."""
    config = BASE | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "n_routed_experts": 4, "head_dim": 16,
        "moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_nextn_predict_layers": n_further, "hidden_size": 32,
        "intermediate_size": 64, "first_k_dense_replace": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
        "norm_topk_prob": True, "vocab_size": N_VOCAB,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (N_VOCAB, 32), "lm_head": (N_VOCAB, 32)}
    shapes["model.norm"] = (32,)
    for il in range(2 + n_further):
        layer: dict[str, tuple[int, ...]] = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
        layer |= {"self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32)}
        layer["self_attn.o_proj"] = (32, 64)
        parts = (
            [("mlp", 64)] if il == 0 else [(f"mlp.experts.{e}", 32) for e in range(4)] + [("mlp.shared_experts", 32)]
        )
        for part, n in parts:
            layer |= {f"{part}.gate_proj": (n, 32), f"{part}.up_proj": (n, 32), f"{part}.down_proj": (32, n)}
        if il:
            layer["mlp.gate"] = (4, 32)
        if il >= 2:
            layer |= {"eh_proj": (32, 64), "enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,)}
        shapes |= {f"model.layers.{il}.{name}": shape for name, shape in layer.items()}
    return write_checkpoint(directory, config, {f"{name}.weight": drawn(name, shape) for name, shape in shapes.items()})


def convert(*words: str) -> int:
    return main(["convert", *words])


def test_a_model_with_its_heads_without_them_and_the_heads_alone(tmp_path: Path) -> None:
    source = glm(tmp_path / "glm")
    whole, trunk, draft = (tmp_path / f"{name}.gguf" for name in ("whole", "trunk", "draft"))
    assert convert(str(source), "-o", str(whole)) == convert(str(source), "-o", str(trunk), "--no-mtp") == 0
    assert convert(str(source), "-o", str(draft), "--mtp", "--outtype", "q8_0") == 0
    files = {path.stem: open_gguf(path) for path in (whole, trunk, draft)}
    own = {name for name in files["whole"].tensors if name.startswith("blk.2.")}
    assert {"blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight", "blk.2.ffn_down_exps.weight"} <= own
    assert set(files["trunk"].tensors) == set(files["whole"].tensors) - own
    assert set(files["draft"].tensors) == own | {"token_embd.weight", "output.weight", "output_norm.weight"}
    whole_file = files["whole"]
    hp = mtp.read_further(whole_file.metadata, whole_file.tensors, "whole")
    module = find(hp.arch)
    assert isinstance(module, mtp.HasLayers)
    check_tensors(mtp.tensor_shapes(module, hp, whole_file.tensors), whole_file.tensors, "whole")  # what a run needs
    counts = {name: (f.metadata["glm4moe.block_count"], f.metadata["glm4moe.nextn_predict_layers"])
              for name, f in files.items()}  # fmt: skip
    assert counts == {"whole": (3, 1), "trunk": (2, 0), "draft": (3, 1)}
    assert convert(str(source), "--mtp") == 0
    assert [path.name[:4] for path in source.glob("*.gguf")] == ["mtp-"]


def test_what_cannot_be_converted_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = glm(tmp_path / "glm", 0)
    assert convert(str(source), "--mtp") == 1
    assert "has no layers that predict further tokens (MTP)" in capsys.readouterr().err
    assert convert(str(source), "--mtp", "--no-mtp") == 2
    assert "--mtp and --no-mtp exclude each other" in capsys.readouterr().err
    with pytest.raises(UnsupportedError, match="or none that bailingmoe3 files can hold"):
        path = tmp_path / "ling"
        path.mkdir()
        build(path, {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "any", "layer_group_size": 2,
                     "linear_conv_kernel_dim": 4, "linear_head_dim": 4, "kda_lower_bound": -5.0, "num_experts": 4,
                     "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                     "norm_topk_prob": True, **EXPERTS, **MLA}, {}, Heads.ALONE)  # fmt: skip
    assert json.loads((path / "config.json").read_text())["layer_group_size"] == 2
    whole = glm(tmp_path / "torn")
    text = (whole / "model.safetensors").read_bytes().replace(b"layers.2.hnorm", b"layers.2.xnorm")
    (whole / "model.safetensors").write_bytes(text)
    assert convert(str(whole)) == 1
    assert "xnorm" in capsys.readouterr().err
