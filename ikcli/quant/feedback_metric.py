"""Second moments of a matrix' inputs in the forms that error feedback needs (`ikcli.quant.feedback`)."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.quant.feedback_codes import Step

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

_DAMPING = 0.03  # of the mean of the diagonal, added to it: directions that the text happened not to visit
_PLACE = 32  # columns chosen anew together; every type has whole groups and scales in them


class Place(NamedTuple):
    """Columns that are chosen anew, with their part of H (n, n) and its inverse."""

    step: Step
    moments: Floats
    inverse: Floats


class Metric:
    """Second moments of the inputs of one matrix, and what the search needs of them."""

    def __init__(self, moments: Floats, damping: float = _DAMPING) -> None:
        """`moments` (n, n) are symmetric and positive semi-definite; columns without input count as the mean."""
        self.moments = moments
        diagonal = np.diagonal(moments).astype(np.float64)
        mean = float(diagonal.mean()) or 1.0
        self.added = damping * mean + np.where(diagonal > 0, 0, mean)  # to the diagonal, float64
        h = moments.astype(np.float64)
        np.fill_diagonal(h, diagonal + self.added)
        self.root = upper_root(h)  # R, float64
        self._feedback: dict[int, tuple[Floats, Floats]] = {}
        self._places: dict[int, list[Place]] = {}
        self._reordered: Metric | None = None
        self._lock = threading.Lock()

    def reordered(self, order: npt.NDArray[np.intp]) -> Metric:
        """The metric of the columns in another order (one of them is kept)."""
        with self._lock:
            if self._reordered is None:
                self._reordered = Metric(self.moments[np.ix_(order, order)])
            return self._reordered

    def feedback(self, size: int) -> tuple[Floats, Floats]:
        """For codes of `size` columns: the matrix (n, n) errors are passed on by, and weights (n,) of squares."""
        with self._lock:
            if size not in self._feedback:
                self._feedback[size] = feedback_of(self.root, size)
        return self._feedback[size]

    def places(self, size: int) -> list[Place]:
        """The columns in short runs, each as if all others were settled, for codes of `size` columns."""
        with self._lock:
            if size not in self._places:
                self._places[size] = [self._place(at, size) for at in range(0, len(self.moments), _PLACE)]
        return self._places[size]

    def times(self, errors: Floats, columns: slice = slice(None)) -> Floats:
        """Errors (n_rows, k) of these columns times k rows of H: (n_rows, n)."""
        out: Floats = errors @ self.moments[columns]
        out[:, columns] += errors * self.added[columns].astype(np.float32)
        return out

    def _place(self, first: int, size: int) -> Place:
        at = slice(first, min(first + _PLACE, len(self.moments)))
        h = self.moments[at, at].astype(np.float64)
        h[np.diag_indices_from(h)] += self.added[at]
        inverse = np.linalg.inv(h)
        step = Step(at.start, at.stop, *feedback_of(upper_root(h), size))
        return Place(step, h.astype(np.float32), inverse.astype(np.float32))


def upper_root(h: Doubles) -> Doubles:
    """R, upper triangular, with R R^T = h."""
    lower = np.linalg.cholesky(h[::-1, ::-1])
    return np.ascontiguousarray(lower[::-1, ::-1])


def feedback_of(root: Doubles, size: int) -> tuple[Floats, Floats]:
    """See `Metric.feedback`; the largest weight is 1."""
    n = len(root)
    blocks = root.reshape(n // size, size, n // size, size)
    corner = np.stack([blocks[k, :, k] for k in range(n // size)])
    passed = np.einsum("ikx,kxy->iky", root.reshape(n, n // size, size), np.linalg.inv(corner)).reshape(n, n)
    for k in range(n // size):  # not within a code, and not back
        passed[k * size :, k * size : (k + 1) * size] = 0
    weights = np.square(corner).sum(axis=2).reshape(n)
    return passed.astype(np.float32), (weights / weights.max()).astype(np.float32)
