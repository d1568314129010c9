"""Sequences over plain arrays: every row tells which text it was computed of, so what is lost or mixed up is seen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.saved_sequence import Checkpoint
from ikcli.engine.run.sequences import Sequences
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, Per

WINDOW, N_WINDOW = 7, 96
CELLS = Cache("k", 0, 2, GGMLType.F32)
TRANSPOSED = Cache("v", 0, 2, GGMLType.F32, transposed=True)
WINDOWS = Cache("k", 1, 2, GGMLType.F32, per=Per.WINDOW)
STATES = Cache("state", 2, 2, GGMLType.F32, per=Per.SEQUENCE)
Text = tuple[int, ...]


class Arrays:
    """The part of a runner that sequences use."""

    def __init__(self, caches: Sequence[Cache], n_cells: int, n_seq: int, n_window: int) -> None:
        self.rows = {c: np.zeros((c.rows(n_cells, n_seq, n_window), 8), np.uint8) for c in caches}

    def read_cells(self, cache: Cache, first: int, n: int) -> npt.NDArray[np.uint8]:
        assert not n or 0 <= first <= first + n <= len(self.rows[cache])
        rows = self.rows[cache][first : first + n]
        return rows.reshape(n, 2, 4).swapaxes(0, 1).reshape(2, -1) if cache.transposed else rows

    def write_cells(self, cache: Cache, first: int, rows: npt.NDArray[np.uint8]) -> None:
        if cache.transposed:
            rows = rows.reshape(2, -1, 4).swapaxes(0, 1).reshape(-1, 8)
        assert not len(rows) or 0 <= first <= first + len(rows) <= len(self.rows[cache])
        self.rows[cache][first : first + len(rows)] = rows

    def move_cells(self, cache: Cache, source: int, first: int, n: int) -> None:
        self.write_cells(cache, first, self.read_cells(cache, source, n).copy())


@lru_cache(64)
def prefixes(text: Text) -> npt.NDArray[np.uint64]:
    """A number for every beginning of a text."""
    found = [1]
    for token in text:
        found.append((found[-1] * 6364136223846793005 + token + 1) % 2**64)
    return np.array(found[1:], np.uint64)


def rows_of(cache: Cache, text: Text) -> npt.NDArray[np.uint8]:
    """What a model keeps of every token of a text."""
    return (prefixes(text) + np.uint64(cache.il)).view(np.uint8).reshape(-1, 8)


class Shelf:
    """Sequences and the texts that they should hold."""

    def __init__(
        self, *caches: Cache, n_ctx: int = 240, n_seq: int = 2, window: int = WINDOW, n_window: int = N_WINDOW
    ) -> None:
        self.arrays: Any = Arrays(caches, n_ctx * n_seq, n_seq, n_window)
        self.sequences = Sequences(self.arrays, caches, n_ctx * n_seq, n_seq, "00", window, n_window)
        self.n_window = n_window
        self.texts: list[Text] = [()] * n_seq
        self.window = window if self.sequences.has_windows else 1

    def add(self, seq: int, tokens: Sequence[int]) -> None:
        """Compute tokens, as a session does."""
        sequences, n = self.sequences, len(self.texts[seq])
        sequences.check_next(seq, n, len(tokens))
        at = sequences.room(seq, len(tokens))
        text = (*self.texts[seq], *tokens)
        for cache, rows in self.arrays.rows.items():
            new = rows_of(cache, text)[n:]
            if cache.per is Per.SEQUENCE:
                rows[seq] = new[-1]
            else:
                start = n + (at if cache.per is Per.WINDOW else seq * sequences.n_ctx)
                rows[start : start + len(new)] = new
        self.texts[seq] = text
        sequences.n_past[seq] = len(text)

    def truncate(self, seq: int, n: int) -> int:
        """Go back; returns how far."""
        kept = self.sequences.truncate(seq, n)
        self.holds(seq, self.texts[seq][:kept])
        return kept

    def checkpoint(self, seq: int, **kind: bool) -> Checkpoint:
        return self.sequences.checkpoint(seq, **kind)

    def first(self, seq: int) -> int:
        """The first position whose row of windows is there."""
        return seq * self.n_window - self.sequences.window_cell(seq)

    def holds(self, seq: int, text: Text) -> None:
        """Fails unless the sequence has all that the next token of this text needs."""
        self.texts[seq] = text
        n, sequences = len(text), self.sequences
        assert sequences.n_past[seq] == n
        for cache, rows in self.arrays.rows.items():
            wanted, places = rows_of(cache, text), np.arange(n) + seq * sequences.n_ctx
            if cache.per is Per.WINDOW:
                wanted, places = wanted[max(0, n - self.window + 1) :], np.arange(n) + sequences.window_cell(seq)
                places = places[n - len(wanted) :]
                assert (places // self.n_window == seq).all(), (seq, n)
            elif cache.per is Per.SEQUENCE:
                wanted, places = wanted[-1:], np.full(min(n, 1), seq)
            assert np.array_equal(rows[places], wanted), (cache, seq, n)
