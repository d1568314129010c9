"""`ik bench`: parse the options with their alternatives, run ikcli.eval.bench, return its exit code."""

from __future__ import annotations

from typing import Any

import typer

from ikcli.commands._app import add_run_command, checked, settings


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    def entry(ctx: typer.Context, **options: Any) -> None:
        parsed = settings("bench", ctx.obj)
        if parsed is None:
            return
        startup = checked(parsed)
        if startup.config.dry_run:
            from ikcli.commands.plan import run as run_plan

            raise typer.Exit(run_plan(startup))
        from ikcli.eval.bench import run_command

        raise typer.Exit(run_command(startup.config, parsed.alternatives, parsed.given, startup.planner))

    add_run_command(app, "bench", entry)
