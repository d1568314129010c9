"""Images in prompts. Every position of an image has a key below 0 in place of a token id.

Keys follow from the image's digest and the position in the image. Equal keys therefore mean equal images, and all that
compares prompts (slots, prompt cache, checkpoints, files) works with images too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ikcli.engine.run.media import Span


class Picture(Protocol):
    """An image that was read and resized, or one tile of it.

    `n_tokens`: rows of its embedding, each of which takes a cell of the cache. `n_positions`: by how much the position
    of the text behind it is larger. `n_bytes`: memory of its pixels.
    """

    @property
    def digest(self) -> str: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_positions(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...


class PictureReader(Protocol):
    """The part of a projector that the HTTP side uses, from any thread."""

    def read(self, data: bytes) -> Sequence[str | Picture]:
        """Decode and resize an image; raise IkError with a sentence if it cannot be read.

        Return what it becomes in a prompt: tiles, and texts around them such as `<|vision_start|>`, in which special
        tokens count.
        """


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """An image at position `start` of a prompt."""

    start: int
    picture: Picture

    @property
    def stop(self) -> int:
        """Return the position after the image."""
        return self.start + self.picture.n_tokens


def keys_of(picture: Picture) -> tuple[int, ...]:
    """Return the keys of an image's positions, all below 0."""
    data = hashlib.shake_128(picture.digest.encode()).digest(4 * picture.n_tokens)
    return tuple((np.frombuffer(data, np.int32) | np.int32(-(2**31))).tolist())


def tokens_of(prompt: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt, without images."""
    return [token for token in prompt if token >= 0]


def whole_pictures(placed: Sequence[PlacedPicture], n: int) -> int:
    """Return the most positions up to n that end in no image: an image is computed as a whole."""
    return next((one.start for one in placed if one.start < n < one.stop), n)


def spans_of(placed: Sequence[PlacedPicture], n: int) -> list[Span]:
    """Return the images among the first n positions."""
    return [Span(one.start, one.picture.n_tokens, one.picture.n_positions) for one in placed if one.stop <= n]
