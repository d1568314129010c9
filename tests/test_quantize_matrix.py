"""Many quants in one pass: bytes, reading once, lists and their errors, names of files, failures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quant_models import SHAPES, write_model

from ikcli import log, main
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.writer import GGUFWriter
from ikcli.quant import matrix, quantizer
from ikcli.quant.encoders.floats import RowReader
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_gguf

LIST = """\
# the usual ones
Q4_K_M
IQ4_K --imatrix {imatrix}   # with importance
IQ4_K plain
Q6_0  Q6_0-rules  --custom-q "attn_k=q8_0,ffn_down=bf16"
IQ2_KS --imatrix {imatrix} --output-tensor-type q6_K
Q8_0 extra --extra-output-tensor q4_0
Q4_0_R8 --token-embedding-type f16
Q5_K pure --pure
F32
COPY
"""


@pytest.fixture(autouse=True)
def _plain_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "utf8_streams", lambda: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "Tiny-F16.gguf")


@pytest.fixture
def imatrix(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    entries = {}
    for name, shape in SHAPES.items():
        if len(shape) > 1 and "gate_inp" not in name:
            n_mat = shape[2] if len(shape) > 2 else 1
            entries[name] = ImatrixEntry(
                rng.random((n_mat, shape[0]), np.float32) + 0.01, np.full(n_mat, 8, np.float32)
            )
    path = tmp_path / "imatrix.gguf"
    write_gguf(Imatrix(entries, n_chunks=8), path)
    return path


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = main.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return code, out, err


def lines_of(text: str) -> list[list[str]]:
    import shlex

    return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("n_threads", [1, 3])
def test_files_are_those_of_separate_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, imatrix: Path, n_threads: int
) -> None:
    text = LIST.format(imatrix=imatrix)
    (tmp_path / "list.txt").write_text(text)
    out = tmp_path / "new" / "quants"
    code, _, err = run(capsys, "quantize", "--matrix", tmp_path / "list.txt", "-t", n_threads, source, out)
    assert code == 0, err
    lines = lines_of(text)
    for words in lines:
        type, *rest = words
        name = rest.pop(0) if rest and not rest[0].startswith("-") else type
        alone = tmp_path / "alone.gguf"
        code, _, err = run(capsys, "quantize", *rest, source, alone, type, 2)
        assert code == 0, err
        assert (out / f"Tiny-{name}.gguf").read_bytes() == alone.read_bytes(), words
    assert len(list(out.iterdir())) == len(lines)


def test_split_input_and_a_pattern(capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path) -> None:
    parts = write_model(tmp_path / "parts.gguf", splits=[3, 6, 3])
    first = tmp_path / "parts-00001-of-00003.gguf"
    assert first.exists() and parts
    (tmp_path / "list.txt").write_text("q8_0\nQ4_0 small\n")
    pattern = tmp_path / "{name}" / "m-{type}.gguf"
    code, _, err = run(capsys, "quantize", "--matrix", tmp_path / "list.txt", first, pattern)
    assert code == 0, err
    for type, name in (("Q8_0", "Q8_0"), ("Q4_0", "small")):
        assert run(capsys, "quantize", source, tmp_path / "alone.gguf", type)[0] == 0
        assert (tmp_path / name / f"m-{name}.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()


def test_every_tensor_is_read_once_and_equal_codes_are_made_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    encoded: list[tuple[str, int]] = []
    plain_read, plain_rows = RowReader.read, quantizer.Target.rows

    def counted(self: RowReader, data: Any, type: Any, ne0: int) -> Any:
        read.append(len(data))
        return plain_read(self, data, type, ne0)

    def rows(self: quantizer.Target, values: Any, first: int, matrix: int) -> Any:
        encoded.append((self.choice.name, self.choice.new))
        return plain_rows(self, values, first, matrix)

    monkeypatch.setattr(RowReader, "read", counted)
    monkeypatch.setattr(quantizer.Target, "rows", rows)
    (tmp_path / "list.txt").write_text("Q8_0\nQ8_0 again\nQ4_0\n")
    assert run(capsys, "quantize", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")[0] == 0
    file = open_gguf(source)
    assert sum(read) == sum(t.n_bytes for t in file.tensors.values() if t.name in {name for name, _ in encoded})
    queries = [type for name, type in encoded if name == "blk.0.attn_q.weight"]
    assert len(queries) == 2 and len(set(queries)) == 2


def test_dry_run_prints_sizes_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path
) -> None:
    (tmp_path / "list.txt").write_text("Q8_0\nQ4_0\n")
    code, out, err = run(capsys, "quantize", "--dry-run", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")
    assert code == 0, err
    assert not (tmp_path / "out").exists()
    sizes = [int(line.split(" bytes")[0].split()[-1]) for line in out.splitlines()]
    assert len(sizes) == 3 and sizes[0] + sizes[1] == sizes[2]
    assert run(capsys, "quantize", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")[0] == 0
    assert sum(t.n_bytes for t in open_gguf(tmp_path / "out" / "Tiny-Q4_0.gguf").tensors.values()) == sizes[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Q8_0\n\nQ4_X\n", "line 3: unknown type Q4_X"),
        ("# none\n", "no quants"),
        ("Q8_0\nq8_0\n", "line 2: "),
        ('Q8_0 --custom-q "attn_k"\n', 'line 1: --custom-q: rule "attn_k"'),
        ("Q4_0\nQ8_0 --custom-q nothing=q8_0\n", "line 2: --custom-q"),
        ("Q8_0 a b\n", 'line 1: "b" is too much'),
        ("Q8_0 a/b\n", 'line 1: "a/b" is not a file name'),
        ("Q8_0 --dry-run\n", "line 1: --dry-run cannot be given"),
        ("Q8_0 --frobnicate\n", "line 1: "),
        ('Q8_0 "a\n', "line 1: No closing quotation"),
        ("Q4_0\nIQ2_XXS\n", "line 2: Please do not use IQ2_XXS"),
        ("Q4_0\nQ4_K --imatrix missing.dat\n", "line 2: "),
    ],
)
def test_errors_name_line_and_rule(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, text: str, expected: str
) -> None:
    (tmp_path / "list.txt").write_text(text)
    code, _, err = run(capsys, "quantize", "--strict", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")
    assert code in (1, 2) and expected in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--keep-split", "in", "out"], "--keep-split cannot be combined with --matrix"),
        (["--target-size", "1G", "in", "out"], "--target-size cannot be combined with --matrix"),
        (["in"], "needs the model and a folder"),
        (["in", "out.gguf"], "is one file"),
        (["missing.gguf", "out"], "missing.gguf"),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, argv: list[str], expected: str
) -> None:
    (tmp_path / "list.txt").write_text("Q8_0\n")
    words = [str(source) if a == "in" else a for a in argv]
    code, _, err = run(capsys, "quantize", "--matrix", tmp_path / "list.txt", *words)
    assert code in (1, 2) and expected in err and "Traceback" not in err


def test_the_disk_must_hold_all_files_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.txt").write_text("Q8_0\nQ4_0\n")
    argv = ("quantize", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")
    largest = sum(t.n_bytes for t in open_gguf(source).tensors.values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=largest * 2 // 3))
    code, _, err = run(capsys, *argv)  # each of them would fit
    assert code == 1 and "are free" in err and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    left = tmp_path / "out" / ".Tiny-Q8_0.gguf.99999999.tmp"  # of a run that was killed
    left.write_bytes(b"half")
    assert run(capsys, *argv)[0] == 1 and not left.exists()
    code, out, err = run(capsys, *argv, "--dry-run")
    assert code == 1 and "total: 2 files" in out and "are free" in err


def test_nothing_is_left_of_a_run_that_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.txt").write_text("Q8_0\nQ4_0\n")
    plain = GGUFWriter._put
    written = {"n": 0}

    def full(self: GGUFWriter, raw: Any) -> None:
        written["n"] += len(raw)
        if written["n"] > 40_000:
            from ikcli.errors import FormatError

            raise FormatError(f"{self.path}: cannot be written (No space left on device)")
        plain(self, raw)

    monkeypatch.setattr(GGUFWriter, "_put", full)
    code, _, err = run(capsys, "quantize", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")
    assert code == 1 and "No space left" in err
    assert list((tmp_path / "out").iterdir()) == []


def test_complete_files_are_skipped_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.txt").write_text("Q8_0\n")
    argv = ("quantize", "--partial-requant", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")
    assert run(capsys, *argv)[0] == 0
    (tmp_path / "list.txt").write_text("Q8_0\nQ4_0\n")
    made: list[int] = []
    plain = matrix._tensor
    monkeypatch.setattr(matrix, "_tensor", lambda *a: (made.append(len(a[2])), plain(*a))[1])
    code, _, err = run(capsys, *argv)
    assert code == 0 and "Tiny-Q8_0.gguf exists and is complete" in err
    assert set(made) == {1} and (tmp_path / "out" / "Tiny-Q4_0.gguf").exists()


def test_an_interruption_leaves_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.txt").write_text("Q8_0\nQ4_0\n")
    plain = matrix._tensor
    seen: list[str] = []

    def interrupted(name: str, *rest: Any) -> None:
        if name == "blk.0.attn_output.weight":
            seen.extend(sorted(p.name.split(".gguf")[0] for p in (tmp_path / "out").iterdir()))
            raise KeyboardInterrupt
        plain(name, *rest)

    monkeypatch.setattr(matrix, "_tensor", interrupted)
    code, _, err = run(capsys, "quantize", "--matrix", tmp_path / "list.txt", source, tmp_path / "out")
    assert code == 130 and "Traceback" not in err
    assert seen == [".Tiny-Q4_0", ".Tiny-Q8_0"] and list((tmp_path / "out").iterdir()) == []
