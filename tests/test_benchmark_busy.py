"""The benchmark of busy machines: turns alternate, loops end with their turn, the table has medians and factors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from benchmark_scripts import load


def test_turns_alternate_and_factors_are_of_medians(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("busy")
    busy: list[bool] = [False]
    seen: list[bool] = []

    @contextlib.contextmanager
    def loops() -> Iterator[None]:
        busy[0] = True
        yield
        busy[0] = False

    def turn(session: object, params: object) -> object:
        seen.append(busy[0])
        return script.Turn(100.0, 10.0, 0.9) if busy[0] else script.Turn(220.0, 24.0 + len(seen), 1.9)

    monkeypatch.setattr(script, "busy_loops", loops)
    monkeypatch.setattr(script, "turn", turn)
    opened = contextlib.nullcontext(None)
    monkeypatch.setattr(script, "Session", SimpleNamespace(open=lambda config, n_ctx: opened))
    assert script.main(["-r", "3", "-t", "1"]) == 0
    assert seen == [False] + [False, True] * 3  # the first one warms up
    assert "| factor | 2.20 | 2.80 | 2.11 |" in capsys.readouterr().out


def test_loops_run_on_every_cpu_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("busy")
    monkeypatch.setattr(script, "SETTLE_S", 0)
    monkeypatch.setattr(script, "visible_cpus", lambda: {3, 0})
    started: list[list[str]] = []
    ended: list[str] = []

    class Popen:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def kill(self) -> None:
            ended.append("kill")

        def wait(self) -> None:
            ended.append("wait")

    monkeypatch.setattr(script.subprocess, "Popen", Popen)
    with pytest.raises(KeyError), script.busy_loops():
        raise KeyError
    assert [command[-1] for command in started] == ["0", "3"] and ended == ["kill", "wait"] * 2
