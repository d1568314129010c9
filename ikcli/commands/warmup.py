"""`ik warmup`: compile the kernels a model needs, so that the first run starts at once."""

from __future__ import annotations

import typer

from ikcli.commands._app import register_run
from ikcli.config import RunConfig


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    register_run(app, "warmup", run)


def run(config: RunConfig) -> int:
    """Compile the kernels for the model and settings of `config`."""
    from ikcli.engine.session import warmup

    return warmup(config)
