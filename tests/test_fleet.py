"""Work in units: journals that go on after anything, executors that give the same, workers that die."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ikcli.errors import FormatError, IkError, UnsupportedError, UsageError
from ikcli.fleet import executor as executors
from ikcli.fleet.choose import executor
from ikcli.fleet.executor import Executor, LocalExecutor, ProcessExecutor
from ikcli.fleet.journal import Journal, read

HEAD = {"kind": "test", "n": 3}


# --- the journal ------------------------------------------------------------------------------------------------------
def test_a_journal_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    first = Journal(path, HEAD)
    first.add("a", {"x": 1.5})
    first.close()
    with path.open("ab") as file:
        file.write(b'{"key": "b", "x"')  # cut off in the middle
    second = Journal(path, HEAD)
    assert second.records == {"a": {"x": 1.5}} and "b" not in second
    second.add("b", {"x": 2})
    second.close()
    assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == [None, "a", "b"]
    assert read(path)[0].records == {"a": {"x": 1.5}, "b": {"x": 2}}


def test_a_journal_of_other_work_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path, HEAD).close()
    with pytest.raises(UsageError, match="of other work: n is 3 there and 4 now"):
        Journal(path, HEAD | {"n": 4})


@pytest.mark.parametrize("text", [b"[1]\n", b'{"a": 1}\nnonsense\n', b'{"a": 1}\n{"no": "key"}\n', b"no line end"])
def test_what_is_no_journal_is_refused(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(text)
    with pytest.raises(FormatError, match="journal"):
        Journal(path, HEAD)
    assert path.read_bytes() == text


def test_a_journal_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(IkError, match="cannot write the journal"):
        Journal(tmp_path / "nowhere" / "j.jsonl", HEAD)


# --- executors --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Squares:
    """Makes workers that square; they die once at units for which `room` has no file yet."""

    room: Path
    dies_at: tuple[int, ...] = ()
    always: bool = False
    broken: bool = False

    def __call__(self) -> Squares:
        if self.broken:
            raise IkError("this worker cannot begin")
        return self

    def do(self, unit: int) -> int:
        mark = self.room / str(unit)
        if unit in self.dies_at and (self.always or not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if unit < 0:
            raise IkError(f"{unit} is negative")
        return unit * unit

    def close(self) -> None:
        """Nothing is held."""


def results(work: Executor, factory: Squares, units: list[Any]) -> list[Any]:
    found = dict(work.run(factory, units))
    return [found[i] for i in range(len(units))]


UNITS = list(range(7))
SQUARES = [u * u for u in UNITS]


def test_here_and_processes_agree(tmp_path: Path) -> None:
    assert isinstance(executor(1, None, 1), LocalExecutor) and isinstance(executor(2, None, 1), ProcessExecutor)
    assert results(LocalExecutor(), Squares(tmp_path), UNITS) == SQUARES
    assert results(ProcessExecutor(2), Squares(tmp_path), UNITS) == SQUARES
    assert results(ProcessExecutor(2), Squares(tmp_path), []) == results(LocalExecutor(), Squares(tmp_path), []) == []


def test_units_of_dead_processes_are_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert results(ProcessExecutor(2), Squares(tmp_path, dies_at=(2, 5)), UNITS) == SQUARES
    assert capsys.readouterr().err.count("its unit is done again") == 2
    with pytest.raises(IkError, match=f"died {executors.TRIES} times at unit 4"):
        results(ProcessExecutor(1), Squares(tmp_path, dies_at=(3,), always=True), UNITS)


def test_errors_of_units_end_the_work(tmp_path: Path) -> None:
    with pytest.raises(IkError, match="-1 is negative"):
        results(ProcessExecutor(2), Squares(tmp_path), [1, -1, 2])


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"ikcli\[ray\]"):
        results(executor(2, "local", 1), Squares(tmp_path), UNITS)
