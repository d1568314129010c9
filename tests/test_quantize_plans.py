"""Plans of `ik quantize` without the data of the model, and what its help says about types."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
from factories import tiny_model
from gguf_files import write_model
from recipe_models import info

from ikcli.cli import model as _model
from ikcli.cli.help import WIDTH, command_help
from ikcli.cli.table import COMMANDS
from ikcli.commands import _quantize_request
from ikcli.gguf.constants import FILE_TYPES
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES
from ikcli.main import main
from ikcli.quant.recipes import RecipeOptions, choose_types
from ikcli.quant.tool import file_type_names
from ikcli.quant.type_help import MIXES, type_lines


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_model(tiny_model("llama", feed_forward_length=128), tmp_path / "whole.gguf")


@pytest.fixture
def header(whole: Path, tmp_path: Path) -> Path:
    path = tmp_path / "header.gguf"
    path.write_bytes(whole.read_bytes()[: open_gguf(whole).data_start])
    return path


def table(text: str) -> list[list[str]]:
    """Cells of the rows of a dry run, and its total."""
    return [line.split() for line in text.splitlines() if line.startswith(("blk.", "token_embd", "output", "total"))]


# --- plans ------------------------------------------------------------------------------------------------------------
def test_a_header_is_enough_for_a_dry_run(
    capsys: pytest.CaptureFixture[str], whole: Path, header: Path, tmp_path: Path
) -> None:
    for flags, type in (((), ("Q4_0",)), ((), ("IQ2_BN",)), (("--repack",), ())):
        code, out, err = run(capsys, "quantize", "--dry-run", *flags, whole, tmp_path / "o.gguf", *type)
        assert code == 0 and "enough for a plan" not in err
        found = run(capsys, "quantize", "--dry-run", *flags, header, tmp_path / "o.gguf", *type)
        assert (found[0], table(found[1])) == (0, table(out))
        assert "is missing: enough for a plan, not for a run" in found[2]
    matrix = tmp_path / "list.txt"
    matrix.write_text("Q4_0\nQ8_0\n")
    assert run(capsys, "quantize", "--dry-run", "--matrix", matrix, header, tmp_path / "out")[0] == 0
    assert run(capsys, "quantize", "--dry-run", "--covariance", "self", header, tmp_path / "o.gguf", "Q4_0")[0] == 0
    assert not (tmp_path / "o.gguf").exists()


def test_a_run_needs_the_data(capsys: pytest.CaptureFixture[str], header: Path, tmp_path: Path) -> None:
    code, _, err = run(capsys, "quantize", header, tmp_path / "o.gguf", "Q4_0")
    assert code == 1 and "but the file ends at" in err and not (tmp_path / "o.gguf").exists()
    code, _, err = run(capsys, "quantize", "--dry-run", "--target-bpw", "5", header, tmp_path / "o.gguf")
    assert code == 2 and "a target measures the weights, and some are missing; give a TYPE" in err


def test_preflight_of_a_header(capsys: pytest.CaptureFixture[str], whole: Path, header: Path, tmp_path: Path) -> None:
    for options in (("Q4_0",), ("IQ1_BN",)):
        code, out, _ = run(capsys, "quantize", "--preflight", header, tmp_path / "o.gguf", *options)

        assert code == 0 and "| input | note |" in out and "enough for a plan, not for a run" in out
        assert "preflight: this run can start" in out
    cut = tmp_path / "cut.gguf"  # a download that broke off is another thing
    cut.write_bytes(whole.read_bytes()[:-64])
    code, out, _ = run(capsys, "quantize", "--preflight", cut, tmp_path / "o.gguf", "Q4_0")
    assert code == 1 and "but the file ends at" in out


def test_a_first_part_is_enough(capsys: pytest.CaptureFixture[str], whole: Path, tmp_path: Path) -> None:
    assert run(capsys, "gguf-split", "--split-max-tensors", 12, whole, tmp_path / "part")[0] == 0
    first, *others = sorted(tmp_path.glob("part-*.gguf"))
    known = run(capsys, "quantize", "--dry-run", whole, tmp_path / "o.gguf", "Q4_K_M")[1]
    for path in others:
        path.unlink()
    code, out, err = run(capsys, "quantize", "--dry-run", first, tmp_path / "o.gguf", "Q4_K_M")
    assert code == 0 and sorted(table(out)) == sorted(table(known)) and "are assumed to have the types" in err
    code, out, _ = run(capsys, "quantize", "--preflight", first, tmp_path / "o.gguf", "Q4_K_M")
    assert code == 0 and "are assumed to have the types" in out
    code, _, err = run(capsys, "quantize", first, tmp_path / "o.gguf", "Q4_K_M")
    assert code == 1 and "is missing" in err


def test_a_model_of_a_hub_comes_before_the_arguments(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, whole: Path, header: Path, tmp_path: Path
) -> None:
    asked: list[tuple[str, bool]] = []

    def find(model: None, hub: Any, *, header_only: bool = False) -> Path | None:
        if not hub.repo:
            return None
        asked.append((hub.repo, header_only))
        return header if header_only else whole

    monkeypatch.setattr(_quantize_request, "find_model", find)
    monkeypatch.chdir(tmp_path)
    for plan in ("--dry-run", "--preflight"):
        code, _, err = run(capsys, "quantize", plan, "-hf", "me/tiny:F16", "Q8_0")
        assert code == 0, err
    assert run(capsys, "quantize", "-hf", "me/tiny:F16", "Q8_0")[0] == 0
    assert asked == [("me/tiny:F16", True), ("me/tiny:F16", True), ("me/tiny:F16", False)]
    assert (tmp_path / "ggml-model-Q8_0.gguf").is_file()


def test_variables_of_a_server_are_not_for_quantize(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, whole: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMA_ARG_HF_REPO", "me/other")
    monkeypatch.setattr(_model, "find_model", None)
    assert run(capsys, "quantize", "--dry-run", whole, tmp_path / "o.gguf", "Q8_0")[0] == 0


# --- help -------------------------------------------------------------------------------------------------------------
def test_help_has_a_line_per_type(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "quantize", "--help")
    lines = [line for line in out.splitlines() if re.match(r"  [A-Z]+\w* +\S", line)]
    assert code == 0 and [line.split()[0] for line in lines] == file_type_names()
    assert all(len(line) <= 80 for line in lines)
    assert "  IQ4_K        4.5 bpw non-linear quantization" in lines and "  Q4_K         alias for Q4_K_M" in lines
    linear = {line.split()[0] for line in lines if "non-linear" in line and "repacked" not in line}
    assert linear == {"IQ4_NL", "IQ4_XS", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "IQ4_KS", "IQ3_KL", "IQ2_KS",
                      "IQ4_KSS", "IQ5_KS", "IQ3_KS", "IQ2_KL"}  # fmt: skip
    trellis = {line.split()[0] for line in lines if "trellis" in line}
    assert trellis == {"IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"}
    assert {line.split()[0] for line in lines if "Bitnet" in line} == {
        "IQ1_BN",
        "IQ2_BN",
        "IQ2_BN_R4",
        "TQ1_0",
        "TQ2_0",
    }
    assert max(map(len, command_help(next(c for c in COMMANDS if c.name == "quantize")).splitlines())) <= WIDTH


def test_mixes_have_the_size_that_help_says() -> None:
    shapes = {"attn_q": (4096, 4096), "attn_k": (4096, 4096), "attn_v": (4096, 4096), "attn_output": (4096, 4096),
              "ffn_gate": (4096, 11008), "ffn_up": (4096, 11008), "ffn_down": (11008, 4096)}  # fmt: skip
    tensors = [info(f"blk.{il}.{part}.weight", *shape) for il in range(32) for part, shape in shapes.items()]
    keys = {"general.architecture": "llama", "llama.block_count": 32, "llama.attention.head_count": 32,
            "llama.attention.head_count_kv": 32}  # fmt: skip
    for f in FILE_TYPES.values():
        if f.names and f.names[-1] in MIXES:
            chosen = choose_types(tensors, keys, RecipeOptions(f.number, ignore_imatrix_rules=True))
            bpw = 8 * sum(c.n_bytes for c in chosen) / sum(prod(c.shape) for c in chosen)
            assert MIXES[f.names[-1]] == pytest.approx(bpw, abs=0.006), f.names
    about = dict(line.split(None, 1) for line in type_lines())
    for f in FILE_TYPES.values():
        for name in f.names:
            alike = [g for g in FILE_TYPES.values() if g.names and g.type == f.type]
            assert f"{TYPES[f.type].bpw:g}"[:3] in about[name] or name in MIXES or len(alike) > 1
