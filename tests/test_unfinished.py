"""Runs that end in the middle of a file: the next one continues, and the result is that of an uninterrupted run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import LLAMA, as_bf16, llama_tensors, write_checkpoint

from ikcli.gguf.unfinished import part_path
from ikcli.gguf.writer import GGUFWriter
from ikcli.main import main

END = """
import os, signal, sys
from ikcli.gguf.writer import GGUFWriter
from ikcli.main import main
real, after = GGUFWriter.end_tensor, int(sys.argv[1])
def end_tensor(writer):
    real(writer)
    if writer._next == after:
        os.kill(os.getpid(), signal.SIGKILL)
GGUFWriter.end_tensor = end_tensor
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", LLAMA, as_bf16(llama_tensors(LLAMA)))


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "tiny.gguf"
    assert main(["convert", str(checkpoint), "--outfile", str(out)]) == 0
    return out


def command(kind: str, checkpoint: Path, model: Path, out: Path, type_name: str = "q4_K") -> list[str]:
    if kind == "convert":
        return ["convert", str(checkpoint), "--outfile", str(out), "--outtype", type_name, "-t", "2"]
    return ["quantize", str(model), str(out), type_name, "2"]


def kill_after(n: int, argv: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", END, str(n), *argv], capture_output=True)
    assert done.returncode == -signal.SIGKILL


def written(text: str) -> list[int]:
    """Numbers of the tensors that a run wrote, by its log."""
    return [int(n) for n in re.findall(r"^\[ *(\d+)/", text, re.MULTILINE)]


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="the run is killed")
@pytest.mark.parametrize("kind", ["convert", "quantize"])
def test_a_killed_run_goes_on_behind_its_last_tensor(
    checkpoint: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert main(command(kind, checkpoint, model, whole)) == 0
    n = len(written(capsys.readouterr().err))
    argv = command(kind, checkpoint, model, out)
    kill_after(8, argv)
    assert not out.exists() and part_path(out).exists()
    assert main(argv) == 0
    text = capsys.readouterr().err
    assert "8 tensors are complete" in text and written(text) == list(range(9, n + 1))
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf", "whole.gguf"]


def leave(argv: list[str], after: int, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> int:
    """Exit code of a run that ends with `error` behind so many tensors."""
    real: Callable[[Any], None] = GGUFWriter.end_tensor

    def end_tensor(writer: GGUFWriter) -> None:
        real(writer)
        if writer._next == after:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(GGUFWriter, "end_tensor", end_tensor)
        return main(argv)


def test_an_interrupted_run_says_that_it_can_go_on(
    checkpoint: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = command("convert", checkpoint, model, tmp_path / "out.gguf")
    assert leave(argv, 3, monkeypatch, KeyboardInterrupt) == 130
    assert "the same command continues from there" in capsys.readouterr().err
    assert leave(argv, 7, monkeypatch, KeyboardInterrupt) == 130
    assert written(capsys.readouterr().err) == [4, 5, 6, 7]
    assert main(argv) == 0
    assert written(capsys.readouterr().err)[0] == 8


def test_other_settings_start_over(
    checkpoint: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "out.gguf", tmp_path / "whole.gguf"
    assert leave(command("convert", checkpoint, model, out), 5, monkeypatch, KeyboardInterrupt) == 130
    argv = command("convert", checkpoint, model, out, "q5_K")
    capsys.readouterr()
    assert main(argv) == 0
    text = capsys.readouterr().err
    assert "had other inputs or settings; its output is dropped" in text and written(text)[0] == 1
    assert main(command("convert", checkpoint, model, whole, "q5_K")) == 0
    assert out.read_bytes() == whole.read_bytes()


def test_another_input_begins_anew(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same keys, names and sizes, but other numbers."""
    out = tmp_path / "out.gguf"
    for seed in (0, 1):
        mine = write_checkpoint(tmp_path / "mine", LLAMA, as_bf16(llama_tensors(LLAMA, seed)))
        argv = command("convert", mine, model, out)
        if not seed:
            assert leave(argv, 5, monkeypatch, KeyboardInterrupt) == 130
    capsys.readouterr()
    assert main(argv) == 0
    assert written(capsys.readouterr().err)[0] == 1
    assert main(command("convert", mine, model, tmp_path / "whole.gguf")) == 0
    assert out.read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize("damage", ["a byte", "the end", "the header", "the list"])
def test_only_what_is_whole_is_kept(
    checkpoint: Path,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    damage: str,
) -> None:
    """After a loss of power, any part of what was written may be missing."""
    whole, out = tmp_path / "whole.gguf", tmp_path / "out.gguf"
    assert main(command("convert", checkpoint, model, whole)) == 0
    argv = command("convert", checkpoint, model, out)
    assert leave(argv, 6, monkeypatch, KeyboardInterrupt) == 130
    part = part_path(out)
    data = bytearray(part.read_bytes())
    if damage == "a byte":
        data[-1000] ^= 1
    elif damage == "the end":
        del data[-5:]
    elif damage == "the header":
        data[40] ^= 1
    else:
        part.with_name(part.name + ".tensors").write_bytes(b"\xff\x00junk\n")
    part.write_bytes(data)
    capsys.readouterr()
    assert main(argv) == 0
    first = written(capsys.readouterr().err)[0]
    assert 1 < first <= 6 if damage in ("a byte", "the end") else first == 1
    assert out.read_bytes() == whole.read_bytes()


def test_an_error_leaves_nothing(
    checkpoint: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = command("convert", checkpoint, model, tmp_path / "out.gguf")
    with pytest.raises(RuntimeError):
        leave(argv, 5, monkeypatch, RuntimeError)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_write_one_file(
    checkpoint: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fcntl")
    argv = command("convert", checkpoint, model, tmp_path / "out.gguf")
    real, codes = GGUFWriter.end_tensor, []

    def end_tensor(writer: GGUFWriter) -> None:
        real(writer)
        if not codes:
            codes.append(0)
            codes.append(main(argv))

    monkeypatch.setattr(GGUFWriter, "end_tensor", end_tensor)
    assert main(argv) == 0
    assert codes == [0, 1]
    assert "another run is writing it" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["out.gguf"]
