"""Adapters of PEFT: what is added to the converted base model is what merging would have changed."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ikcli.convert.adapter import open_adapter, write_adapter
from ikcli.convert.archs import architecture_of
from ikcli.convert.build import Build, convert_tensors
from ikcli.convert.config import Config
from ikcli.convert.pieces import n_rows_of
from ikcli.convert.source import SafetensorsSource
from ikcli.errors import IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.quant.decode import dequantize

Floats = npt.NDArray[np.float32]
N_EMBD, N_FF, N_HEAD, N_KV = 32, 48, 4, 2

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": N_EMBD,
    "intermediate_size": N_FF,
    "num_hidden_layers": 2,
    "num_attention_heads": N_HEAD,
    "num_key_value_heads": N_KV,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
GLM4 = LLAMA | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "head_dim": 8, "partial_rotary_factor": 0.5}

ATTENTION = {
    "self_attn.q_proj": (N_EMBD, N_EMBD),
    "self_attn.k_proj": (N_EMBD // 2, N_EMBD),
    "self_attn.v_proj": (N_EMBD // 2, N_EMBD),
    "self_attn.o_proj": (N_EMBD, N_EMBD),
}
FFN = {"mlp.gate_proj": (N_FF, N_EMBD), "mlp.up_proj": (N_FF, N_EMBD), "mlp.down_proj": (N_EMBD, N_FF)}
EXPERTS = {
    f"block_sparse_moe.experts.{e}.{name}": (N_EMBD, N_FF) if name == "w2" else (N_FF, N_EMBD)
    for e in range(3)
    for name in ("w1", "w2", "w3")
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]]]] = {
    "llama": (LLAMA, ATTENTION | FFN),
    "mixtral": (MIXTRAL, ATTENTION | EXPERTS),
    "glm4": (GLM4, ATTENTION | {"mlp.gate_up_proj": (2 * N_FF, N_EMBD), "mlp.down_proj": (N_EMBD, N_FF)}),
}


def save(path: Path, tensors: dict[str, Floats], dtype: str = "F32") -> None:
    header, data = {}, b""
    for name, values in tensors.items():
        raw = values.astype("<f4" if dtype == "F32" else "<f2").tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_adapter(directory: Path, tensors: dict[str, Floats], **settings: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save(directory / "adapter_model.safetensors", tensors)
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "bias": "none", "base_model_name_or_path": "../base"}
    (directory / "adapter_config.json").write_text(json.dumps(known | settings))
    return directory


def matrices(model: str, layers: int = 2) -> dict[str, tuple[int, int]]:
    return {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in MODELS[model][1].items()}


def base(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def converted(directory: Path, config: dict[str, Any], tensors: dict[str, Floats]) -> dict[str, Floats]:
    """The matrices of a checkpoint under their GGUF names, (matrices,) rows, columns."""
    save(base(directory, config) / "model.safetensors", tensors)
    found = Config(directory)
    source = SafetensorsSource(directory)
    m = Build(found, source, architecture_of(found).name)
    architecture_of(found).keys(m)
    convert_tensors(m, architecture_of(found))
    out = {}
    for name, rows in m.tensors.items():
        shape = tuple(reversed(rows.shape))
        if len(shape) > 1:
            out[name] = rows.read(source, 0, n_rows_of(shape)).reshape(shape).astype(np.float32)
    return out


def adapter_of(path: Path) -> tuple[dict[str, Floats], float]:
    """Matrix -> what a reader adds to it, and alpha."""
    file = open_gguf(path)
    alpha = float(file.metadata["adapter.lora.alpha"])
    values = {n: dequantize(file.data(n), t.type, tuple(t.shape)) for n, t in file.tensors.items()}
    out = {}
    for name, a in values.items():
        if name.endswith(".lora_a"):
            out[name.removesuffix(".lora_a")] = alpha / a.shape[-2] * values[name[:-1] + "b"] @ a
    return out, alpha


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("rslora", [False, True])
def test_adding_is_merging(tmp_path: Path, rng: np.random.Generator, model: str, rslora: bool) -> None:
    config, rank, alpha = MODELS[model][0], 4, 6.0
    before = {f"{n}.weight": rng.normal(0, 1, s).astype(np.float32) for n, s in matrices(model).items()}
    scale = alpha / (np.sqrt(rank) if rslora else rank)
    after, tensors = dict(before), {}
    for name, (n_out, n_in) in matrices(model).items():
        if ".0." not in name and "v_proj" in name:
            continue  # not every layer has it
        a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((rank, n_in), (n_out, rank)))
        tensors[f"base_model.model.{name}.lora_A.weight"], tensors[f"base_model.model.{name}.lora_B.weight"] = a, b
        after[f"{name}.weight"] = before[f"{name}.weight"] + np.float32(scale) * b @ a
    plain = converted(tmp_path / "base", config, before)
    merged = converted(tmp_path / "merged", config, after)
    directory = save_adapter(tmp_path / "adapter", tensors, use_rslora=rslora)
    write_adapter(open_adapter(directory, tmp_path / "base"), tmp_path / "a.gguf", "f32")
    added, found_alpha = adapter_of(tmp_path / "a.gguf")
    assert found_alpha == pytest.approx(alpha * (2 if rslora else 1))
    assert set(added) == {name for name in plain if not np.array_equal(plain[name], merged[name])}
    assert "blk.1.attn_v.weight" not in added
    for name, values in added.items():
        np.testing.assert_allclose(values, merged[name] - plain[name], rtol=0, atol=2e-4)
    file = open_gguf(tmp_path / "a.gguf")
    assert (file.metadata["general.type"], file.metadata["adapter.type"]) == ("adapter", "lora")


def pair(rng: np.random.Generator, module: str, n_out: int, n_in: int, rank: int = 4) -> dict[str, Floats]:
    name = f"base_model.model.model.layers.0.{module}"
    shapes = {"A": (rank, n_in), "B": (n_out, rank)}
    return {f"{name}.lora_{k}.weight": rng.normal(0, 1, s).astype(np.float32) for k, s in shapes.items()}


def test_ranks_and_alphas_of_their_own(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors = pair(rng, "mlp.gate_proj", N_FF, N_EMBD) | pair(rng, "mlp.down_proj", N_EMBD, N_FF, 8)
    directory = save_adapter(tmp_path / "x", tensors, rank_pattern={"down_proj": 8}, alpha_pattern={"down_proj": 40})
    base(tmp_path / "base", LLAMA)
    write_adapter(open_adapter(directory, tmp_path / "base" / "config.json"), tmp_path / "a.gguf", "f32")
    added, alpha = adapter_of(tmp_path / "a.gguf")
    assert alpha == 6
    for module, name, scale in (("gate_proj", "ffn_gate", 6 / 4), ("down_proj", "ffn_down", 40 / 8)):
        start = f"base_model.model.model.layers.0.mlp.{module}.lora_"
        wanted = scale * tensors[start + "B.weight"] @ tensors[start + "A.weight"]
        np.testing.assert_allclose(added[f"blk.0.{name}.weight"], wanted, rtol=1e-4, atol=1e-5)


def test_a_transposed_base_matrix_swaps_the_factors(tmp_path: Path, rng: np.random.Generator) -> None:
    """fan_in_fan_out: the checkpoint stores (inputs, outputs), here under a rule that takes matrices as they are."""
    tensors = pair(rng, "mlp.down_proj", N_EMBD, N_FF)
    base(tmp_path / "base", LLAMA)
    plain = open_adapter(save_adapter(tmp_path / "p", tensors), tmp_path / "base")
    turned = open_adapter(save_adapter(tmp_path / "t", tensors, fan_in_fan_out=True), tmp_path / "base")
    a, b = (plain.tensors[f"blk.0.ffn_down.weight.lora_{part}"] for part in "ab")
    np.testing.assert_array_equal(turned.tensors["blk.0.ffn_down.weight.lora_a"], b.T)
    np.testing.assert_array_equal(turned.tensors["blk.0.ffn_down.weight.lora_b"], a.T)


def test_command(tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_adapter(tmp_path / "x", pair(rng, "self_attn.q_proj", N_EMBD, N_EMBD))
    base(tmp_path / "base", LLAMA)
    out = tmp_path / "out-{ftype}.gguf"
    assert main(["convert", str(directory), "--base", str(tmp_path / "base"), "--outfile", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["architecture"], said["type"]) == ("llama", "F16")
    assert {t.type for t in open_gguf(tmp_path / "out-f16.gguf").tensors.values()} == {GGMLType.F16}
    assert main(["convert", str(directory), "--base", str(tmp_path / "base"), "--outtype", "q8_0"]) == 0
    types = {n: t.type for n, t in open_gguf(directory / "x-Q8_0.gguf").tensors.items()}
    assert types == {
        "blk.0.attn_q.weight.lora_a": GGMLType.Q8_0,
        "blk.0.attn_q.weight.lora_b": GGMLType.F16,  # rows as long as the rank
    }
    capsys.readouterr()
    for wrong, message in (
        ([], "the base model '../base' is not here; name its directory or its config.json with --base"),
        (["--base", str(tmp_path / "nowhere")], "no such file"),
        (["--base", str(tmp_path / "base"), "--outtype", "iq4_k"], "an adapter can be auto, f32, f16, bf16, q8_0"),
        (["--base", str(tmp_path / "base"), "--imatrix", "x"], "--imatrix has no meaning for an adapter"),
    ):
        assert main(["convert", str(directory), *wrong]) in (1, 2)
        assert message in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "base"), "--base", str(tmp_path)]) == 2
    assert "--base is for adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; GGUF has adapters of type LORA only"),
        ({"use_dora": True}, "use_dora cannot be expressed in GGUF; merge the adapter"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save cannot be expressed in GGUF"),
        ({"target_parameters": ["x"]}, "target_parameters cannot be expressed"),
        ({"bias": "all"}, "bias 'all' cannot be expressed"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base model"),
        ({"lora_alpha": 0}, "lora_alpha is 0; it should be a number other than 0"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern '\\(' is not a regular expression"),
    ],
)
def test_settings_that_gguf_cannot_say(
    tmp_path: Path, rng: np.random.Generator, settings: dict[str, Any], message: str
) -> None:
    base(tmp_path / "base", LLAMA)
    directory = save_adapter(tmp_path / "x", pair(rng, "mlp.up_proj", N_FF, N_EMBD), **settings)
    with pytest.raises(IkError, match=message):
        open_adapter(directory, tmp_path / "base")


def test_tensors_that_are_no_adapter(tmp_path: Path, rng: np.random.Generator) -> None:
    base(tmp_path / "base", LLAMA)
    good = pair(rng, "mlp.up_proj", N_FF, N_EMBD)
    a, b = good
    for tensors, message in (
        ({}, "the adapter has no tensors"),
        ({a: good[a]}, "has only a lora_A"),
        ({a: good[a], b: good[b][:, :3]}, "have ranks 4 and 3"),
        (good | {"base_model.model.lm_head.weight": good[a]}, "lm_head.weight is neither a lora_A nor a lora_B"),
        ({a: good[a] * np.nan, b: good[b]}, "is not a matrix of finite numbers"),
        (pair(rng, "mlp.strange", 4, 4), r"mlp\.strange\.weight has no place in architecture llama"),
        (pair(rng, "self_attn.q_proj", 30, N_EMBD), "does not fit 30 rows"),
    ):
        with pytest.raises(IkError, match=message):
            open_adapter(save_adapter(tmp_path / "x", tensors), tmp_path / "base")
    (tmp_path / "x" / "adapter_model.safetensors").rename(tmp_path / "x" / "adapter_model.bin")
    with pytest.raises(IkError, match=r"adapter_model\.bin is not read, save the adapter as safetensors"):
        open_adapter(tmp_path / "x", tmp_path / "base")


def test_experts_are_changed_together(tmp_path: Path, rng: np.random.Generator) -> None:
    base(tmp_path / "base", MIXTRAL)
    tensors: dict[str, Floats] = {}
    for e in range(3):
        tensors |= pair(rng, f"block_sparse_moe.experts.{e}.w1", N_FF, N_EMBD, 4 if e else 8)
    with pytest.raises(IkError, match=r"matrices of blk\.0\.ffn_gate_exps\.weight have adapters of different rank"):
        open_adapter(save_adapter(tmp_path / "x", tensors), tmp_path / "base")


def test_all_matrices_of_golden_checkpoints(tmp_path: Path, rng: np.random.Generator, shared_dir: Path) -> None:
    """Also experts, split and rearranged matrices: an adapter of everything is the change of everything."""
    checkpoints = sorted((shared_dir / "golden" / "hf").glob("*/config.json"))
    assert checkpoints
    for number, path in enumerate(checkpoints):
        config, source = json.loads(path.read_text()), SafetensorsSource(path.parent)
        before = {name: source.read(name).astype(np.float32) for name in source.names}
        after, tensors = dict(before), {}
        for name, values in before.items():
            if values.ndim == 2 and name.endswith(".weight") and not any(s in name for s in ("embed", "norm", "conv")):
                a, b = (rng.normal(0, 1, s).astype(np.float32) for s in ((4, values.shape[1]), (values.shape[0], 4)))
                module = "base_model.model." + name.removesuffix(".weight")
                tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = a, b
                after[name] = values + np.float32(6 / 4) * b @ a
        work = tmp_path / str(number)
        work.mkdir()
        plain = converted(work / "base", config, before)
        merged = converted(work / "merged", config, after)
        write_adapter(open_adapter(save_adapter(work / "x", tensors), work / "base"), work / "a.gguf", "f32")
        added, _ = adapter_of(work / "a.gguf")
        assert set(added) == {name for name in plain if not np.array_equal(plain[name], merged[name])}, path
        for name, values in added.items():
            np.testing.assert_allclose(values, merged[name] - plain[name], rtol=0, atol=1e-4, err_msg=str(path))


def test_targets_that_take_no_file(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_adapter(tmp_path / "x", pair(rng, "mlp.up_proj", N_FF, N_EMBD))
    known = ["convert", str(directory), "--base", str(base(tmp_path / "base", LLAMA)), "--outfile"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main([*known, str(pipe)]) == 2
    assert "is not a regular file" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert main([*known, str(directory / "adapter_model.safetensors")]) == 2
    assert "is the input" in capsys.readouterr().err
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))  # as on a disk that is full
    try:
        assert main([*known, str(tmp_path / "a.gguf")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "a.gguf: cannot be written (File too large)" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.gguf*"))
