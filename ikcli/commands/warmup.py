"""`ik warmup`: compile the kernels a model needs, so that the first run starts at once."""

from __future__ import annotations

from ikcli.commands._options import ModelRun
from ikcli.engine.session import warmup


def run(run: ModelRun) -> int:
    """Compile the kernels for the model and settings."""
    warmup(run.config, run.planner)
    return 0
