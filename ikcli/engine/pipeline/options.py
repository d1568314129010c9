"""The place of a stage in the pipeline, as the driver tells it to the process of the stage."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.engine.plan.sizes import Sizes
from ikcli.settings.run import RunConfig

LARGE = 1 << 18
"""Bytes of a micro-batch from which on it is sent and received beside the computation."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """A stage: the settings of the run and its place in it, where the driver listens, and the secret of the run."""

    config: RunConfig
    sizes: Sizes
    cuts: tuple[int, ...]
    index: int
    digest: str
    driver: tuple[str, int]
    secret: str
    host: str  # where it listens itself
