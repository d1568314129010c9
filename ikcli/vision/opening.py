"""Open what the settings of a run name: the projector of a model, and images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ikcli.errors import IkError, UsageError
from ikcli.models import HParams
from ikcli.settings.run import RunConfig
from ikcli.vision.decode import MAX_BYTES, Picture, decode_image

if TYPE_CHECKING:
    from ikcli.vision.projector import Projector


def open_projector(config: RunConfig, hp: HParams) -> Projector | None:
    """Open the projector of the settings for a model; None without one."""
    vision = config.vision
    if vision.mmproj is None:
        return None
    if config.fleet.stages > 1:
        raise UsageError("--mmproj cannot be combined with --stages: a model in stages reads text only")
    from ikcli.vision.projector import Projector

    return Projector.open(
        vision.mmproj,
        hp,
        n_threads=max(config.n_threads, config.n_threads_batch),
        min_tokens=vision.image_min_tokens,
        max_tokens=vision.image_max_tokens,
    )


def needed_projector(config: RunConfig, hp: HParams) -> Projector:
    """Open the projector of a run with images; raise UsageError if none is named."""
    found = open_projector(config, hp)
    if found is None:
        raise UsageError("--image needs the projector of the model: --mmproj FILE")
    return found


def read_picture(path: Path) -> Picture:
    """Read an image of the command line; raise IkError with one sentence if that fails."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise IkError(f"--image {path}: {e.strerror or e}") from None
    return decode_image(data, f"--image {path}")
