"""One micro-batch: its tokens, their sequences, and where the past of each lies in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one sequence in a micro-batch: tokens start..start+n_tokens-1 at positions pos.. of the sequence.

    The sequence's cells start at `cell`, its states are in row `seq`; after the micro-batch it has n_kv = pos +
    n_tokens cached positions. In window caches, position p is in cell `window_cell` + p as long as it is kept;
    `window_cell` is negative where the first positions have been dropped.
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens, their positions and cells, by row; `outputs` are the rows whose logits are requested.

    `given`: rows that the caller provides (`HostRows`), one per token.
    """

    tokens: npt.NDArray[np.int32]
    pos: npt.NDArray[np.int32]
    cells: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    given: npt.NDArray[np.float32] | None = None

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
