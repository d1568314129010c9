"""Checkpoints as model files: golden ones byte by byte, types as `ik quantize` has them, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LLAMA, MOE, N_VOCAB, as_bf16, bf16, llama_tensors, write_checkpoint, write_safetensors

from ikcli.convert.source import SafetensorsSource
from ikcli.convert.tool import CheckpointOptions, open_checkpoint, plan_convert
from ikcli.engine.run.session import Session
from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.measure.kl_divergence import KlParams
from ikcli.measure.kl_divergence import run as run_kl
from ikcli.measure.kld_file import BaseReader
from ikcli.quant.decode import dequantize
from ikcli.quant.recipes import RecipeOptions
from ikcli.quant.tool import ToolOptions
from ikcli.settings.run import RunConfig

GOLDEN = (
    *("gemma3", "gemma4", "glm4", "glm4moe", "gpt-oss", "llama-rope3", "minimax-m2", "qwen2moe", "qwen35"),
    *("qwen35moe", "qwen3next"),
)
DESCRIPTIVE = ("general.name", "general.size_label", "general.basename", "general.finetune", "general.version")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, in three files."""
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "Tiny-1M-Chat", LLAMA, as_bf16(llama_tensors(LLAMA)), 3)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "moe", MOE, as_bf16(llama_tensors(MOE)))


def ik(*args: object) -> int:
    return main([str(a) for a in args])


def values(path: Path, name: str) -> np.ndarray:
    file = open_gguf(path)
    t = file.tensors[name]
    return dequantize(file.data(name), t.type, t.shape)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_checkpoints_byte_by_byte(shared_dir: Path, tmp_path: Path, name: str) -> None:
    directory = shared_dir / "golden" / "hf" / name
    expected = json.loads((directory / "gguf.json").read_text())
    out = tmp_path / "out.gguf"
    assert ik("convert", directory, "--outfile", out, "--outtype", "f16") == 0
    file = open_gguf(out)
    assert set(file.tensors) == set(expected["tensors"])
    for key, want in expected["tensors"].items():
        t = file.tensors[key]
        digest = hashlib.sha256(file.data(key).tobytes()).hexdigest()
        assert (list(t.shape), t.type.name, digest) == (want["shape"], want["type"], want["sha256"]), key
    keys = {k: plain(v) for k, v in file.metadata.items() if not k.startswith("tokenizer.") and k not in DESCRIPTIVE}
    assert keys == expected["metadata"]


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("name", ["gpt-oss", "llama-rope3", "qwen35moe"])
def test_golden_checkpoints_compute_what_torch_computes(shared_dir: Path, tmp_path: Path, name: str) -> None:
    directory = shared_dir / "golden" / "hf" / name
    out = tmp_path / "out.gguf"
    assert ik("convert", directory, "--outfile", out, "--outtype", "f16") == 0
    with Session.open(RunConfig(model=out, n_ctx=256, n_ubatch=4, warmup=False)) as session:
        found = run_kl(session, BaseReader(directory / "torch.kld"), KlParams(n_batch=256)).positions.kld
    assert abs(float(np.median(found))) < 1e-5 and float(np.quantile(found, 0.9)) < 1e-3


@pytest.mark.parametrize("outtype", ["iq4_k", "q4_K_M", "q8_0", "f16"])
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_types_are_those_of_quantizing_the_converted_file(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, outtype: str
) -> None:
    directory = request.getfixturevalue(model)
    plain_file, direct, after = (tmp_path / f"{name}.gguf" for name in ("plain", "direct", "after"))
    assert ik("convert", directory, "--outfile", plain_file, "--outtype", "bf16", "-t", 1) == 0
    assert ik("convert", directory, "--outfile", direct, "--outtype", outtype, "-t", 2) == 0
    assert ik("quantize", plain_file, after, outtype, 1) == 0
    assert direct.read_bytes() == after.read_bytes()


def test_custom_rules_and_importance_are_those_of_quantize(dense: Path, tmp_path: Path) -> None:
    names = [f"blk.{il}.attn_{p}.weight" for il in range(2) for p in "qkv"]
    imatrix = tmp_path / "imatrix.dat"
    with imatrix.open("wb") as f:
        f.write(struct.pack("<i", len(names)))
        for name in names:
            f.write(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, 256))
            f.write(np.linspace(0.1, 2, 256, dtype=np.float32).tobytes())
    plain_file, direct, after = (tmp_path / f"{name}.gguf" for name in ("plain", "direct", "after"))
    extra = ["--imatrix", imatrix, "--custom-q", "attn_q=q3_K,ffn_up=iq2_k"]
    assert ik("convert", dense, "--outfile", plain_file) == 0  # auto: that of the checkpoint
    assert ik("convert", dense, "--outfile", direct, "--outtype", "iq4_ks", *extra) == 0
    assert ik("quantize", *extra, plain_file, after, "iq4_ks") == 0
    assert direct.read_bytes() == after.read_bytes()
    assert open_gguf(direct).tensors["blk.0.attn_q.weight"].type == GGMLType.Q3_K


@pytest.mark.slow  # encodes a model to a size
def test_a_size_can_be_aimed_at(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert ik("convert", dense, "--outfile", out, "--target-bpw", "5", "-t", 1) == 0
    file = open_gguf(out)
    assert 4 < 8 * file.n_bytes / file.n_elements <= 5


def test_rows_of_queries_and_keys_are_ordered_for_adjacent_pairs(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert ik("convert", dense, "--outfile", out, "--outtype", "f32") == 0
    source = llama_tensors(LLAMA)
    for name, key, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        x = bf16(source[f"model.layers.1.self_attn.{key}.weight"]).astype(np.uint32) << 16
        x = x.view(np.float32).reshape(heads, 2, 32, 256)
        found = values(out, f"blk.1.{name}.weight").reshape(heads, 32, 2, 256)
        np.testing.assert_array_equal(found[:, :, 0], x[:, 0])
        np.testing.assert_array_equal(found[:, :, 1], x[:, 1])


def test_experts_are_stacked(experts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert ik("convert", experts, "--outfile", out, "--outtype", "bf16") == 0
    file, source = open_gguf(out), llama_tensors(MOE)
    t = file.tensors["blk.1.ffn_down_exps.weight"]
    assert (t.shape, t.type) == ((256, 256, 4), GGMLType.BF16)
    want = np.stack([bf16(source[f"model.layers.1.mlp.experts.{e}.down_proj.weight"]) for e in range(4)])
    np.testing.assert_array_equal(file.data(t.name).view(np.uint16), want.reshape(-1))
    assert file.tensors["blk.0.ffn_gate_inp.weight"].type == GGMLType.F32
    assert file.metadata["qwen3moe.expert_count"] == 4


def test_fused_experts_are_the_same(experts: Path, tmp_path: Path) -> None:
    """Checkpoints have experts one by one, or all in one tensor with gate and up."""
    fused = as_bf16(llama_tensors(MOE))
    for il in range(2):
        part = f"model.layers.{il}.mlp.experts"
        one = {n: [fused.pop(f"{part}.{e}.{n}_proj.weight") for e in range(4)] for n in ("gate", "up", "down")}
        gate_up = [np.concatenate(pair) for pair in zip(one["gate"], one["up"], strict=True)]
        fused[f"{part}.gate_up_proj"], fused[f"{part}.down_proj"] = np.stack(gate_up), np.stack(one["down"])
    other = write_checkpoint(tmp_path / "moe", MOE, fused)
    for directory, out in ((experts, "one"), (other, "all")):
        assert ik("convert", directory, "--outfile", tmp_path / out, "--model-name", "x") == 0
    one_by_one, together = open_gguf(tmp_path / "one"), open_gguf(tmp_path / "all")
    assert set(one_by_one.tensors) == set(together.tensors)
    for name in one_by_one.tensors:
        np.testing.assert_array_equal(one_by_one.data(name), together.data(name))


def test_descriptions_are_of_directory_and_card(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "{ftype}.gguf"
    override = tmp_path / "keys.json"
    override.write_text(json.dumps({"general.author": "Someone", "general.tags": ["a", "b"]}))
    assert ik("convert", dense, "--outfile", out, "--metadata", override, "--outtype", "f16") == 0
    keys = open_gguf(tmp_path / "f16.gguf").metadata
    assert keys["general.name"] == "Tiny 1M Chat"
    assert (keys["general.basename"], keys["general.finetune"], keys["general.size_label"]) == ("Tiny", "Chat", "1M")
    assert (keys["general.author"], list(keys["general.tags"])) == ("Someone", ["a", "b"])
    assert keys["general.type"] == "model"
    assert (keys["llama.vocab_size"], keys["llama.rope.freq_base"]) == (N_VOCAB, 10000.0)  # not in config.json


def test_a_folder_gets_the_usual_name(dense: Path, tmp_path: Path) -> None:
    assert ik("convert", dense, "--outfile", tmp_path, "--outtype", "q8_0") == 0
    assert [p.name for p in tmp_path.iterdir()] == ["Tiny-1M-Chat-Q8_0.gguf"]


def test_parts_are_the_whole_and_are_resumed(dense: Path, tmp_path: Path) -> None:
    whole, split = tmp_path / "whole.gguf", tmp_path / "split.gguf"
    assert ik("convert", dense, "--outfile", whole, "--outtype", "q6_K") == 0
    assert ik("convert", dense, "--outfile", split, "--outtype", "q6_K", "--split-max-tensors", 8) == 0
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert [p.name for p in parts] == [f"split-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    one, many = open_gguf(whole), open_gguf(parts[0])
    assert list(one.tensors) == list(many.tensors)
    for name in one.tensors:
        np.testing.assert_array_equal(one.data(name), many.data(name))
    del many
    kept, content = parts[0].stat().st_mtime_ns, parts[1].read_bytes()
    parts[1].unlink()
    args = ["convert", dense, "--outfile", split, "--outtype", "q6_K", "--split-max-tensors", 8, "--resume"]
    assert ik(*args) == 0
    assert parts[0].stat().st_mtime_ns == kept and parts[1].read_bytes() == content


def test_sizes_split_too_and_a_dry_run_writes_nothing(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.gguf"
    args = ["convert", dense, "--outfile", out, "--split-max-size", "1M", "--dry-run"]
    assert ik(*args, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert len(summary["files"]) > 2 and summary["architecture"] == "llama" and summary["type"] == "BF16"
    assert ik(*args) == 0
    assert "blk.0.attn_q.weight" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_alone(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "vocab.gguf"
    assert ik("convert", dense, "--vocab-only", "--outfile", out) == 0
    file = open_gguf(out)
    assert len(file.tensors) == 0 and len(file.metadata["tokenizer.ggml.tokens"]) == N_VOCAB


def test_a_tied_output_is_written_once(tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    directory = write_checkpoint(tmp_path / "tied", config, llama_tensors(LLAMA))
    assert "output.weight" not in open_checkpoint(directory).file.tensors
    tensors = llama_tensors(LLAMA)
    del tensors["lm_head.weight"]
    with pytest.raises(FormatError, match="tie_word_embeddings is false"):
        open_checkpoint(write_checkpoint(tmp_path / "untied", LLAMA, tensors))


@pytest.mark.parametrize("whole", [True, False])
def test_where_text_part_and_whole_disagree_about_the_output_the_tensors_tell(tmp_path: Path, whole: bool) -> None:
    config = {"architectures": LLAMA["architectures"], "tie_word_embeddings": whole}
    config["text_config"] = LLAMA | {"tie_word_embeddings": not whole}
    tensors = llama_tensors(LLAMA)
    assert "output.weight" in open_checkpoint(write_checkpoint(tmp_path / "own", config, tensors)).file.tensors
    del tensors["lm_head.weight"]
    assert "output.weight" not in open_checkpoint(write_checkpoint(tmp_path / "tied", config, tensors)).file.tensors


def change(**keys: Any) -> dict[str, Any]:
    return LLAMA | keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (change(architectures=["NoSuchModel"]), "architectures is NoSuchModel"),
        (change(hidden_act="relu"), "key hidden_act"),
        (change(rope_scaling={"type": "spiral", "factor": 2}), "rope_type spiral"),
        (change(rope_scaling={"type": "linear", "factor": 2, "phase": 1}), "rope parameter phase"),
        (change(attention_sparsity=0.5), "key attention_sparsity"),
        (change(num_hidden_layers="two"), "key num_hidden_layers should be a whole number"),
        (change(num_attention_heads=3), "num_attention_heads is 3"),
        (change(rms_norm_eps=None), "key rms_norm_eps is missing"),
        (change(use_sliding_window=True), "use_sliding_window"),
        (change(num_hidden_layers=3), "'blk.2.attn_norm.weight' is missing"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    directory = write_checkpoint(tmp_path / "model", config, llama_tensors(LLAMA))
    with pytest.raises((FormatError, UnsupportedError), match=message):
        open_checkpoint(directory)


def test_a_key_can_be_called_harmless(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", change(note_to_self="abc"), llama_tensors(LLAMA))
    with pytest.raises(UnsupportedError, match="--ignore-config-key note_to_self"):
        open_checkpoint(directory)
    assert open_checkpoint(directory, CheckpointOptions(ignored_keys=("note_to_self",))).file.arch == "llama"


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    strange = llama_tensors(LLAMA) | {"model.layers.0.mixer.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(UnsupportedError, match=r"model\.layers\.0\.mixer\.weight has no place in architecture llama"):
        open_checkpoint(write_checkpoint(tmp_path / "a", LLAMA, strange))
    unread = llama_tensors(LLAMA) | {"model.norm.bias": np.ones(256, np.float32)}
    with pytest.raises(UnsupportedError, match=r"output_norm\.bias has no use"):
        open_checkpoint(write_checkpoint(tmp_path / "b", LLAMA, unread))


def test_missing_experts_are_named(tmp_path: Path) -> None:
    tensors = llama_tensors(MOE)
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(FormatError, match="expert 2 is missing"):
        open_checkpoint(write_checkpoint(tmp_path / "m", MOE, tensors))


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def record(shape: list[int], first: int, last: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", "header of"),
        (struct.pack("<Q", 3) + b"abc", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (header(t=record([2], 0, 8)), "truncated: tensor t"),
        (header(t=record([2], 0, 4)) + bytes(8), "4 bytes for"),
        (header(t=record([-1], 0, 4)) + bytes(8), "not a shape"),
        (header(t=record([1 << 61, 8], 0, 4)) + bytes(8), "tensor t"),
        (header(t=record([1], -4, 0)) + bytes(8), "not offsets"),
        (header(t=record([1], 0, 4, "F3")) + bytes(8), "unknown dtype 'F3'"),
        (header(t=record([2], 0, 8), u=record([1], 4, 8)) + bytes(8), "tensors t and u overlap"),
        (header(t=7) + bytes(8), "tensor t: the record"),
    ],
)
def test_hostile_headers(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(FormatError, match=message):
        SafetensorsSource(tmp_path)


def test_shards_and_their_index(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "m", LLAMA, llama_tensors(LLAMA), 2)
    index = directory / "model.safetensors.index.json"
    source = SafetensorsSource(directory)
    assert len(source.names) == len(llama_tensors(LLAMA))
    np.testing.assert_array_equal(source.rows("lm_head.weight", 3, 7), llama_tensors(LLAMA)["lm_head.weight"][3:7])
    whole = json.loads(index.read_text())
    for change_to, message in (
        ({"x": "../model.safetensors"}, "not the name of a file"),
        (whole["weight_map"] | {"extra": "model-00001-of-00002.safetensors"}, "tensor extra"),
        (
            whole["weight_map"] | {"extra": "model-00003-of-00002.safetensors"},
            "files of model.safetensors.index.json are missing: model-00003-of-00002.safetensors",
        ),
        ("nothing", "does not map"),
    ):
        index.write_text(json.dumps({"weight_map": change_to}))
        with pytest.raises(FormatError, match=message):
            SafetensorsSource(directory)


def test_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin is not read; save the model as safetensors"):
        SafetensorsSource(tmp_path)


def test_supported_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert ik("convert", "--print-supported-models") == 0
    listed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert listed["Qwen3MoeForCausalLM"] == "qwen3moe" and len(listed) > 100


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["{none}"], 1, "no such"),
        (["{dir}/config.json"], 2, "is a file"),
        ([], 2, "the directory is missing"),
        (["{dir}", "--outtype", "iq4_kk"], 2, "did you mean IQ4_K"),
        (["{dir}", "--outtype", "copy"], 2, "unknown type copy"),
        (["{dir}", "--remote"], 2, "ik pull"),
        (["{dir}", "--metadata", "{none}"], 2, "does not exist"),
        (["{dir}", "--split-max-size", "2X"], 2, "--split-max-size"),
        (["{dir}", "--outfile", "{dir}/model-00001-of-00003.safetensors"], 2, "is the input"),
        (["{dir}", "--outfile", "/proc/none/x.gguf"], 1, "/proc/none"),
        (["{dir}", "--outtype", "iq1_s"], 1, "without an importance matrix"),
        (["{dir}", "--outtype", "f16", "--target-bpw", "4"], 2, "a target needs types"),
        (["{dir}", "--override-kv", "llama.block_count=int:x"], 2, "--override-kv"),
    ],
)
def test_mistakes_end_in_one_sentence(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    assert ik("convert", *(a.format(dir=dense, none=tmp_path / "none") for a in args)) == code
    text = capsys.readouterr().err
    assert message in text and "Traceback" not in text


def test_a_value_that_is_no_number_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan
    directory = write_checkpoint(tmp_path / "nan", LLAMA, tensors)
    plan = plan_convert(open_checkpoint(directory), tmp_path / "out.gguf", RecipeOptions(7), ToolOptions())
    from ikcli.quant.quantizer import run

    with pytest.raises(IkError, match=r"blk\.1\.ffn_up\.weight holds NaN or Inf in row 3"):
        run(plan.job)
    assert [p.name for p in tmp_path.iterdir()] == ["nan"]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.slow  # seconds of writing
def test_memory_is_that_of_slabs(tmp_path: Path) -> None:
    """The largest tensors have 100 MB; what grows is a few slabs per thread."""
    config = change(hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, vocab_size=51200)
    tensors = as_bf16(llama_tensors(change(hidden_size=1024, intermediate_size=1024, num_hidden_layers=1)))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.tile(tensors[name], (160, 1))
    directory = write_checkpoint(tmp_path / "large", config, tensors)
    code = """
import sys, re
from pathlib import Path
from ikcli.convert.tool import *
from ikcli.quant.quantizer import run
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
found = open_checkpoint(Path(sys.argv[1]))
before = peak()
run(plan_convert(found, Path(sys.argv[2]), RecipeOptions(7), ToolOptions(n_threads=2)).job)
print(peak() - before)
"""
    args = [sys.executable, "-c", code, str(directory), str(tmp_path / "out.gguf")]
    grown = int(subprocess.run(args, check=True, capture_output=True, text=True, env={**os.environ}).stdout)
    assert grown < 100


def test_tensors_may_have_their_own_types(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = as_bf16(llama_tensors(LLAMA))
    tensors["lm_head.weight"] = llama_tensors(LLAMA)["lm_head.weight"].astype(np.float16)
    tensors["model.norm.weight"] = llama_tensors(LLAMA)["model.norm.weight"]
    found = open_checkpoint(write_checkpoint(tmp_path / "m", LLAMA, tensors)).file
    assert found.tensors["output.weight"].type == GGMLType.F16
    assert found.tensors["token_embd.weight"].type == GGMLType.BF16
    assert found.tensors["output_norm.weight"].type == GGMLType.F32


def test_a_checkpoint_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"t": np.ones(1000, np.float32)})
    source = SafetensorsSource(tmp_path)
    os.truncate(path, 200)
    with pytest.raises(FormatError, match="became shorter"):
        source.read("t")
