"""What a session holds of its sequences: cached positions and states, and how to go back, take out, put in and copy.

Cache tensors are of two kinds. Cells, one per position: sequence s owns cells s*n_ctx .. (s+1)*n_ctx-1, and a sequence
can be cut at any position. States, one row per sequence (recurrent layers): there is only that of the last position, so
a sequence can go back to its checkpoints only, or to its beginning, where states are zero whatever is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.engine.runner import Runner
from ikcli.errors import IkError
from ikcli.gguf.constants import TYPE_TRAITS, row_n_bytes
from ikcli.graph import Cache, Per

Bytes = npt.NDArray[np.uint8]
MOST_CHECKPOINTS = 8  # of a sequence


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """States of a sequence after its first n_tokens positions: a row (1, bytes) per tensor of states."""

    n_tokens: int
    parts: tuple[Bytes, ...] = ()

    @property
    def n_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts)


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """Positions 0..n_tokens-1 of a sequence as plain arrays that fit every session of the same `layout`.

    One part per tensor of cells: (n_tokens, row bytes), or (columns, n_tokens * element bytes) of a transposed one.
    """

    n_tokens: int
    parts: tuple[Bytes, ...]
    checkpoints: tuple[Checkpoint, ...] = ()
    has_states: bool = False

    def reach(self, n: int) -> int:
        """The most positions, up to n, that a sequence can have after `load`."""
        return _nearest(self.checkpoints, n) if self.has_states else min(n, self.n_tokens)

    @property
    def n_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts) + sum(c.n_bytes for c in self.checkpoints)


class Sequences:
    """See the module. `n_past`: cached positions of each sequence; the session that computes moves them on."""

    def __init__(self, runner: Runner, caches: Iterable[Cache], n_cells: int, n_seq: int, rotated: str) -> None:
        """`rotated`: what is done to rows before they are stored, part of the layout."""
        ordered = sorted(caches, key=lambda c: (c.il, c.kind))
        self._runner, self._n_cells, self._n_rows, self._rotated = runner, n_cells, n_seq, rotated
        self._cells = [c for c in ordered if c.per is Per.CELL]
        self._states = [c for c in ordered if c.per is Per.SEQUENCE]
        self.n_past: list[int] = []
        self._checkpoints: list[list[Checkpoint]] = []
        self._passing: list[int] = []
        self.divide(n_seq)

    # --- how many, how long -----------------------------------------------------------------------------------------
    @property
    def has_states(self) -> bool:
        """Whether sequences cannot be cut anywhere."""
        return bool(self._states)

    def divide(self, n_seq: int) -> None:
        """Forget everything and divide the cache evenly between n_seq sequences from now on."""
        most = self._n_rows if self._states else self._n_cells
        if not 1 <= n_seq <= most:
            what = "states are for" if self._states else "cache of"
            raise IkError(f"a {self._n_cells}-token cache cannot be divided between {n_seq} sequences: {what} {most}")
        self.n_seq, self.n_ctx = n_seq, self._n_cells // n_seq
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.n_past = [0] * self.n_seq
        self._checkpoints = [[] for _ in range(self.n_seq)]
        self._passing = [-1] * self.n_seq

    # --- going back -------------------------------------------------------------------------------------------------
    def reach(self, seq: int, n: int) -> int:
        """The most positions, up to n, that `truncate` can keep."""
        self._check(seq)
        if n >= self.n_past[seq]:
            return self.n_past[seq]
        return _nearest(self._checkpoints[seq], n) if self._states else max(n, 0)

    def truncate(self, seq: int, n: int) -> int:
        """Forget positions from n on; returns how many are left.

        That is n where a sequence can be cut anywhere, else the nearest checkpoint before: the caller computes what is
        between again.
        """
        kept = self.reach(seq, n)
        if kept < self.n_past[seq]:
            self._checkpoints[seq] = [c for c in self._checkpoints[seq] if c.n_tokens <= kept]
            if self._states and kept:
                self._put_states(seq, self._checkpoints[seq][-1])
        self.n_past[seq] = kept
        return kept

    def checkpoint(self, seq: int, *, passing: bool = False) -> Checkpoint:
        """Remember where a sequence is, so that `truncate` can return there.

        Costs nothing where a sequence can be cut anywhere. The oldest of `MOST_CHECKPOINTS` goes first; a `passing` one
        (before a guess, say) is replaced by the next passing one.
        """
        self._check(seq)
        if not self._states:
            return Checkpoint(self.n_past[seq])
        n, known = self.n_past[seq], self._checkpoints[seq]
        if passing and self._passing[seq] != n:
            known[:] = [c for c in known if c.n_tokens != self._passing[seq]]
        if not known or known[-1].n_tokens != n:
            known.append(Checkpoint(n, self._states_of(seq)))
            self._passing[seq] = n if passing else self._passing[seq]
        elif not passing and self._passing[seq] == n:
            self._passing[seq] = -1  # it stays
        del known[:-MOST_CHECKPOINTS]
        return known[-1]

    def restore(self, seq: int, checkpoint: Checkpoint) -> None:
        """Bring a sequence back to where it was; IkError if it was shorter since then."""
        if self.reach(seq, checkpoint.n_tokens) != checkpoint.n_tokens:
            raise IkError(f"sequence {seq} cannot go back to {checkpoint.n_tokens} positions: this part was forgotten")
        self.truncate(seq, checkpoint.n_tokens)

    # --- elsewhere --------------------------------------------------------------------------------------------------
    def layout(self) -> list[str]:
        """One line per tensor: equal lists mean that saved sequences can be exchanged."""
        cells = [
            f"{c.kind}-{c.il} {c.cols} {TYPE_TRAITS[c.type].name} {'transposed' if c.transposed else 'rows'} "
            f"{self._rotated}"
            for c in self._cells
        ]
        return cells + [f"{c.kind}-{c.il} {c.cols} {TYPE_TRAITS[c.type].name} state" for c in self._states]

    def shapes(self, n_tokens: int) -> list[tuple[int, int]]:
        """Shapes of the parts of n positions."""
        return [
            (c.cols, n_tokens * _element(c)) if c.transposed else (n_tokens, row_n_bytes(c.type, c.cols))
            for c in self._cells
        ]

    def state_shapes(self) -> list[tuple[int, int]]:
        """Shapes of the parts of a checkpoint."""
        return [(1, row_n_bytes(c.type, c.cols)) for c in self._states]

    def save(self, seq: int, n_tokens: int) -> SavedSequence:
        """A copy of the first n_tokens positions of a sequence."""
        self._check(seq, n_tokens)
        parts = tuple(self._read(c, seq, 0, n_tokens).copy() for c in self._cells)
        return SavedSequence(n_tokens, parts, self._known(seq, n_tokens), self.has_states)

    def load(self, seq: int, saved: SavedSequence, n_tokens: int | None = None) -> int:
        """Replace a sequence by the first n_tokens (default all) of a saved one; returns how many it then has."""
        n = saved.n_tokens if n_tokens is None else n_tokens
        self._check(seq)
        if not 0 <= n <= min(saved.n_tokens, self.n_ctx):
            raise IkError(f"{n} cached tokens do not fit sequence {seq}, whose context is {self.n_ctx}; raise -c")
        fits = [p.shape for p in saved.parts] == self.shapes(saved.n_tokens)
        fits = fits and saved.has_states == self.has_states
        if not fits or any([p.shape for p in c.parts] != self.state_shapes() for c in saved.checkpoints):
            raise IkError("cache rows of another model or cache type cannot be used")
        for cache, part in zip(self._cells, saved.parts, strict=True):
            self._write(cache, seq, 0, part[:, : n * _element(cache)] if cache.transposed else part[:n])
        return self._arrive(seq, n, saved.checkpoints)

    def copy(self, src: int, dst: int, first: int, n_tokens: int) -> int:
        """Give `dst` the positions of `src` up to n_tokens; returns how many it then has.

        What comes before `first` must be equal in both already.
        """
        self._check(src, n_tokens)
        known, own = self._known(src, n_tokens), self.reach(dst, first)
        if self._states and own >= _nearest(known, n_tokens):
            return self.truncate(dst, own)
        for cache in self._cells:
            self._write(cache, dst, first, self._read(cache, src, first, n_tokens - first))
        return self._arrive(dst, n_tokens, known)

    def _known(self, seq: int, n: int) -> tuple[Checkpoint, ...]:
        """Checkpoints among the first n positions, the present state included."""
        if not self._states:
            return ()
        known = [c for c in self._checkpoints[seq] if c.n_tokens <= n]
        if n and n == self.n_past[seq] and (not known or known[-1].n_tokens < n):
            known.append(Checkpoint(n, self._states_of(seq)))
        return tuple(known)

    def _arrive(self, seq: int, n: int, known: Sequence[Checkpoint]) -> int:
        """A sequence now has n cells with these checkpoints."""
        self._checkpoints[seq] = [c for c in known if c.n_tokens <= n][-MOST_CHECKPOINTS:]
        self._passing[seq] = -1
        if self._states:
            n = _nearest(self._checkpoints[seq], n)
            if n:
                self._put_states(seq, self._checkpoints[seq][-1])
        self.n_past[seq] = n
        return n

    # --- memory -----------------------------------------------------------------------------------------------------
    def _states_of(self, seq: int) -> tuple[Bytes, ...]:
        return tuple(self._runner.read_cells(c, seq, 1).copy() for c in self._states)

    def _put_states(self, seq: int, checkpoint: Checkpoint) -> None:
        for cache, part in zip(self._states, checkpoint.parts, strict=True):
            self._runner.write_cells(cache, seq, part)

    def _read(self, cache: Cache, seq: int, first: int, n: int) -> Bytes:
        """Positions of a sequence, only to be read before the next computation."""
        return self._runner.read_cells(cache, seq * self.n_ctx + first, n)

    def _write(self, cache: Cache, seq: int, first: int, rows: Bytes) -> None:
        self._runner.write_cells(cache, seq * self.n_ctx + first, rows)

    def _check(self, seq: int, n: int = 0) -> None:
        """IkError unless the sequence exists and has n positions."""
        if not 0 <= seq < self.n_seq:
            raise IkError(f"sequence {seq} does not exist; the session was made for {self.n_seq}")
        if not 0 <= n <= self.n_past[seq]:
            raise IkError(f"sequence {seq} has {self.n_past[seq]} cached positions, not {n}")


def _nearest(known: Iterable[Checkpoint], n: int) -> int:
    """Positions of the last checkpoint up to n; 0: the beginning."""
    return max((c.n_tokens for c in known if c.n_tokens <= n), default=0)


def _element(cache: Cache) -> int:
    return TYPE_TRAITS[cache.type].type_size
