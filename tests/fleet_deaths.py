"""Workers and commands that die under way, for the tests of all commands that divide their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ikcli.fleet.worker import UnitFunction


@dataclass(frozen=True)
class Deadly:
    """Makes the workers of `factory`; the first one that begins its unit number `at` (from 0) dies, once."""

    factory: Callable[[], Any]
    room: Path
    at: int = 1

    def __call__(self) -> DeadlyWorker:
        return DeadlyWorker(self)


class DeadlyWorker:
    """See `Deadly`."""

    def __init__(self, how: Deadly) -> None:
        self.how, self.worker, self.n = how, how.factory(), 0

    def do(self, unit: Any) -> Any:
        mark = self.how.room / "died"
        if self.n == self.how.at and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.n += 1
        return self.worker.do(unit)

    def close(self) -> None:
        self.worker.close()


@dataclass
class Around:
    """An executor that gives `work` a changed factory."""

    work: Any
    change: Callable[[Any], Any]

    @property
    def n_workers(self) -> int:
        return self.work.n_workers

    def run(self, factory: Any, units: Sequence[Any], ahead: int | None = None) -> Any:
        return self.work.run(self.change(factory), units, ahead)


def change_workers(monkeypatch: pytest.MonkeyPatch, module: Any, change: Callable[[Any], Any]) -> None:
    """Have `module` work with changed factories of workers."""
    plain = module.executor_of
    monkeypatch.setattr(module, "executor_of", lambda *args: Around(plain(*args), change))


def other_input(factory: UnitFunction, i: int) -> UnitFunction:
    """As if the command had read another file as its input number i."""
    inputs = list(factory.inputs)
    file = inputs[i]
    assert file is not None
    inputs[i] = replace(file, digest="0" * 64)
    return replace(factory, inputs=tuple(inputs))


def kill_driver(words: Sequence[str], journal: Path, n_done: int = 2) -> int:
    """Kill the command when its journal has n_done units, wait for the end of its processes; lines of the journal."""
    driver = subprocess.Popen([sys.executable, "-m", "ikcli", *words], stdout=subprocess.DEVNULL)
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > n_done)
    children = descendants(driver.pid)
    driver.kill()
    driver.wait()
    assert children
    wait_until(lambda: not any(alive(pid) for pid in children))
    return journal.read_bytes().count(b"\n")


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
