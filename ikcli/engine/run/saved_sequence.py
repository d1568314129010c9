"""Sequence state outside of the cache: checkpoints to roll back to, and whole sequences outside of a session."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.media import Span

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Limits of a rollback: whether the model has states, and the window of its layers (0: all positions)."""

    has_states: bool = False
    window: int = 0

    @property
    def is_free(self) -> bool:
        """Return whether a sequence can be truncated at any position."""
        return not self.has_states and not self.window

    def first_needed(self, n: int) -> int:
        """Return the first position that the windows of position n see; n itself without windows."""
        return max(0, n - self.window + 1) if self.window else n

    def reach(self, n: int, first: int, checkpoints: Iterable[Checkpoint]) -> int:
        """Return the most positions, up to n, that a rollback can keep if the windows begin at `first`."""
        if n <= 0 or self.is_free or (not self.has_states and first <= self.first_needed(n)):
            return max(n, 0)
        return nearest(checkpoints, n)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state that a sequence of n_tokens positions needs beside its cells to be continued.

    `parts`: one per tensor of windows, the rows of positions first..n_tokens-1; then one per tensor of states, (1,
    bytes).
    """

    n_tokens: int
    parts: tuple[Bytes, ...] = ()
    first: int = 0
    likely: bool = False  # that a text continues from here

    @property
    def n_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts)


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """Positions 0..n_tokens-1 of a sequence as plain arrays that fit every session of the same `layout`.

    `parts`: one per tensor of cells, (n_tokens, row bytes), or (columns, n_tokens * element bytes) of a transposed one;
    then one per tensor of windows, the rows of positions first..n_tokens-1. `spans`: its images.
    """

    n_tokens: int
    parts: tuple[Bytes, ...]
    checkpoints: tuple[Checkpoint, ...] = ()
    kind: CacheKind = CacheKind()
    first: int = 0
    spans: tuple[Span, ...] = ()

    def reach(self, n: int) -> int:
        """Return the most positions, up to n, that a sequence can have after `load`."""
        return self.kind.reach(min(n, self.n_tokens), self.first, self.checkpoints)

    @property
    def n_bytes(self) -> int:
        return sum(p.nbytes for p in self.parts) + sum(c.n_bytes for c in self.checkpoints)


def nearest(known: Iterable[Checkpoint], n: int) -> int:
    """Return the positions of the last checkpoint up to n; 0 is the beginning."""
    return max((c.n_tokens for c in known if c.n_tokens <= n), default=0)
