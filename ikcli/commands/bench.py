"""`ik bench`."""

from __future__ import annotations

from ikcli.commands._options import ModelRun
from ikcli.eval.bench import run_command


def run(run: ModelRun) -> int:
    """Run with these settings and their alternatives."""
    return run_command(run.config, run.alternatives, run.given, run.planner)
