"""Images in a batch: embeddings that take the place of tokens, and the positions and masks that go with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatRows = npt.NDArray[np.float32]


class Span(NamedTuple):
    """Cells of a sequence that an image takes: n from `first` on, after which positions have moved on by `advance`."""

    first: int
    n: int
    advance: int


@dataclass(frozen=True, slots=True, eq=False)
class Media:
    """An encoded image.

    rows: (n, width) float32, the embedding and then the rows that deeper layers add (deepstack) of every token. digest:
    what the image is known by; equal digests have equal rows. grid: rows and columns of tokens for models whose
    positions have sections (M-RoPE), (0, 0) for others. both: tokens of the image see each other in both directions.
    framed: the first and the last token have positions of their own and the others share one; visual experts compute
    all but the last.
    """

    rows: FloatRows
    digest: str
    grid: tuple[int, int] = (0, 0)
    both: bool = False
    framed: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def advance(self) -> int:
        """Return by how much the position of what follows is larger than that of the image."""
        return advance_of(len(self.rows), self.grid, self.framed)

    @property
    def token(self) -> int:
        """Return the id that stands for the image in lists of tokens: negative, and its own up to collisions."""
        return token_of(self.digest)

    def positions(self, first: int, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return (time, row, column) of tokens start..stop-1 of an image that begins at position `first`."""
        if not self.grid[1]:
            at = np.arange(start, stop, dtype=np.int32)
            if self.framed:
                at = np.minimum(at, 1) + (at == len(self.rows) - 1)
            return np.repeat((first + at).astype(np.int32)[:, None], 3, axis=1)
        row, column = np.divmod(np.arange(start, stop, dtype=np.int32), np.int32(self.grid[1]))
        return np.stack([np.zeros_like(row), row, column], axis=1) + np.int32(first)


def advance_of(n_rows: int, grid: tuple[int, int], framed: bool) -> int:
    """Return `Media.advance` of an image of so many rows."""
    return 3 if framed else max(grid) or n_rows


def token_of(digest: str) -> int:
    """Return the negative token id that stands for an image with this digest."""
    return -1 - (int(digest[:8], 16) & 0x3FFFFFFF)


class Placed(NamedTuple):
    """An image in a batch: its first token is at index `start`, which is negative where earlier batches began it."""

    start: int
    media: Media


def spans_of(images: Iterable[Placed]) -> tuple[Span, ...]:
    """Return the spans of the images of a whole prompt."""
    return tuple(Span(start, len(media), media.advance) for start, media in images)
