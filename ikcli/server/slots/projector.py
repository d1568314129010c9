"""The projector of a served model: it reads the images of requests, and encodes those that the engine computes.

Rows of the images encoded last are kept by digest, so that a prompt which is computed again encodes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ikcli.errors import UsageError
from ikcli.server.slots.pictures import Picture
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.run.media import Media
    from ikcli.models import HParams
    from ikcli.vision.decode import Picture as Pixels
    from ikcli.vision.projector import Projector

_KEPT_BYTES = 256 << 20
"""Most memory for rows of images."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPicture:
    """An image of a request, decoded; see `Picture`."""

    digest: str
    n_tokens: int
    n_positions: int
    pixels: Pixels

    @property
    def n_bytes(self) -> int:
        """Return the bytes of its pixels."""
        return self.pixels.rgb.nbytes


class ServedProjector:
    """A projector in use; any thread may read images, and the engine's thread encodes them."""

    def __init__(self, projector: Projector) -> None:
        self._projector = projector
        self._kept: OrderedDict[str, Media] = OrderedDict()
        self.n_encoded = 0

    @property
    def begin(self) -> str:
        """Return the text before an image."""
        return self._projector.begin

    @property
    def end(self) -> str:
        """Return the text behind an image."""
        return self._projector.end

    def read(self, data: bytes) -> Picture:
        """Decode an image; raise IkError with a sentence if it cannot be read."""
        from ikcli.vision.decode import decode_image

        pixels = decode_image(data)
        projector = self._projector
        return ReadPicture(projector.digest(pixels), projector.count(pixels), projector.advance(pixels), pixels)

    def encode(self, picture: Picture) -> Media:
        """Return the rows of an image."""
        found = self._kept.get(picture.digest)
        if found is None:
            found = self._projector.encode(cast(ReadPicture, picture).pixels)
            self.n_encoded += 1
            self._kept[picture.digest] = found
            while len(self._kept) > 1 and sum(media.rows.nbytes for media in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(picture.digest)
        return found

    def close(self) -> None:
        """Free the projector's memory."""
        self._projector.close()
        self._kept.clear()


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
