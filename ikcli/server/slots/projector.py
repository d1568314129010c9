"""The projector of a served model: it reads the images of requests, and encodes those that the engine computes.

Rows of the images encoded last are kept by digest, so that a prompt which is computed again encodes nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ikcli.server.slots.pictures import Picture

if TYPE_CHECKING:
    from ikcli.engine.run.media import Media
    from ikcli.vision.decode import Tile
    from ikcli.vision.projector import Projector

_KEPT_BYTES = 256 << 20
"""Most memory for rows of images."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadPicture:
    """An image of a request or a tile of it, decoded; see `Picture`."""

    digest: str
    n_tokens: int
    n_positions: int
    pixels: Tile

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

    def read(self, data: bytes) -> list[str | Picture]:
        """Decode an image; raise IkError with a sentence if it cannot be read."""
        from ikcli.vision.decode import decode_image

        pieces = self._projector.pieces(decode_image(data))
        return [piece if isinstance(piece, str) else self._read(piece) for piece in pieces]

    def _read(self, tile: Tile) -> ReadPicture:
        projector = self._projector
        return ReadPicture(projector.digest(tile), projector.count(tile), projector.advance(tile), tile)

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
