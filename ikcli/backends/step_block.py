"""The step block: the data that changes with every micro-batch, at fixed addresses that programs know.

16 words, then arrays. Words 0..3 are the numbers of tokens, outputs, cached positions and segments. Words 4..12 are
the addresses of: tokens and positions (int32), cells and output rows (int64), segments (SEG_WORDS each), cells of all
cached positions, sequences of the segments, and for window caches the cells of the tokens and the (possibly virtual)
cell of position 0 of every segment (int64). Word 13 is the address of float32 rows that the caller provides, one per
token, for programs that read them. Words 14 and 15 are the addresses of places (PLACE_WORDS int32 per token) and of
rows of images; sessions without images leave both empty. Kernels read the block by the names in
backends/cpu/kernels/common.py, state_rows.py and cell_places.py, and backends/cuda/kernels/common.cuh and states.cuh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import add
from struct import Struct

import numpy as np
import numpy.typing as npt

from ikcli.backends.memory import aligned_zeros
from ikcli.graph import Rows
from ikcli.graph.micro_batch import PLACE_WORDS, SEEN, Segment

STATE_INDEX = {Rows.TOKENS: 0, Rows.OUTPUTS: 1, Rows.KV: 2}
_KV_CELLS = 5  # among the arrays
SEG_WORDS = 6  # of a segment: first token, tokens, first cell, position, first compact row, cached positions

_pack_counts: Callable[..., None] = Struct("4q").pack_into


@cache
def _packers(n: int) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Return writers of n int32, n int64 and n segments, which store a few numbers faster than NumPy does."""
    return Struct(f"{n}i").pack_into, Struct(f"{n}q").pack_into, Struct(f"{SEG_WORDS * n}q").pack_into


class StepBlock:
    """The step block of a session, sized for the largest micro-batch; see the module."""

    def __init__(self, n_tokens: int, n_cells: int, media_cols: int = 0) -> None:
        self._words = aligned_zeros(8 * 16).view(np.int64)
        self._tokens = np.zeros(n_tokens, np.int32)
        self._pos = np.zeros(n_tokens, np.int32)
        self._cells = np.zeros(n_tokens, np.int64)
        self._out_ids = np.zeros(n_tokens, np.int64)
        self._segments = np.zeros((n_tokens, SEG_WORDS), np.int64)
        self._kv_cells = np.zeros(n_cells, np.int64)
        self._seqs = np.zeros(n_tokens, np.int64)
        self._window_cells = np.zeros(n_tokens, np.int64)
        self._windows = np.zeros(n_tokens, np.int64)
        self._count = np.arange(n_cells)
        arrays = (self._tokens, self._pos, self._cells, self._out_ids, self._segments, self._kv_cells, self._seqs,
                  self._window_cells, self._windows)  # fmt: skip
        self._words[4:13] = [a.ctypes.data for a in arrays]
        n_media = n_tokens if media_cols else 0
        self._places = np.zeros((n_media, PLACE_WORDS), np.int32)
        self._media = np.zeros((n_media, media_cols), np.float32)
        self._words[14:] = self._places.ctypes.data, self._media.ctypes.data
        self.media_cols = media_cols
        self.given = np.zeros((0, 0), np.float32)  # rows that the caller provided last
        self.ranged = False  # a token sees more than the positions up to its own, whatever the mask says
        self.address: int = self._words.ctypes.data
        self._rows: dict[Rows, int] | None = None
        self._step_of: tuple[Sequence[int], int] = (), 0  # sequences and their cells of the last step
        self._step_cells: list[int] = []
        self.n_segments = 0

    @property
    def rows(self) -> dict[Rows, int]:
        """Return the numbers of rows; computed on demand, which the CPU alone never needs."""
        if self._rows is None:
            n, n_outputs, n_kv = self._words[:3].tolist()
            self._rows = {Rows.TOKENS: n, Rows.OUTPUTS: n_outputs, Rows.KV: n_kv}
        return self._rows

    @property
    def out_ids(self) -> npt.NDArray[np.int64]:
        """Return the tokens whose logits are wanted; valid until the next micro-batch is written."""
        return self._out_ids[: int(self._words[1])]

    def set(
        self,
        tokens: npt.NDArray[np.int32],
        pos: npt.NDArray[np.int32],
        out_ids: npt.NDArray[np.int64],
        segments: Sequence[Segment],
    ) -> None:
        """Write a micro-batch."""
        n, n_kv = len(tokens), 0
        self._tokens[:n], self._pos[:n] = tokens, pos
        self._out_ids[: len(out_ids)] = out_ids
        for i, s in enumerate(segments):
            self._cells[s.start : s.start + s.n_tokens] = self._count[s.cell + s.pos : s.cell + s.n_kv]
            self._window_cells[s.start : s.start + s.n_tokens] = self._count[s.pos : s.n_kv] + s.window_cell
            self._segments[i] = s.start, s.n_tokens, s.cell, s.pos, n_kv, s.n_kv
            self._seqs[i], self._windows[i] = s.seq, s.window_cell
            self._kv_cells[n_kv : n_kv + s.n_kv] = self._count[s.cell : s.cell + s.n_kv]
            n_kv += s.n_kv
        self._words[:4] = n, len(out_ids), n_kv, len(segments)
        self.n_segments = len(segments)
        self._rows, self._step_of, self.ranged = None, ((), 0), False

    def set_media(self, places: npt.NDArray[np.int32], rows: Sequence[npt.NDArray[np.float32]] = ()) -> None:
        """Write the places of all tokens, and the rows of images that these name (see `MicroBatch`)."""
        self._places[: len(places)] = places
        pos = self._pos[: len(places)]
        self.ranged = bool(((places[:, SEEN] < pos) | (places[:, SEEN + 1] > pos + 1)).any())
        at = 0
        for part in rows:
            self._media[at : at + len(part), : part.shape[1]] = part
            at += len(part)

    def give(self, rows: npt.NDArray[np.float32]) -> None:
        """Provide a row per token of this micro-batch; the array must stay in place until it was computed."""
        assert rows.dtype == np.float32 and rows.flags.c_contiguous
        self.given = rows
        self._words[13] = rows.ctypes.data

    def set_step(
        self,
        tokens: Sequence[int],
        pos: Sequence[int],
        seqs: Sequence[int],
        n_ctx: int,
        n_outputs: int,
        windows: Sequence[int] = (),
    ) -> None:
        """Write a micro-batch of one token for each of these sequences of n_ctx cells; `windows`: see `Segment`.

        Only for generation programs: those never read the cache as compact rows, so `kv_cells` stays as it is.
        """
        n, n_kv = len(tokens), 0
        ints, longs, segments = _packers(n)
        if self._step_of != (seqs, n_ctx):
            self._step_of, self._step_cells = ([*seqs], n_ctx), [n_ctx * seq for seq in seqs]
            longs(self._seqs, 0, *seqs)
            longs(self._out_ids, 0, *range(n))
        cells = self._step_cells
        words: list[int] = []
        for i, p in enumerate(pos):
            words += (i, 1, cells[i], p, n_kv, p + 1)
            n_kv += p + 1
        ints(self._tokens, 0, *tokens)
        ints(self._pos, 0, *pos)
        longs(self._cells, 0, *map(add, cells, pos))
        if windows:
            longs(self._windows, 0, *windows)
            longs(self._window_cells, 0, *map(add, windows, pos))
        segments(self._segments, 0, *words)
        _pack_counts(self._words, 0, n, n_outputs, n_kv, n)
        self.n_segments = n
        self._rows, self.ranged = None, False

    def spread(self, pos: npt.NDArray[np.int64], cell: int) -> None:
        """Store the tokens of `set_step` at positions of their own, though they see as far as was said there."""
        n = len(pos)
        self._pos[:n], self._cells[:n] = pos, cell + pos
        self._step_of = (), 0

    def packed(self) -> list[npt.NDArray[np.generic]]:
        """Return views from which `unpack` restores the micro-batch, without the cells of all positions."""
        words, *arrays = self.arrays()
        del arrays[_KV_CELLS]  # they follow from the segments
        return [words[:4], *arrays]

    def unpack(self, data: memoryview, *, compact: bool) -> int:
        """Copy a packed micro-batch and return the bytes read. `compact`: a program reads the cache as compact rows."""
        n, n_out, n_kv, n_segments = (int(x) for x in np.frombuffer(data, np.int64, 4))
        self._words[:4] = n, n_out, n_kv, n_segments
        self.n_segments = n_segments
        self._rows, self._step_of = None, ((), 0)
        at = 32
        _, *arrays = self.arrays()
        for i, array in enumerate(arrays):
            if i != _KV_CELLS:
                array[...] = np.frombuffer(data, array.dtype, array.size, at).reshape(array.shape)
                at += array.nbytes
        if compact:
            for _, _, cell, _, first, count in self._segments[:n_segments].tolist():
                self._kv_cells[first : first + count] = self._count[cell : cell + count]
        return at

    @property
    def places(self) -> npt.NDArray[np.int32]:
        """Return the places of the tokens of this micro-batch."""
        return self._places[: int(self._words[0])]

    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Return the words, then the arrays they point to, as far as this micro-batch uses them."""
        n, n_out, n_kv, n_segments = (int(x) for x in self._words[:4])
        return (self._words, self._tokens[:n], self._pos[:n], self._cells[:n], self._out_ids[:n_out],
                self._segments[:n_segments], self._kv_cells[:n_kv], self._seqs[:n_segments],
                self._window_cells[:n], self._windows[:n_segments])  # fmt: skip
