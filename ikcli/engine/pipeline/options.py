"""The options of a stage, which the driver sends to its process."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.engine.plan.sizes import Sizes
from ikcli.settings.run import RunConfig

LARGE = 1 << 18
"""Bytes from which a micro-batch is sent and received while another one is computed."""


@dataclass(frozen=True, slots=True)
class StageOptions:
    """A stage: the settings of the run, its place in the pipeline, the driver's address, and the secret of the run."""

    config: RunConfig
    sizes: Sizes
    split_points: tuple[int, ...]
    index: int
    digest: str
    driver: tuple[str, int]
    secret: str
    host: str  # the host on which it listens
