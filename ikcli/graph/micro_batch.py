"""One micro-batch: its tokens, their sequences, and where the past of each lies in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MEDIA_AT, AXES, SEEN, VISUAL, PLACE_WORDS = 0, 1, 4, 6, 8  # words of a place, see `MicroBatch.places`


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one sequence in a micro-batch: tokens start..start+n_tokens-1 at positions pos.. of the sequence.

    The sequence's cells start at `cell`, its states are in row `seq`; after the micro-batch it has n_kv = pos +
    n_tokens cached positions. In window caches, position p is in cell `window_cell` + p as long as it is kept;
    `window_cell` is negative where the first positions have been dropped. Of an encoder-decoder, tokens and
    positions are those of the decoder, whose first one takes the cell of the encoder's last one; `window_cell` is that
    of the encoder's first one.
    """

    start: int
    n_tokens: int
    cell: int
    pos: int
    seq: int = 0
    window_cell: int = 0

    @property
    def n_kv(self) -> int:
        return self.pos + self.n_tokens

    @property
    def n_encoded(self) -> int:
        """Return the positions of the encoder."""
        return self.cell - self.window_cell + 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens, their positions and cells, by row; `outputs` are the rows whose logits are requested.

    `given`: rows that the caller provides (`HostRows`), one per token. `media`: rows of images. `places`, (n,
    PLACE_WORDS): the first number of the token's row in `media` (-1: none); time, row and column of its position; the
    first position and the end of those that it sees whatever the mask says; 1 where the visual experts of a model
    compute the token; then an unused word.
    """

    tokens: npt.NDArray[np.int32]
    pos: npt.NDArray[np.int32]
    cells: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    given: npt.NDArray[np.float32] | None = None
    media: npt.NDArray[np.float32] | None = None
    places: npt.NDArray[np.int32] | None = None

    def media_index(self) -> npt.NDArray[np.int32]:
        """Return the row of `media` of every token, -1 where it has none."""
        if self.places is None or self.media is None:
            return np.full(len(self.tokens), -1, np.int32)
        at = self.places[:, MEDIA_AT]
        return np.where(at < 0, -1, at // self.media.shape[1])

    def axis_positions(self) -> npt.NDArray[np.int32]:
        """Return time, row and column of every token."""
        return np.repeat(self.pos[:, None], 3, axis=1) if self.places is None else self.places[:, AXES : AXES + 3]

    def visual(self) -> npt.NDArray[np.bool_]:
        """Return whether visual experts compute a token."""
        if self.places is None:
            return np.zeros(len(self.tokens), np.bool_)
        return self.places[:, VISUAL] > 0

    def ranges(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the first position that every token sees whatever the mask says, and the end of these."""
        if self.places is None:
            return self.pos, self.pos + 1
        return self.places[:, SEEN], self.places[:, SEEN + 1]

    @property
    def kv_cells(self) -> npt.NDArray[np.int64]:
        """Return the cells of all cached positions of the sequences, in segment order."""
        return np.concatenate([np.arange(s.cell, s.cell + s.n_kv) for s in self.segments])

    @property
    def window_cells(self) -> npt.NDArray[np.int64]:
        """Return the cell of every token in window caches."""
        cells: npt.NDArray[np.int64] = self.pos.astype(np.int64)
        for s in self.segments:
            cells[s.start : s.start + s.n_tokens] += s.window_cell
        return cells
