"""`ik sweep-bench`."""

from __future__ import annotations

from ikcli.commands._options import ModelRun
from ikcli.eval.sweep_bench import run_command


def run(run: ModelRun) -> int:
    """Run with these settings."""
    return run_command(run.config, run.planner)
