"""`ik perplexity`."""

from __future__ import annotations

from ikcli.commands._options import ModelRun
from ikcli.eval.perplexity import run_command


def run(run: ModelRun) -> int:
    """Run with these settings."""
    return run_command(run.config, run.planner)
