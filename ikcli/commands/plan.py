"""`ik plan` and `--dry-run`: placement and memory of a run, everything before its weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ikcli.commands._app import register_checked

if TYPE_CHECKING:
    from ikcli.engine.startup import Startup


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    register_checked(app, "plan", run)


def run(startup: Startup) -> int:
    """Print the plan; exit code 1 if the run does not fit."""
    from ikcli.engine.memory_plan import available_memory, make_plan, verdict_lines

    plan = make_plan(startup)
    free = available_memory()
    for line in verdict_lines(startup, plan, free):
        print(line)
    return int(free is not None and plan.total > free)
