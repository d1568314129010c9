"""`ik plan` and `--dry-run`: placement and memory of a run, up to reading its weights."""

from __future__ import annotations

import contextlib
import sys

from ikcli.cli.parser import ModelRun
from ikcli.engine.plan.memory_plan import plan_lines, verdict_lines
from ikcli.engine.plan.planner import MIB
from ikcli.engine.run.session_log import model_lines
from ikcli.log import warn
from ikcli.vision.opening import planned_projector


def run(run: ModelRun) -> int:
    """Print the plan; return exit code 1 if the run does not fit."""
    planner = run.planner
    with contextlib.redirect_stderr(sys.stdout):  # the lines of the loader are part of the result here
        model_lines(planner.file, planner.hp, run.config)
    for warning in planner.warnings(run.config):
        warn(warning)
    plan = planner.plan(run.config)
    projector = planned_projector(run.config, planner.hp, planner.machine)
    lines = []
    if projector is not None:
        device, used = max(projector.memory().items(), key=lambda item: item[1]["projector"])
        lines = [
            f"projector: {projector.type} on {device}, {used['projector'] / MIB:.2f} MiB, and "
            f"{used['images'] / MIB:.2f} MiB for an image (or a tile of one) of {projector.most_tokens} tokens, its "
            "largest"
        ]
    for line in [*plan_lines(planner, plan), *lines, *verdict_lines(planner, plan)]:
        print(line)
    return int(not plan.memory.fits())
