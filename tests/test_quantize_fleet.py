"""Quantizing by several workers: the bytes of one process, whatever dies, and unfinished files that continue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_deaths import Deadly, change_workers, kill_driver, other_input
from quant_models import SHAPES, write_model

from ikcli import log
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.placed import PlacedFile
from ikcli.gguf.reader import open_gguf
from ikcli.main import main
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, write_gguf
from ikcli.settings.run import default_model
from ikcli.study import fleet_quantize

Capture = pytest.CaptureFixture[str]
RULES = ["--custom-q", "attn_k=q8_0,ffn_down=bf16", "--extra-output-tensor", "q4_0"]
LIST = """\
Q4_K_M
IQ4_K --imatrix {imatrix}
IQ4_K plain
Q8_0 extra --extra-output-tensor q4_0
Q4_0_R8 --token-embedding-type f16
COPY
"""


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tensors are divided."""
    monkeypatch.setattr(log, "utf8_streams", lambda: None)
    monkeypatch.setattr(fleet_quantize, "_UNIT", 1 << 13)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "Tiny-F16.gguf", splits=[3, 6, 3])


@pytest.fixture
def imatrix(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    entries = {
        name: ImatrixEntry(
            rng.random((shape[2] if len(shape) > 2 else 1, shape[0]), np.float32) + 0.01,
            np.full(shape[2] if len(shape) > 2 else 1, 8, np.float32),
        )
        for name, shape in SHAPES.items()
        if len(shape) > 1 and "gate_inp" not in name
    }
    path = tmp_path / "imatrix.gguf"
    write_gguf(Imatrix(entries, n_chunks=8), path)
    return path


def quantize(*words: object) -> None:
    assert main(["quantize", *map(str, words)]) == 0


def test_workers_write_the_same_bytes(source: Path, imatrix: Path, tmp_path: Path, capsys: Capture) -> None:
    alone, out, journal = tmp_path / "alone.gguf", tmp_path / "out.gguf", tmp_path / "j.jsonl"
    words = ["--imatrix", imatrix, *RULES]
    quantize(*words, source, alone, "Q4_K_M", 2)
    quantize(*words, "--workers", 2, "--journal", journal, source, out, "Q4_K_M", 2)
    assert out.read_bytes() == alone.read_bytes()
    assert not list(tmp_path.glob(".*.partial"))
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > len(SHAPES) + 2
    # all is there: nothing is written again
    before = out.stat().st_mtime_ns
    quantize(*words, "--journal", journal, source, out, "Q4_K_M", 2)
    assert out.stat().st_mtime_ns == before
    # an unfinished file of which the journal does not know everything, and a unit that never reached the disk
    data = bytearray(out.read_bytes())
    half = len(data) // 2
    data[half:] = bytes(len(data) - half)
    (tmp_path / ".out.gguf.partial").write_bytes(data)
    out.unlink()
    journal.write_bytes(b"".join(lines[:-3]) + lines[-2][:20])
    capsys.readouterr()
    quantize(*words, "--journal", journal, source, out, "Q4_K_M", 2)
    assert "pieces are there already" in capsys.readouterr().err
    assert out.read_bytes() == alone.read_bytes()
    assert main(["quantize", "--journal", str(journal), str(source), str(out), "Q4_K_M", "2"]) == 2
    assert "a journal of other work" in capsys.readouterr().err


@pytest.mark.slow  # starts processes for a mixture of what other tests do
def test_split_results_and_repacking(source: Path, tmp_path: Path) -> None:
    quantize("--keep-split", source, tmp_path / "alone", "Q4_0", 1)
    quantize("--keep-split", "--workers", 2, source, tmp_path / "out", "Q4_0", 1)
    quantize("--repack", tmp_path / "alone-00001-of-00003.gguf", tmp_path / "alone-r.gguf")
    quantize("--repack", "--workers", 2, tmp_path / "alone-00001-of-00003.gguf", tmp_path / "out-r.gguf")
    names = [*(f"-0000{i}-of-00003.gguf" for i in (1, 2, 3)), "-r.gguf"]
    for name in names:
        assert (tmp_path / f"out{name}").read_bytes() == (tmp_path / f"alone{name}").read_bytes()


@pytest.mark.slow  # starts processes for a mixture of what other tests do
def test_a_matrix_of_quants(source: Path, imatrix: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(LIST.format(imatrix=imatrix))
    words = ["--matrix", tmp_path / "list.txt", "-t", 1, source]
    quantize(*words, tmp_path / "alone")
    journal = tmp_path / "j.jsonl"
    quantize("--workers", 2, "--journal", journal, *words, tmp_path / "out")
    wanted = sorted((tmp_path / "alone").iterdir())
    assert len(wanted) == 6
    for path in wanted:
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    # killed while files got their final names
    last = tmp_path / "out" / wanted[-1].name
    last.rename(last.with_name(f".{last.name}.partial"))
    quantize("--journal", journal, *words, tmp_path / "out")
    assert last.read_bytes() == wanted[-1].read_bytes()


@pytest.mark.slow  # shared by all commands: test_fleet.py, and with one of them test_perplexity_fleet.py
def test_a_worker_that_dies(source: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(source, tmp_path / "alone.gguf", "Q5_K", 1)
    change_workers(monkeypatch, fleet_quantize, lambda f: Deadly(f, tmp_path))
    capsys.readouterr()
    quantize("--workers", 2, source, tmp_path / "out.gguf", "Q5_K", 1)
    assert capsys.readouterr().err.count("its unit is done again") == 1 and (tmp_path / "died").exists()
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()


@pytest.mark.slow  # shared by all commands: test_fleet.py, and with one of them test_perplexity_fleet.py
def test_a_driver_that_is_killed(tmp_path: Path) -> None:
    source, journal = default_model(), tmp_path / "j.jsonl"
    quantize(source, tmp_path / "alone.gguf", "IQ4_K", 1)
    words = ["quantize", "--journal", str(journal), str(source), str(tmp_path / "out.gguf"), "IQ4_K", "1"]
    n_kept = sum(t.type == GGMLType.F32 for t in open_gguf(source).tensors.values())  # copied before workers begin
    known = kill_driver([*words[:1], "--workers", "2", *words[1:]], journal, n_kept + 2)
    assert not (tmp_path / "out.gguf").exists() and (tmp_path / ".out.gguf.partial").exists()
    assert main(words) == 0
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "alone.gguf").read_bytes()
    assert n_kept + 2 < known < journal.read_bytes().count(b"\n")


def test_without_a_journal_nothing_is_left(source: Path, tmp_path: Path, capsys: Capture, monkeypatch: Any) -> None:
    change_workers(monkeypatch, fleet_quantize, lambda f: other_input(f, 0))
    before = sorted(tmp_path.iterdir())
    assert main(["quantize", "--workers", "2", str(source), str(tmp_path / "out.gguf"), "Q4_0"]) == 1
    assert "another file than that of the command" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    source = write_model(tmp_path / "in.gguf")

    def full(self: PlacedFile, name: str, start: int, data: Any) -> None:
        raise self._cannot(OSError(28, "No space left on device"))

    monkeypatch.setattr(PlacedFile, "write", full)
    assert main(["quantize", "--workers", "2", str(source), str(tmp_path / "out.gguf"), "Q4_0"]) == 1
    assert "out.gguf: cannot be written (No space left on device)" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_options_of_workers_are_not_for_lines(source: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "list.txt").write_text("Q4_0 --workers 2\n")
    assert main(["quantize", "--matrix", str(tmp_path / "list.txt"), str(source), str(tmp_path / "o")]) == 2
    assert "--workers cannot be given for one line" in capsys.readouterr().err
