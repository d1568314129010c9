"""`ik batched-bench`: parse the options, run ikcli.eval.batched_bench, return its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ikcli.commands._app import register_run
from ikcli.config import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.planner import Planner


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    register_run(app, "batched-bench", run)


def run(config: RunConfig, planner: Planner) -> int:
    """Run with these settings; the engine is imported here, so that --help never loads it."""
    from ikcli.eval.batched_bench import run_command

    return run_command(config, planner)
