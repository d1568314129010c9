"""`ik serve`: parse the options, check the model file, run ikcli.server.http.server."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from ikcli.commands._app import register_checked
from ikcli.commands.plan import run as run_plan

if TYPE_CHECKING:
    from ikcli.engine.startup import Startup


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    register_checked(app, "serve", run)


def run(startup: Startup) -> int:
    """Serve until a signal comes; returns the exit code."""
    if startup.config.dry_run:
        return run_plan(startup)
    from ikcli.server.http.server import serve

    return serve(replace(startup.config, command="serve"), startup.planner)
