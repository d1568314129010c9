"""A run is prepared once: the header is read once, and what --dry-run reports is what the session allocates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ikcli.engine.plan import planner as planner_module
from ikcli.engine.run.session import Session
from ikcli.main import main

TEXT = "import os\nimport sys\n" * 160
COMMANDS = {
    "perplexity": ["-f", "TEXT", "-c", "64", "--chunks", "2", "-b", "128"],
    "perplexity --ppl-stride": ["-f", "TEXT", "-c", "64", "--chunks", "2", "--ppl-stride", "16", "-b", "64"],
    "imatrix": ["-f", "TEXT", "-c", "64", "--chunks", "2", "-o", "OUT"],
    "sweep-bench": ["-c", "256", "-ub", "64", "-np", "4"],
    "bench": ["-p", "40", "-n", "4", "-pg", "30,20", "-r", "1"],
    "batched-bench": ["-npp", "20", "-ntg", "3", "-npl", "1,5"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_plans_what_it_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    places = {"TEXT": str(tmp_path / "text.txt"), "OUT": str(tmp_path / "imatrix.dat")}
    argv = [command.split()[0], *(places.get(x, x) for x in COMMANDS[command]), "-t", "1"]
    opened: list[Path] = []
    sessions: list[tuple[int, int, int, dict[str, dict[str, int]]]] = []
    real_open, real_load = planner_module.open_gguf, Session.load

    def count(path: Path, *args: object, **more: object) -> object:
        opened.append(path)
        return real_open(path, *args, **more)  # type: ignore[arg-type]

    def load(session: Session) -> None:
        sessions.append((session.n_ctx, session.n_seq_max, session.n_step, session.memory()))
        real_load(session)

    monkeypatch.setattr(planner_module, "open_gguf", count)
    monkeypatch.setattr(Session, "load", load)
    assert main([*argv, "--dry-run"]) == 0
    planned = capsys.readouterr().out
    assert not sessions and len(opened) == 1
    assert main(argv) == 0
    logged = capsys.readouterr().err
    assert len(opened) == 2 and len(sessions) == 1, "one reading of the header for each of the two runs"
    total = re.compile(r"CPU TOTAL = .*")
    assert total.findall(planned)[0].split(" of ")[0].split(",")[0] == total.findall(logged)[0].split(",")[0]
    assert re.findall(r"KV self size .*", planned) == re.findall(r"KV self size .*", logged)
