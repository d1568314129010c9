"""Prepare the second moments of a matrix's inputs in the forms that GPTQ/LDLQ error feedback needs."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.quant.feedback_codes import Step

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

# Added to the diagonal for directions that the text happened not to visit: so much of itself, and of its median (not of
# the mean: a few channels of large models carry thousands of times the energy of the others).
_DAMPING, _LEAST = 0.03, 0.003
_PLACE = 32  # columns chosen again together; every type has whole groups and scales in them


class ColumnGroup(NamedTuple):
    """Columns that are chosen again together, with their part of H (n, n) and its inverse."""

    step: Step
    moments: Floats
    inverse: Floats


class Metric:
    """Second moments of the inputs of one matrix as blocks on a diagonal, with what the search derives from them."""

    def __init__(self, moments: Floats, damping: float = _DAMPING) -> None:
        """Take symmetric, positive semi-definite `moments` (n, B, B), or (ne0, ne0) for a single block.

        Columns without input count as the median.
        """
        self.moments = moments.reshape(-1, *moments.shape[-2:])
        self.block = int(moments.shape[-1])
        h = self.moments.astype(np.float64)
        i = np.arange(self.block)
        diagonal = h[:, i, i]
        median = float(np.median(diagonal[diagonal > 0])) if diagonal.any() else 1.0
        added = damping * diagonal + np.where(diagonal > 0, _LEAST, 1) * median
        h[:, i, i] += added
        self.added = added.reshape(-1)  # to the diagonal, float64 (ne0,)
        self.roots = np.stack([upper_root(block) for block in h])  # R of every block, float64
        self._feedback: dict[int, tuple[Floats, Floats]] = {}
        self._places: dict[int, list[ColumnGroup]] = {}
        self._reordered: Metric | None = None
        self._lock = threading.Lock()

    def reordered(self, order: npt.NDArray[np.intp]) -> Metric:
        """Return the metric of the columns in another order, which stays inside blocks; the last result is kept."""
        with self._lock:
            if self._reordered is None:
                inside = order.reshape(-1, self.block) - np.arange(0, order.size, self.block)[:, None]
                parts = [m[np.ix_(o, o)] for m, o in zip(self.moments, inside, strict=True)]
                self._reordered = Metric(np.stack(parts))
            return self._reordered

    def feedback(self, size: int) -> tuple[Floats, Floats]:
        """Return matrices (n, B, B) that pass errors on, and weights (ne0,), for codes of `size` columns."""
        with self._lock:
            if size not in self._feedback:
                found = [feedback_of(root, size) for root in self.roots]
                weights = np.concatenate([w for _, w in found])
                self._feedback[size] = np.stack([p for p, _ in found]), weights / weights.max()
        return self._feedback[size]

    def places(self, size: int) -> list[ColumnGroup]:
        """Return the columns in short runs, each as if all others were settled, for codes of `size` columns."""
        with self._lock:
            if size not in self._places:
                self._places[size] = [self._place(at, size) for at in range(0, len(self.added), _PLACE)]
        return self._places[size]

    def products(self, rows: Floats) -> Floats:
        """Multiply rows (n_rows, ne0) by the moments."""
        parts = rows.reshape(len(rows), -1, self.block).transpose(1, 0, 2) @ self.moments
        return parts.transpose(1, 0, 2).reshape(rows.shape)

    def slopes(self, errors: Floats) -> Floats:
        """Multiply rows (n_rows, ne0) by H, the damped moments."""
        return self.products(errors) + errors * self.added.astype(np.float32)

    def times(self, errors: Floats, columns: slice, into: slice) -> Floats:
        """Multiply errors (n_rows, k) of k columns of a block by their rows of H, for the columns `into`.

        `into` contains the k columns.
        """
        start = columns.start // self.block * self.block
        rows, wanted = (slice(s.start - start, s.stop - start) for s in (columns, into))
        out: Floats = errors @ self.moments[columns.start // self.block, rows, wanted]
        out[:, columns.start - into.start : columns.stop - into.start] += errors * self.added[columns].astype(
            np.float32
        )
        return out

    def block_of(self, column: int) -> slice:
        """Return the columns of the block that contains a column."""
        start = column // self.block * self.block
        return slice(start, start + self.block)

    def _place(self, first: int, size: int) -> ColumnGroup:
        block = self.block_of(first)
        at = slice(first, min(first + _PLACE, block.stop))
        inside = slice(at.start - block.start, at.stop - block.start)
        h = self.moments[first // self.block, inside, inside].astype(np.float64)
        h[np.diag_indices_from(h)] += self.added[at]
        inverse = np.linalg.inv(h)
        passed, weights = feedback_of(upper_root(h), size)
        step = Step(at.start, at.stop, passed, weights / weights.max())
        return ColumnGroup(step, h.astype(np.float32), inverse.astype(np.float32))


def upper_root(h: Doubles) -> Doubles:
    """Return the upper triangular R with R R^T = h."""
    lower = np.linalg.cholesky(h[::-1, ::-1])
    return np.ascontiguousarray(lower[::-1, ::-1])


def feedback_of(root: Doubles, size: int) -> tuple[Floats, Floats]:
    """Return what `Metric.feedback` returns for one block: (B, B) and (B,), with weights in the units of H."""
    n = len(root)
    blocks = root.reshape(n // size, size, n // size, size)
    corner = np.stack([blocks[k, :, k] for k in range(n // size)])
    passed = np.einsum("ikx,kxy->iky", root.reshape(n, n // size, size), np.linalg.inv(corner)).reshape(n, n)
    for k in range(n // size):  # not within a code, and not back
        passed[k * size :, k * size : (k + 1) * size] = 0
    weights = np.square(corner).sum(axis=2).reshape(n)
    return passed.astype(np.float32), weights.astype(np.float32)
