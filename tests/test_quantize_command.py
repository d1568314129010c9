"""Command lines of quantize, repack and gguf-split: parsing, messages, tables, exit codes."""

from __future__ import annotations

import hashlib
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from quant_models import SHAPES, write_model

from ikcli import log, main
from ikcli.cli.parser import parse
from ikcli.commands._quantize_request import Request, request_of
from ikcli.errors import UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.hostinfo import physical_cores
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_legacy

T = GGMLType


@pytest.fixture(autouse=True)
def _plain_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "in.gguf")


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def parsed(line: str, command: str = "quantize") -> Request:
    config = parse(command, shlex.split(line)).config
    return request_of(replace(config, repack=not config.unrepack) if command == "repack" else config)


def test_line_of_the_guides() -> None:
    r = parsed(
        "--imatrix I --token-embedding-type q8_0 --output-tensor-type q8_0 "
        r'--custom-q "blk\.[0-2]\..*=q8_0,blk\.[3-4]\.ffn_gate_exps\.weight=q5_k" '
        "in-00001-of-00030.gguf out.gguf Q5_K 28"
    )
    assert (r.input, r.output, r.recipe.file_type, r.type_name) == ("in-00001-of-00030.gguf", "out.gguf", 17, "Q5_K")
    assert r.options.imatrix == "I" and r.options.n_threads == 28
    assert (r.recipe.token_embedding_type, r.recipe.output_tensor_type) == (T.Q8_0, T.Q8_0)
    assert [(c.pattern, c.type) for c in r.recipe.custom] == [
        (r"blk\.[0-2]\..*", T.Q8_0),
        (r"blk\.[3-4]\.ffn_gate_exps\.weight", T.Q5_K),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("d/in.gguf q4_k_m", ("d/in.gguf", "d/ggml-model-Q4_K_M.gguf", 15)),
        ("d/in.gguf 15 4", ("d/in.gguf", "d/ggml-model-Q4_K.gguf", 15)),
        ("--keep-split d/in.gguf IQ4_KS_R4", ("d/in.gguf", "d/ggml-model-IQ4_KS_R4", 345)),
        ("in.gguf out.gguf --pure iq2_bn 3", ("in.gguf", "out.gguf", 137)),
        ("in.gguf out.gguf copy", ("in.gguf", "out.gguf", 0)),
        ("in.gguf --dry_run out.gguf F32", ("in.gguf", "out.gguf", 0)),
    ],
)
def test_positional_arguments(line: str, expected: tuple[str, str, int]) -> None:
    r = parsed(line)
    assert (r.input, r.output, r.recipe.file_type) == expected
    assert r.recipe.copy == ("copy" in line) and r.recipe.pure == ("--pure" in line) and r.dry_run == ("dry" in line)


def test_threads_default_to_physical_cores() -> None:
    assert parsed("in.gguf Q8_0").options.n_threads == physical_cores()
    assert parsed("in.gguf Q8_0 7").options.n_threads == 7
    assert parsed("-t 3 in.gguf Q8_0").options.n_threads == 3


@pytest.mark.parametrize(
    "line", ["--repack in.gguf out.gguf IQ2_K_R4", "--repack in.gguf out.gguf", "in.gguf out.gguf"]
)
def test_repack_takes_a_type_or_none(line: str) -> None:
    r = parsed(line, "quantize" if "--repack" in line else "repack")
    assert (r.mode, r.input, r.output) == ("repack", "in.gguf", "out.gguf")


def test_repack_names_its_result() -> None:
    assert parsed("d/m-00001-of-00003.gguf --keep-split", "repack").output == "d/m-repacked"
    assert parsed("d/m.gguf --unrepack", "repack").output == "d/m-unrepacked.gguf"
    r = parsed("m.gguf --repack-pattern a,b --repack-pattern c", "repack")
    assert r.patterns == ("a", "b", "c")


def test_every_name_and_every_option_of_the_reference_is_known() -> None:
    for f in FILE_TYPES.values():
        for name in f.names:
            assert parsed(f"in.gguf out.gguf {name.lower()}").recipe.file_type == f.number
    switches = ["allow-requantize", "leave-output-tensor", "hide-imatrix", "ignore-imatrix-rules", "symmetric-q40"]
    switches += ["slow-iq2ks", "keep-split", "partial-requant", "pure", "dry-run", "force"]
    kinds = ["output-tensor", "token-embedding", "per-layer-token-embedding", "ffn-gate-inp"]
    kinds += ["attn-q", "attn-k", "attn-v", "attn-qkv", "attn-output", "ffn-gate", "ffn-down", "ffn-up"]
    line = " ".join(f"--{s}" for s in switches) + " " + " ".join(f"--{k}-type Q6_k" for k in kinds)
    line += " --include-weights a --include-weights b --override-kv a.b=int:3 --extra-output-tensor iq4_xs"
    r = parsed(f"{line} in.gguf out.gguf Q4_0")
    assert r.recipe.ffn_up_type == r.recipe.per_layer_token_embedding_type == T.Q6_K
    assert r.recipe.extra_output_type == T.IQ4_XS and r.options.include_weights == ("a", "b")
    assert r.options.encode.symmetric_q40 and r.options.encode.slow_iq2ks and r.options.force


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the model is missing"),
        ("in.gguf", "the type is missing"),
        ("in.gguf out.gguf", "the type is missing after out.gguf"),
        ("in.gguf out.gguf Q4_K_N", "unknown type Q4_K_N; did you mean Q4_K_S?"),
        ("in.gguf out.gguf zzz", "unknown type zzz; types are F32 F16"),
        ("in.gguf Q4_KM", "unknown type Q4_KM; did you mean Q4_K?"),
        ("in.gguf out.gguf Q8_0 x", 'nthreads: "x" is not a whole number'),
        ("in.gguf out.gguf Q8_0 4 5", "too many arguments: 5"),
        ("--custm-q a=q8_0 in.gguf Q8_0", "unknown option --custm-q; did you mean --custom-q?"),
        ("in.gguf Q8_0 --custom-q", "--custom-q needs a value; expected --custom-q RE=TYPE"),
        ("--attn-q-type q9 in.gguf Q8_0", "--attn-q-type: unknown tensor type 'q9'"),
        ("--include-weights a --exclude-weights b in.gguf Q8_0", "exclude each other"),
        ("--repack-pattern a in.gguf Q8_0", "--repack-pattern needs --repack"),
    ],
)
def test_usage_errors(line: str, message: str) -> None:
    with pytest.raises(UsageError) as problem:
        parsed(line)
    assert message in str(problem.value)


def test_rules_from_a_file_and_the_table(capsys, source: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("# attention\nattn_(q|k)=bf16\n\nattn=Q8_0  # the rest\n")
    out = tmp_path / "out.gguf"
    code, stdout, err = run(
        capsys, "quantize", "--custom-q", f"@{rules}", "--custom-q", "exps=q4_0", source, out, "q8_0"
    )
    assert (code, stdout) == (0, "")
    assert err.splitlines()[:3] == [
        "Adding custom rule attn_(q|k) -> bf16", "Adding custom rule attn -> q8_0", "Adding custom rule exps -> q4_0"
    ]  # fmt: skip
    assert "| 1 | bf16 | 2 | 2 | 0.04 | attn_(q|k) |" in err and "| 3 | q4_0 | 3 | 3 | 0.05 | exps |" in err
    assert "Using custom type bf16 for tensor blk.0.attn_q.weight" in err
    types = {n: t.type for n, t in open_gguf(out).tensors.items()}
    assert types["blk.0.attn_k.weight"] == T.BF16 and types["blk.0.attn_v.weight"] == T.Q8_0
    assert types["blk.0.ffn_down_exps.weight"] == T.Q4_0 and types["blk.0.attn_norm.weight"] == T.F32
    argv = ("--custom-q", "ffn_dwn=q8_0", "--custom-q", "attn_k=q5_0", source, out, "q8_0")
    code, _, err = run(capsys, "quantize", *argv)
    assert code == 0 and 'warning: --custom-q: rule "ffn_dwn=q8_0" matches no tensor' in err
    assert open_gguf(out).tensors["blk.0.attn_k.weight"].type == T.Q5_0
    code, _, err = run(capsys, "quantize", "--strict", *argv)
    assert code == 2 and 'rule "ffn_dwn=q8_0" matches no tensor' in err
    assert (
        "no effect together with --pure"
        in run(capsys, "quantize", "--pure", "--custom-q", "x=f16", source, out, "q8_0")[2]
    )


def test_rules_by_the_names_of_llama_cpp(capsys, source: Path, tmp_path: Path) -> None:
    rules, out = tmp_path / "types.txt", tmp_path / "out.gguf"
    rules.write_text("attn_k=q8_0 attn_v=f16\nexps=q4_0\n")
    argv = ("--tensor-type", r"blk\.0\.attn_k=bf16", "--tensor-type-file", rules)
    assert run(capsys, "quantize", *argv, source, out, "q8_0")[0] == 0
    types = {n: t.type for n, t in open_gguf(out).tensors.items()}
    assert (types["blk.0.attn_k.weight"], types["blk.0.attn_v.weight"]) == (T.BF16, T.F16)
    assert types["blk.0.ffn_down_exps.weight"] == T.Q4_0
    code, _, err = run(capsys, "quantize", "--tensor-type-file", tmp_path / "none", source, out, "q8_0")
    assert code == 2 and "cannot read" in err


def test_dry_run_prints_exact_sizes_and_writes_nothing(capsys, source: Path, tmp_path: Path) -> None:
    code, out, _ = run(
        capsys, "quantize", "--dry-run", "--custom-q", "attn_q=q8_0", source, tmp_path / "o.gguf", "iq4_ks"
    )
    assert code == 0 and list(tmp_path.iterdir()) == [source]
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["tensor"] == ["tensor", "shape", "old", "new", "MiB", "reason"]
    assert rows["blk.0.attn_q.weight"] == ["blk.0.attn_q.weight", "256", "x", "64", "f16", "q8_0", "0.017", "rule", "1"]
    assert rows["blk.0.attn_v.weight"][5:] == ["q8_0", "0.004", "mix"]
    assert "fallback of iq4_ks" in out and "kept: router" in out
    written = main.main(["quantize", str(source), str(tmp_path / "q8.gguf"), "Q8_0"])
    capsys.readouterr()
    dry = run(capsys, "quantize", "--dry-run", source, "Q8_0")[1]
    total = sum(t.n_bytes for t in open_gguf(tmp_path / "q8.gguf").tensors.values())
    assert written == 0 and f"total: {len(SHAPES)} tensors, {total} bytes = 0.000 GiB" in dry
    assert "BPW); input 0.000 GiB" in dry


def test_refused_types_exit_with_a_message(capsys, source: Path) -> None:
    code, _, err = run(capsys, "quantize", source, "iq2_xs")
    assert code == 1 and "Please do not use IQ2_XS quantization without an importance matrix" in err
    assert run(capsys, "quantize", "--dry-run", "--ignore-imatrix-rules", source, "iq2_xs")[0] == 0


def test_partial_requant_skips_a_finished_file(capsys, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    assert run(capsys, "quantize", source, out, "Q8_0")[0] == 0
    before = out.stat().st_mtime_ns
    code, _, err = run(capsys, "quantize", "--partial-requant", source, out, "Q8_0")
    assert code == 0 and "exists and is complete, skipping it" in err and out.stat().st_mtime_ns == before


def test_repack_command(capsys, source: Path, tmp_path: Path) -> None:
    q8, r8, back = (tmp_path / f"{name}.gguf" for name in ("q8", "r8", "back"))
    run(capsys, "quantize", source, q8, "Q8_0")
    assert run(capsys, "repack", q8, r8)[0] == 0 and run(capsys, "repack", "--unrepack", r8, back)[0] == 0
    assert back.read_bytes() == q8.read_bytes()
    code, _, err = run(capsys, "quantize", "--repack", r8, tmp_path / "no.gguf")
    assert code == 0 and "nothing to repack: no file is written" in err and not (tmp_path / "no.gguf").exists()
    argv = ("repack", "--repack-pattern", "ffn_upp", q8, tmp_path / "no.gguf")
    code, _, err = run(capsys, *argv)
    assert code == 0 and 'warning: --repack-pattern: "ffn_upp" matches no tensor' in err and "nothing to repack" in err
    code, _, err = run(capsys, *argv, "--strict")
    assert code == 2 and '"ffn_upp" matches no tensor' in err


def test_split_and_merge(capsys, source: Path, tmp_path: Path) -> None:
    code, out, _ = run(capsys, "gguf-split", "--split-max-tensors", 5, source, tmp_path / "part")
    assert code == 0 and out.count("tensors") == 3
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert [len(open_gguf(parts[0]).tensors), len(parts)] == [len(SHAPES), 3]
    merged = tmp_path / "merged.gguf"
    assert run(capsys, "gguf-split", "--merge", parts[0], merged)[0] == 0
    assert hashlib.sha256(merged.read_bytes()).digest() == hashlib.sha256(source.read_bytes()).digest()
    assert run(capsys, "gguf-split", "--merge", parts[0], merged)[0] == 2
    code, out, _ = run(
        capsys, "gguf-split", "--dry-run", "--split-max-size", "1M", "--no-tensor-first-split", source, "x"
    )
    assert code == 0 and "x-00001-of-00002.gguf: 0 tensors" in out and not Path("x-00001-of-00002.gguf").exists()
    assert run(capsys, "gguf-split", "--split-max-size", "5", source, "x")[0] == 2


@pytest.mark.parametrize("command", ["quantize", "repack", "gguf-split"])
def test_help(capsys, command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "") and out.startswith("usage: ik ")
    assert ("--ignore-imatrix-rules" in out and "IQ3_KL" in out) == (command != "gguf-split")


def test_rule_options_that_match_nothing(capsys, source: Path, tmp_path: Path) -> None:
    """Each of them names the rule and goes on; with --strict it is an error."""
    matrix = tmp_path / "m.dat"
    attn_q = ImatrixEntry(np.ones((1, SHAPES["blk.0.attn_q.weight"][0]), np.float32), np.ones(1, np.float32))
    write_legacy(Imatrix({"blk.0.attn_q.weight": attn_q}), matrix)
    named = tmp_path / "types.txt"
    named.write_text("nothing=q8_0")
    sized = ("--target-bpw", "9")
    for given, message in (
        (("--tensor-type-file", named, "q8_0"), '--custom-q: rule "nothing=q8_0" matches no tensor of this model'),
        (("--imatrix", matrix, "--include-weights", "nothing", "q8_0"),
         '--include-weights: "nothing" matches no entry of the importance matrix'),
        (("--imatrix", matrix, "--exclude-weights", "atn_q", "q8_0"),
         '--exclude-weights: "atn_q" matches no entry of the importance matrix; nearest: attn_q'),
        (("--exclude-weights", "attn_q", "q8_0"), "--exclude-weights: has no effect without importance weights"),
        ((*sized, "--cpu-tensors", "exps,nothing"), '--cpu-tensors: "nothing" matches no tensor'),
        ((*sized, "--gpu-tensors", "attn,nothing"), '--gpu-tensors: "nothing" matches no tensor'),
        ((*sized, "-ot", "exps=CPU,nothing=CUDA0"), '-ot: "nothing" matches no tensor'),
    ):  # fmt: skip
        options = [a for a in given if a != "q8_0"]
        argv = ["quantize", "--dry-run", *options, source, tmp_path / "o.gguf", *(["q8_0"] if "q8_0" in given else [])]
        code, _, err = run(capsys, *argv)
        assert code == 0 and f"warning: {message}" in err, err
        code, _, err = run(capsys, "quantize", "--strict", *argv[1:])
        assert code == 2 and f"error: {message}" in err, err
