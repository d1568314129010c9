"""A run is prepared once: the header is read once, and what --dry-run reports is what the session allocates."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from factories import tiny_model
from gguf_files import write_model

from ikcli.engine.plan import planner as planner_module
from ikcli.engine.plan.model_rules import check_ser
from ikcli.engine.run.session import Session
from ikcli.main import main
from ikcli.settings.run import RunConfig

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


def test_ser_with_as_many_experts_as_are_used_is_dropped() -> None:
    """Recipes are shared between models; what is used is said, and nothing else changes."""
    for k_min, n_expert, n_used, words in (
        (7, 8, 6, "-ser 7,1 has no effect: each token uses all 6 experts"),
        (6, 8, 6, "-ser 6,1 has no effect: each token uses all 6 experts"),
        (6, 0, 0, "-ser 6,1 has no effect: the model has no experts"),
    ):
        config, warnings = check_ser(RunConfig(ser=(k_min, 1.0)), n_expert, n_used)
        assert config.ser is None and warnings[0].startswith(words) and len(warnings) == 1
    fewer = RunConfig(ser=(5, 0.4))
    assert check_ser(fewer, 8, 6) == (fewer, []) and check_ser(RunConfig(), 8, 6) == (RunConfig(), [])


def test_ser_beyond_the_experts_of_a_model_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tiny_model("qwen3moe", expert_count=8, expert_used_count=3, expert_feed_forward_length=48),
                       tmp_path / "m.gguf")  # fmt: skip
    assert main(["plan", "-m", str(path), "-ser", "7,1", "-c", "64"]) == 0
    assert "warning: -ser 7,1 has no effect: each token uses all 3 experts" in capsys.readouterr().err
