"""The script that measures divided work: shares of a core, a run with one and two workers, costs of tasks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import load

from ikcli.fleet.executor import LocalExecutor


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("fleet")


def test_a_share_of_a_core(script: ModuleType) -> None:
    governor = script.Governor(0.02)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            governor.tick([busy.pid])
            started, before, n_stopped = time.monotonic(), script.cpu_seconds(busy.pid), 0
            while time.monotonic() - started < 1.5 or not n_stopped:
                governor.tick([busy.pid])
                n_stopped += len(governor._stopped)
                time.sleep(0.01)
            used = script.cpu_seconds(busy.pid) - before
            assert used < 0.02 * (time.monotonic() - started) + 0.3
            governor.release()
            assert not governor._stopped
        finally:
            busy.kill()


@pytest.mark.slow  # a whole measurement, in processes
def test_two_workers_and_costs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["quantize-stats", "--rows", "16", "--types", "q8_0", "-l", "blk.0.attn"]
    monkeypatch.setattr(script, "COMMANDS", {"quantize-stats": lambda room, long: words})
    monkeypatch.setattr(sys, "argv", ["fleet.py", "--workers", "1,2", "--share", "4", "--tasks", "0"])
    script.main()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["quantize-stats", "1"], ["quantize-stats", "2"]]
    assert rows[0][2] == rows[1][2] != "0" and rows[0][4] == "1.00" and float(rows[1][4]) > 0
    assert script.cost(LocalExecutor(), 100, 5, tmp_path) > 0 and not list(tmp_path.iterdir())
