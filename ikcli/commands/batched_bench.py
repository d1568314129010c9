"""`ik batched-bench`: parse the options, run ikcli.eval.batched_bench, return its exit code."""

from __future__ import annotations

import typer

from ikcli.commands._app import register_run
from ikcli.config import RunConfig


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    register_run(app, "batched-bench", run)


def run(config: RunConfig) -> int:
    """Run with these settings; the engine is imported here, so that --help never loads it."""
    from ikcli.eval.batched_bench import run_command

    return run_command(config)
