"""The random-model script: spread of the weights, geometry, a file that the reader accepts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ikcli import models
from ikcli.errors import UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import NewTensor
from ikcli.models import HParams
from ikcli.quant.decode import dequantize
from ikcli.quant.validate import check_tensors

SCRIPT = Path(__file__).resolve().parents[1] / "tools" / "make_random_model.py"
TYPES = (
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q6_0",
    "IQ4_NL",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ2_KS",
    "IQ3_KS",
    "IQ4_KS",
    "IQ5_KS",
    "IQ4_KSS",
    "IQ2_KL",
    "IQ2_KT",
    "IQ3_KT",
    "IQ4_KT",
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_random_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TYPES)
def test_spread_of_the_weights(script: ModuleType, name: str) -> None:
    spec = NewTensor("blk.0.ffn_up.weight", (512, 64), script.check_type(name))
    raw = np.concatenate(list(script.tensor_data(spec, np.random.default_rng(2))))
    x = dequantize(raw, spec.type, spec.shape)
    assert x.std() == pytest.approx(0.02, rel=0.1)
    assert abs(x.mean()) < 0.0008


@pytest.mark.parametrize("preset", ["llama", "qwen2", "qwen3", "qwen35", "qwen3moe", "deepseek2"])
def test_rows_that_do_not_divide_fall_back(script: ModuleType, preset: str) -> None:
    shapes = script.shapes(script.PRESETS[preset])
    types = {name: script.tensor_type(name, shape, GGMLType.Q4_K) for name, shape in shapes.items()}
    assert types["output.weight"] == GGMLType.Q4_K
    assert types["output_norm.weight"] == GGMLType.F32
    odd = {name for name, t in types.items() if t == GGMLType.Q5_0}
    assert odd == ({f"blk.{il}.ffn_down_exps.weight" for il in (1, 2, 3)} if preset == "deepseek2" else set())


@pytest.mark.parametrize("preset", [
    "qwen35moe", "glm4moe", "gpt-oss", "minimax-m2", "mixtral", "ernie4_5-moe", "cohere2", "gemma3", "qwen4exp",
])  # fmt: skip
def test_geometry(script: ModuleType, preset: str) -> None:
    p = script.PRESETS[preset].changed(2 if preset != "qwen35moe" else 4, 500, 6)
    shapes = script.shapes(p)
    assert shapes["token_embd.weight"][1] == shapes["output.weight"][1] == 500
    experts = {shape[2] for name, shape in shapes.items() if name.endswith("_exps.weight")}
    assert experts == (set() if preset in ("cohere2", "gemma3") else {6})
    layers = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    assert len(layers) == p.keys["block_count"]


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0])
def test_routers_choose_as_zipf_says(script: ModuleType, skew: float) -> None:
    rng = np.random.default_rng(4)
    scales = script.router_scales(32, 4, skew, rng)
    logits = rng.standard_normal((4000, 32)) * scales
    chosen = np.argsort(-logits, axis=1)[:, :4]
    found = np.sort(np.bincount(chosen.ravel(), minlength=32) / 4000)[::-1]
    wanted = np.arange(1, 33) ** -skew
    wanted *= 4 / wanted.sum()
    if skew < 1:  # otherwise the first ones are capped, and the others get more
        assert found == pytest.approx(wanted, rel=0.35, abs=0.02)
    else:
        assert found[0] == pytest.approx(0.45, abs=0.06)
        assert found[8] / found[24] == pytest.approx(25 / 9, rel=0.35)


def test_embeddings_of_skewed_models_differ(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--preset", "qwen3moe", "--type", "q4_0", "--layers", "1", "--experts", "2", "--vocab", "400"]
    monkeypatch.setattr(
        sys, "argv", ["make_random_model.py", *options, "--router-skew", "1", "-o", str(tmp_path / "m.gguf")]
    )
    assert script.main() == 0
    file = open_gguf(tmp_path / "m.gguf")
    found = {n: dequantize(file.data(n), file.tensors[n].type, file.tensors[n].shape) for n in file.tensors if n in (
        "token_embd.weight", "output.weight", "blk.0.ffn_gate_inp.weight")}  # fmt: skip
    assert found["token_embd.weight"].std() == pytest.approx(1, rel=0.1)
    assert found["output.weight"].std() == pytest.approx(0.02, rel=0.1)
    router = found["blk.0.ffn_gate_inp.weight"].reshape(2, -1).std(axis=1)
    assert router.max() > 0.02


def test_script_writes_a_loadable_model(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    options = ["--preset", "qwen2", "--type", "q4_k", "--layers", "1", "--vocab", "400", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["make_random_model.py", *options])
    assert script.main() == 0
    file = open_gguf(path)
    assert file.arch == "qwen2"
    assert file.get("qwen2.vocab_size") == len(file.get("tokenizer.ggml.tokens")) == 400
    assert len(set(file.get("tokenizer.ggml.tokens"))) == 400
    assert file.tensors["blk.0.attn_k.bias"].shape == (256,)
    assert list(check_tensors(file)) == []
    options = ["--preset", "qwen35", "--type", "q4_0", "--layers", "4", "--vocab", "400", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["make_random_model.py", *options])
    assert script.main() == 0
    file = open_gguf(path)
    hp = HParams.from_gguf(file.metadata, file.tensors, "m.gguf")
    models.check_tensors(models.find("qwen35").tensor_shapes(hp), file.tensors, "m.gguf")
    assert hp.recurrent_layers == {0, 1, 2} and len(file.tensors) == 3 * 14 + 11 + 3
    assert file.tensors["blk.3.attn_q.weight"].shape == (2048, 2 * 8 * 256)
    assert dequantize(file.data("blk.0.ssm_a"), GGMLType.F32, (32,)).max() < 0
    options = ["--preset", "mamba", "--type", "q4_0", "--layers", "1", "--vocab", "400", "-o", str(path)]
    monkeypatch.setattr(sys, "argv", ["make_random_model.py", *options])
    assert script.main() == 0
    file = open_gguf(path)
    assert file.tensors["blk.0.ssm_a"].type == GGMLType.F32 and len(file.tensors) == 10 + 3
    assert dequantize(file.data("blk.0.ssm_a"), GGMLType.F32, (16 * 5120,)).max() < 0
    monkeypatch.setattr(sys, "argv", ["make_random_model.py", "--type", "q4_k_r4", "-o", str(path)])
    assert script.main() == 2
    assert "use one of" in capsys.readouterr().err


def test_sizes_can_be_changed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.gguf"
    options = ["make_random_model.py", "--type", "q4_0", "--layers", "1", "--vocab", "400", "-o", str(path), "--set"]
    monkeypatch.setattr(sys, "argv", [*options, "embedding_length=64,attention.head_count_kv=2"])
    assert script.main() == 0
    assert open_gguf(path).tensors["blk.0.attn_q.weight"].shape == (64, 16 * 128)
    for words in ("embedding_length=wide", "expert_count=4", "rope.freq_base=1"):
        monkeypatch.setattr(sys, "argv", [*options, words])
        assert script.main() == 2
        assert f"--set {words}: expected KEY=N with one of" in capsys.readouterr().err


def test_presets_of_quantize_mix_types(script: ModuleType) -> None:
    """Preset names mean what they mean for `ik quantize`, and its rules change single tensors."""
    preset = script.PRESETS["qwen3"].changed(2, 600, None)
    number, tensors = script.tensors_of(preset, "Q4_K_M")
    types = {t.name: t.type.name for t in tensors}
    assert "Q4_K_M" in FILE_TYPES[number].names
    assert types["output.weight"] == "Q6_K" and types["blk.0.attn_q.weight"] == "Q4_K"
    assert types["output_norm.weight"] == "F32"
    _, tensors = script.tensors_of(preset, "q4_k_m", ["attn_q=q8_0,ffn_up=q6_K"])
    changed = {t.name: t.type.name for t in tensors if types[t.name] != t.type.name}
    assert changed == {f"blk.{il}.{n}.weight": t for il in (0, 1) for n, t in (("attn_q", "Q8_0"), ("ffn_up", "Q6_K"))}
    assert {t.type.name for t in script.tensors_of(preset, "Q4_K")[1]} == {"Q4_K", "F32"}  # a type: nothing is mixed
    with pytest.raises(UsageError, match="preset of ik quantize"):
        script.tensors_of(preset, "iq4_kss_r4", ["attn_q=q8_0"])
