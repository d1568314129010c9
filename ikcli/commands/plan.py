"""`ik plan` and `--dry-run`: placement and memory of a run, everything before its weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ikcli.commands._app import register_checked
from ikcli.log import warn

if TYPE_CHECKING:
    from ikcli.engine.startup import Startup


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    register_checked(app, "plan", run)


def run(startup: Startup) -> int:
    """Print the plan; exit code 1 if the run does not fit."""
    from ikcli.engine.memory_plan import plan_lines, print_model, verdict_lines

    planner = startup.planner
    print_model(planner, startup.config)
    for warning in planner.warnings(startup.config):
        warn(warning)
    plan = planner.plan(startup.config)
    for line in [*plan_lines(planner, plan), *verdict_lines(planner, plan)]:
        print(line)
    return int(not plan.memory.fits())
