"""`ik warmup`: compile the kernels a model needs, so that the first run starts at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ikcli.commands._app import register_run
from ikcli.config import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.planner import Planner


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    register_run(app, "warmup", run)


def run(config: RunConfig, planner: Planner) -> int:
    """Compile the kernels for the model and settings of `config`."""
    from ikcli.engine.session import warmup

    return warmup(config, planner)
