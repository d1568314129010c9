"""`ik plan` and `--dry-run`: placement and memory of a run, up to reading its weights."""

from __future__ import annotations

import contextlib
import sys

from ikcli.cli.parser import ModelRun
from ikcli.engine.plan.memory_plan import plan_lines, verdict_lines
from ikcli.engine.run.session_log import model_lines
from ikcli.log import warn


def run(run: ModelRun) -> int:
    """Print the plan; return exit code 1 if the run does not fit."""
    planner = run.planner
    with contextlib.redirect_stderr(sys.stdout):  # the lines of the loader are part of the result here
        model_lines(planner.file, planner.hp, run.config)
    for warning in planner.warnings(run.config):
        warn(warning)
    plan = planner.plan(run.config)
    for line in [*plan_lines(planner, plan), *verdict_lines(planner, plan)]:
        print(line)
    return int(not plan.memory.fits())
