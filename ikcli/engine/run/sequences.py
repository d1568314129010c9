"""The sequence states of a session: cached positions, windows, recurrent states; roll back, save, load, copy.

Cache tensors are of three kinds. Cells, one per position: sequence s owns cells s*n_ctx .. (s+1)*n_ctx-1 and can be
truncated at any position. Windows: a sequence has room for its last n_window positions. When it is full, the positions
that are still visible move to its front, so the position of a row always determines its cell (`window_cell`). States,
one row per sequence (recurrent layers): only the state of the last position exists.

A sequence with windows or states can roll back as far as its windows reach, to a checkpoint, or to its beginning, where
states are zero whatever is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ikcli.engine.run.media import Span
from ikcli.engine.run.runner import Runner
from ikcli.engine.run.saved_sequence import Bytes, CacheKind, Checkpoint, SavedSequence
from ikcli.errors import IkError, UnsupportedError
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, Per

_LIKELY = 8
_NO_ROWS = np.zeros((0, 0), np.uint8)
SPARE = 64  # positions kept before a window, so that rejected drafts and short rollbacks cost nothing


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints of a sequence are kept: at most `most`, of at most `n_bytes` (but always the last one).

    The oldest is dropped first. With `spread` it is the one whose neighbours are closest to each other; checkpoints
    from which a text is likely to continue count as if their gap were several times as wide.
    """

    most: int = 8
    n_bytes: int = 1 << 62
    spread: bool = False

    def trim(self, known: list[Checkpoint]) -> None:
        """Drop checkpoints beyond the limits."""
        while len(known) > 1 and (len(known) > self.most or sum(c.n_bytes for c in known) > self.n_bytes):
            del known[self._least(known)]

    def _least(self, known: Sequence[Checkpoint]) -> int:
        if not self.spread:
            return 0
        at = [0, *(c.n_tokens for c in known)]
        return min(range(len(known) - 1), key=lambda i: (at[i + 2] - at[i]) * (_LIKELY if known[i].likely else 1))


class Sequences:
    """The sequences of a session; see the module.

    `n_past`: cached positions of each sequence; the session advances them.
    """

    def __init__(
        self,
        runner: Runner,
        caches: Iterable[Cache],
        n_cells: int,
        n_seq: int,
        rotated: str,
        window: int = 0,
        n_window: int = 0,
    ) -> None:
        """Create empty sequences.

        `rotated`: the rotation of rows before they are stored, which is part of the layout. `window`: positions that a
        query sees in window layers. `n_window`: cells of a sequence there.
        """
        ordered = sorted(caches, key=lambda c: (c.il, c.kind))
        self._runner, self._n_cells, self._n_rows, self._rotated = runner, n_cells, n_seq, rotated
        self._cells = [c for c in ordered if c.per is Per.CELL]
        self._windows = [c for c in ordered if c.per is Per.WINDOW]
        self._states = [c for c in ordered if c.per is Per.SEQUENCE]
        self.has_windows = bool(self._windows)  # call `make_room` before positions are added
        self.kind = CacheKind(bool(self._states), window if self._windows else 0)
        self._n_window = n_window
        self.keeping = Keeping()
        self.n_past: list[int] = []
        self._first: list[int] = []  # position in the first cell of windows
        self._checkpoints: list[list[Checkpoint]] = []
        self._passing: list[int] = []
        self._spans: list[tuple[Span, ...]] = []
        self.version: list[int] = []  # changes when a sequence is replaced by another one
        self.settle: Callable[[int], None] | None = None  # called before rows of a sequence are saved or copied
        self.encoded: dict[int, int] | None = None  # of an encoder-decoder: positions of the encoder, by sequence
        self.divide(n_seq)

    # --- how many, how long -----------------------------------------------------------------------------------------
    def divide(self, n_seq: int) -> None:
        """Drop all sequences and divide the cache evenly between n_seq sequences from now on."""
        most = self._n_cells if self.kind.is_free else self._n_rows
        if not 1 <= n_seq <= most:
            what = "cache of" if self.kind.is_free else "states and windows are for"
            raise IkError(f"a {self._n_cells}-token cache cannot be divided between {n_seq} sequences: {what} {most}")
        self.n_seq, self.n_ctx = n_seq, self._n_cells // n_seq
        self.clear()

    def clear(self) -> None:
        """Drop all sequences."""
        self.n_past = [0] * self.n_seq
        self._first = [0] * self.n_seq
        self._checkpoints = [[] for _ in range(self.n_seq)]
        self._passing = [-1] * self.n_seq
        self._spans = [()] * self.n_seq
        self.version = [max(self.version, default=0) + 1] * self.n_seq
        if self.encoded is not None:
            self.encoded.clear()

    # --- images -----------------------------------------------------------------------------------------------------
    def spans(self, seq: int) -> tuple[Span, ...]:
        """Return the images of a sequence."""
        return self._spans[seq]

    def set_spans(self, seq: int, spans: Iterable[Span]) -> None:
        """Say which images the positions of a sequence hold that came from elsewhere (`arrive`)."""
        self._spans[seq] = tuple(s for s in spans if s.first < self.n_past[seq])

    def shift(self, seq: int) -> int:
        """Return position minus cell of the token that comes next."""
        return sum(s.advance - s.n for s in self._spans[seq])

    def add_span(self, seq: int, span: Span) -> None:
        """Note an image, unless an earlier piece of it did."""
        if span not in self._spans[seq]:
            self._spans[seq] = (*self._spans[seq], span)

    def check_next(self, seq: int, pos: int, n: int, *, follow: bool = True) -> None:
        """Raise IkError unless n tokens (which `follow` one another) can be added to a sequence at this position."""
        if not 0 <= seq < self.n_seq:
            raise IkError(f"sequence {seq} does not exist; the session was made for {self.n_seq}")
        if pos != self.n_past[seq] or not follow:
            raise IkError(f"sequence {seq}: position {pos} does not follow the {self.n_past[seq]} cached ones")
        if pos + n > self.n_ctx:
            raise IkError(f"sequence {seq}: {pos + n} tokens do not fit its context of {self.n_ctx}; raise -c")

    def check_each(self, seqs: Sequence[int], pos: Sequence[int]) -> None:
        """Check one token of each of these sequences as `check_next` does, in one comparison where all are right."""
        if len(seqs) == 1:
            self.check_next(seqs[0], pos[0], 1)
            return
        n_past = self.n_past
        good = min(seqs) >= 0 and max(seqs) < self.n_seq and max(pos) < self.n_ctx
        if good and [n_past[seq] for seq in seqs] == list(pos):
            return
        for seq, p in zip(seqs, pos, strict=True):
            self.check_next(seq, p, 1)

    # --- windows ----------------------------------------------------------------------------------------------------
    def window_cell(self, seq: int) -> int:
        """Return the cell of position 0 of a sequence in tensors of windows.

        Once that position has left the window, the number is negative or a cell of another sequence.
        """
        return seq * self._n_window - self._first[seq]

    def room(self, seq: int, n: int) -> int:
        """Make room and return the cell of position 0 in the windows; 0 without windows."""
        if not self._windows:
            return 0
        self.make_room(seq, n)
        return self.window_cell(seq)

    def make_room(self, seq: int, n: int) -> None:
        """Make room for n positions: move what windows still see to the front if the space after it is too small."""
        past, first = self.n_past[seq], self._first[seq]
        if past + n - first <= self._n_window:
            return
        kept = max(min(self.kind.first_needed(past) - SPARE, past), 0)
        kept = max(kept, first)
        for cache in self._windows:
            at = seq * self._n_window
            self._runner.move_cells(cache, at + kept - first, at, past - kept)
        self._first[seq] = kept

    # --- rollback ---------------------------------------------------------------------------------------------------
    def reach(self, seq: int, n: int) -> int:
        """Return the most positions, up to n, that `truncate` can keep."""
        self._check(seq)
        if n >= self.n_past[seq]:
            return self.n_past[seq]
        if self.encoded is not None and n < self.encoded.get(seq, 0):
            return 0  # a text is encoded as a whole
        return self.kind.reach(n, self._first[seq], self._checkpoints[seq])

    def truncate(self, seq: int, n: int) -> int:
        """Drop positions from n on; return how many are left.

        That is n where the sequence can be truncated there, otherwise the nearest checkpoint before it: the caller
        computes the positions between again.
        """
        kept = self.reach(seq, n)
        if kept < self.n_past[seq]:
            self._checkpoints[seq] = [c for c in self._checkpoints[seq] if c.n_tokens <= kept]
            self._continue_at(seq, kept)
        return kept

    def checkpoint(self, seq: int, *, passing: bool = False, likely: bool = False) -> Checkpoint:
        """Save the present state of a sequence, so that `truncate` can roll back to it.

        This costs nothing where a sequence can be truncated anywhere. `keeping` decides which checkpoints stay. A
        `passing` one (before a draft, say) is replaced by the next passing one, which takes its memory; so it is for
        `truncate` only. `likely`: see `Checkpoint`.
        """
        self._check(seq)
        n, known = self.n_past[seq], self._checkpoints[seq]
        if self.kind.is_free or (passing and not self._states):  # windows keep more than they see
            return Checkpoint(n)
        unused: Sequence[Bytes] = ()
        if passing and self._passing[seq] != n:
            unused = next((c.parts[len(self._windows) :] for c in known if c.n_tokens == self._passing[seq]), ())
            known[:] = [c for c in known if c.n_tokens != self._passing[seq]]
        if not known or known[-1].n_tokens != n:
            known.append(self._present(seq, likely, unused))
            self._passing[seq] = n if passing else self._passing[seq]
        elif not passing and self._passing[seq] == n:
            self._passing[seq] = -1  # it stays
        self.keeping.trim(known)
        return known[-1]

    def restore(self, seq: int, checkpoint: Checkpoint) -> None:
        """Roll a sequence back to a checkpoint; raise IkError if it has been shorter since then."""
        if self.reach(seq, checkpoint.n_tokens) != checkpoint.n_tokens:
            raise IkError(f"sequence {seq} cannot roll back to {checkpoint.n_tokens} positions: they were dropped")
        self.truncate(seq, checkpoint.n_tokens)

    # --- save, load, copy -------------------------------------------------------------------------------------------
    def layout(self) -> list[str]:
        """Return one line per tensor: equal lists mean that saved sequences can be exchanged."""
        cells = [
            f"{c.kind}-{c.il} {c.cols} {TYPES[c.type].name} {'transposed' if c.transposed else 'rows'} {self._rotated}"
            for c in self._cells
        ]
        cells += [
            f"{c.kind}-{c.il} {c.cols} {TYPES[c.type].name} window {self.kind.window} {self._rotated}"
            for c in self._windows
        ]
        return cells + [f"{c.kind}-{c.il} {c.cols} {TYPES[c.type].name} state" for c in self._states]

    def shapes(self, n_tokens: int, first: int = 0) -> list[tuple[int, int]]:
        """Return the shapes of the parts of n positions, those of windows from `first` on."""
        cells = [
            (c.cols, n_tokens * _element(c)) if c.transposed else (n_tokens, row_n_bytes(c.type, c.cols))
            for c in self._cells
        ]
        return cells + self._window_shapes(n_tokens - first)

    def checkpoint_shapes(self, n_tokens: int, first: int) -> list[tuple[int, int]]:
        """Return the shapes of the parts of a checkpoint."""
        states = [(1, row_n_bytes(c.type, c.cols)) for c in self._states]
        return self._window_shapes(n_tokens - first) + states

    def _window_shapes(self, n: int) -> list[tuple[int, int]]:
        return [(n, row_n_bytes(c.type, c.cols)) for c in self._windows]

    def save(self, seq: int, n_tokens: int) -> SavedSequence:
        """Return a copy of the first n_tokens positions of a sequence."""
        self._check(seq, n_tokens)
        self._check_saves()
        if self.settle is not None:
            self.settle(seq)
        first = min(self._first[seq], n_tokens)
        parts = [self._read(c, seq, 0, n_tokens).copy() for c in self._cells]
        parts += self._window_rows(seq, first, n_tokens)
        spans = tuple(s for s in self._spans[seq] if s.first < n_tokens)
        return SavedSequence(n_tokens, tuple(parts), self._known(seq, n_tokens), self.kind, first, spans)

    def load(self, seq: int, saved: SavedSequence, n_tokens: int | None = None) -> int:
        """Replace a sequence by the first n_tokens (default all) of a saved one; return how many it then has."""
        n = saved.n_tokens if n_tokens is None else n_tokens
        self._check(seq)
        self._check_saves()
        if not 0 <= n <= min(saved.n_tokens, self.n_ctx):
            raise IkError(f"{n} cached tokens do not fit sequence {seq}, whose context is {self.n_ctx}; raise -c")
        fits = [p.shape for p in saved.parts] == self.shapes(saved.n_tokens, saved.first) and saved.kind == self.kind
        shapes = [(c, self.checkpoint_shapes(c.n_tokens, c.first)) for c in saved.checkpoints]
        if not fits or any([p.shape for p in c.parts] != wanted for c, wanted in shapes):
            raise IkError("cache rows of another model or cache type cannot be used")
        for cache, part in zip(self._cells, saved.parts, strict=False):
            self._write(cache, seq, 0, part[:, : n * _element(cache)] if cache.transposed else part[:n])
        rows = [part[: max(n - saved.first, 0)] for part in saved.parts[len(self._cells) :]]
        self._spans[seq] = saved.spans
        return self._arrive(seq, n, saved.checkpoints, rows, saved.first)

    def read(self, seq: int, first: int, n: int) -> tuple[Bytes, ...]:
        """Return a copy of n positions of a sequence from `first` on, in the tensors of cells only."""
        self._check(seq, first + n)
        return tuple(self._read(c, seq, first, n).copy() for c in self._cells)

    @property
    def cells(self) -> Sequence[Cache]:
        """Return the tensors of cells, in the order of `read`."""
        return self._cells

    @property
    def windows(self) -> Sequence[Cache]:
        """Return the tensors of windows, whose rows are the first parts of a checkpoint."""
        return self._windows

    def cut(self, parts: Sequence[Bytes], first: int, end: int) -> tuple[Bytes, ...]:
        """Return views of positions of what `read` returned, counted from the first one read."""
        return tuple(
            part[:, first * _element(c) : end * _element(c)] if c.transposed else part[first:end]
            for c, part in zip(self._cells, parts, strict=True)
        )

    def write(self, seq: int, first: int, parts: Sequence[Bytes]) -> None:
        """Write what `read` or `cut` returned at a position; `arrive` then makes it count."""
        for cache, part in zip(self._cells, parts, strict=True):
            self._write(cache, seq, first, part)

    def arrive(self, seq: int, n: int, known: Sequence[Checkpoint], windows: Sequence[Bytes], first: int) -> int:
        """Set the length of a sequence to n positions whose cells were written, with these checkpoints.

        `windows`: rows of the tensors of windows from position `first` on, which may be empty. Return how many
        positions the sequence then has.
        """
        self._check(seq)
        if n > self.n_ctx:
            raise IkError(f"{n} cached tokens do not fit sequence {seq}, whose context is {self.n_ctx}; raise -c")
        return self._arrive(seq, n, known, windows or [_NO_ROWS] * len(self._windows), first)

    def window_parts(self, checkpoint: Checkpoint) -> tuple[Bytes, ...]:
        """Return the rows of windows of a checkpoint."""
        return checkpoint.parts[: len(self._windows)]

    def known(self, seq: int, n: int) -> tuple[Checkpoint, ...]:
        """Return the checkpoints of the first n positions, ascending.

        The last one is that of position n if it is known. That of a model with windows only begins up to `SPARE`
        positions earlier than needed, so that it also serves a text that ends a little earlier.
        """
        self._check(seq, n)
        known = self._known(seq, n)
        if not self._windows or self._states or not n:
            return known
        first = max(self.kind.first_needed(n) - SPARE, min(self._first[seq], n), 0)
        if not self.kind.reach(n, first, ()):
            return known
        return (*(c for c in known if c.n_tokens < n), Checkpoint(n, tuple(self._window_rows(seq, first, n)), first))

    def copy(self, src: int, dst: int, first: int, n_tokens: int) -> int:
        """Copy the positions of `src` up to n_tokens to `dst`; return how many it then has.

        Positions before `first` must be equal in both already.
        """
        self._check(src, n_tokens)
        self._check_saves()
        if self.settle is not None:
            self.settle(src)
        known, own = self._known(src, n_tokens), self.reach(dst, first)
        if not self.kind.is_free and own >= self.kind.reach(n_tokens, self._first[src], known):
            return self.truncate(dst, own)
        for cache in self._cells:
            self._write(cache, dst, first, self._read(cache, src, first, n_tokens - first))
        begin = min(self._first[src], n_tokens)
        self._spans[dst] = self._spans[src]
        return self._arrive(dst, n_tokens, known, self._window_rows(src, begin, n_tokens), begin)

    def _known(self, seq: int, n: int) -> tuple[Checkpoint, ...]:
        """Return the checkpoints among the first n positions; with states, that of the present too."""
        known = [c for c in self._checkpoints[seq] if c.n_tokens <= n]
        if any(c.n_tokens == self._passing[seq] for c in known):
            self._passing[seq] = -1  # others have it now, so its memory is not to be used again
        if self._states and n and n == self.n_past[seq] and (not known or known[-1].n_tokens < n):
            known.append(self._present(seq))
        return tuple(known)

    def _arrive(self, seq: int, n: int, known: Sequence[Checkpoint], rows: Sequence[Bytes], first: int) -> int:
        """Set a sequence to n cells, these checkpoints, and these rows of windows from position `first` on."""
        self._checkpoints[seq] = [c for c in known if c.n_tokens <= n]
        self.keeping.trim(self._checkpoints[seq])
        self._passing[seq] = -1
        self.version[seq] += 1
        self.n_past[seq] = n
        self._put_windows(seq, rows, first)
        kept = self.kind.reach(n, first, self._checkpoints[seq])
        self._continue_at(seq, kept)
        return kept

    # --- memory -----------------------------------------------------------------------------------------------------
    def _present(self, seq: int, likely: bool = False, unused: Sequence[Bytes] = ()) -> Checkpoint:
        """Return a checkpoint of the present state of a sequence; `unused`: arrays of states that can hold it.

        New memory takes several times as long as the copy: the system clears every page of it first.
        """
        n = self.n_past[seq]
        first = max(self.kind.first_needed(n), self._first[seq]) if self._windows else 0
        states = [self._runner.read_cells(c, seq, 1) for c in self._states]
        copies = list(unused) or [np.empty_like(state) for state in states]
        for copy, state in zip(copies, states, strict=True):
            copy[:] = state
        return Checkpoint(n, (*self._window_rows(seq, first, n), *copies), first, likely)

    def _continue_at(self, seq: int, n: int) -> None:
        """Make n, which must be within reach, the length of a sequence."""
        if n and (self._states or not self._first[seq] <= self.kind.first_needed(n)):
            found = next(c for c in reversed(self._checkpoints[seq]) if c.n_tokens == n)
            windows = found.parts[: len(self._windows)]
            self._put_windows(seq, windows, found.first)
            for cache, part in zip(self._states, found.parts[len(windows) :], strict=True):
                self._runner.write_cells(cache, seq, part)
        if not n:
            self._first[seq] = 0
            if self.encoded is not None:
                self.encoded.pop(seq, None)
        self.n_past[seq] = n
        self._spans[seq] = tuple(s for s in self._spans[seq] if s.first < n)

    def _window_rows(self, seq: int, first: int, end: int) -> list[Bytes]:
        """Return a copy of the positions first..end-1 in all tensors of windows."""
        at = self.window_cell(seq) + first
        return [self._runner.read_cells(c, at, end - first).copy() for c in self._windows]

    def _put_windows(self, seq: int, rows: Sequence[Bytes], first: int) -> None:
        """Replace the windows of a sequence by these rows, from position `first` on; of too many rows keep the last."""
        if not self._windows:
            return
        skip = max(len(rows[0]) - self._n_window, 0)
        for cache, part in zip(self._windows, rows, strict=True):
            if len(part):
                self._runner.write_cells(cache, seq * self._n_window, part[skip:])
        self._first[seq] = first + skip

    def _read(self, cache: Cache, seq: int, first: int, n: int) -> Bytes:
        """Return positions of a sequence, to be read before the next computation only."""
        return self._runner.read_cells(cache, seq * self.n_ctx + first, n)

    def _write(self, cache: Cache, seq: int, first: int, rows: Bytes) -> None:
        self._runner.write_cells(cache, seq * self.n_ctx + first, rows)

    def _check_saves(self) -> None:
        """Raise UnsupportedError for an encoder-decoder, the length of whose text is not saved."""
        if self.encoded is not None:
            raise UnsupportedError("sequences of models with an encoder beside a decoder are not saved and restored")

    def _check(self, seq: int, n: int = 0) -> None:
        """Raise IkError unless the sequence exists and has n positions."""
        if not 0 <= seq < self.n_seq:
            raise IkError(f"sequence {seq} does not exist; the session was made for {self.n_seq}")
        if not 0 <= n <= self.n_past[seq]:
            raise IkError(f"sequence {seq} has {self.n_past[seq]} cached positions, not {n}")


def _element(cache: Cache) -> int:
    return TYPES[cache.type].type_size
