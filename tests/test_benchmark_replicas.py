"""The script that measures a front with replicas: its figures, and a run of each part."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from benchmark_scripts import load

SHORT = ["--requests", "4", "-r", "1", "-p", "8", "-n", "16", "--replicas", "1,2", "--share", "4"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("replicas")


def test_figures(script: ModuleType) -> None:
    answers = [
        script.Answer(1.0, [1.010, 1.012, 1.016], 1.017, 3, 11.0),
        script.Answer(2.0, [2.020], 2.020, 1, 20.0),
        script.Answer(3.0, [3.030, 3.040], 3.041, 2, 21.0),
    ]
    assert script.figures(answers) == pytest.approx((3000, 20000, 2000))


def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: ModuleType, part: str) -> list:
    monkeypatch.setattr(sys, "argv", ["replicas.py", part, *SHORT])
    script.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.slow  # starts servers
def test_latency(script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(monkeypatch, capsys, script, "latency")
    assert [row[0] for row in found] == ["direct", "front", "added by front"]
    # the other columns are differences of times of the client, for whom a whole answer may arrive at once
    assert all(int(row[2]) > 0 for row in found[:2])
    assert abs(int(found[1][2]) - int(found[0][2]) - int(found[2][2])) <= 1


@pytest.mark.slow  # starts seven servers
def test_throughput_and_a_death(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rows(monkeypatch, capsys, script, "throughput")
    assert [row[:2] for row in found] == [["1", "2"], ["2", "4"]] and found[0][3] == "1.00"
    ((_, n, whole, before, after, _),) = rows(monkeypatch, capsys, script, "killed")
    assert n == "12" and before == "0" and int(whole) + int(after) == 12
