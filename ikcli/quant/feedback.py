"""Error feedback: codes of a row chosen in order, each error made up for by the columns still to come.

What counts is the error of the product, e H e^T for an error e of a row and second moments H of the inputs. With
H = R R^T, R upper triangular, it is the squared length of e R, whose component j is e_j R_jj + sum(e_i R_ij, i < j). So
the best code for column j is the nearest one to w_j + sum(e_i R_ij, i < j) / R_jj: earlier errors are paid back as far
as inputs are correlated. That is GPTQ (arXiv:2210.17323) in the form of LDLQ (arXiv:2307.13304). Codes that stand for
several columns take these as one: R_jj is a small triangle, and its inverse takes the place of 1 / R_jj.

Scales come from the plain encoder, which is given the targets of a super-block when its turn comes, and R_jj^2, what a
square error costs that later columns cannot mend, as importance. Formats with a scale per row are encoded once before.
Files are of the same types as ever. At the end rows are made unbiased, now with respect to H.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.quant.covariance_file import Covariance
from ikcli.quant.encoders.unbiased import unbias_metric
from ikcli.quant.feedback_search import choose, column_order, group_size
from ikcli.quant.formats import FORMATS
from ikcli.quant.recipes import Choice

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_DAMPING = 0.03  # of the mean of the diagonal, added to it: directions that the text happened not to visit


class Metric:
    """Second moments of the inputs of one matrix, and what the search needs of them."""

    def __init__(self, moments: Floats, damping: float = _DAMPING) -> None:
        """`moments` (n, n) are symmetric and positive semi-definite; columns without input count as the mean."""
        self.moments = moments
        h = moments.astype(np.float64)
        diagonal = np.diagonal(h).copy()
        mean = float(diagonal.mean()) or 1.0
        diagonal += damping * mean + np.where(diagonal > 0, 0, mean)
        np.fill_diagonal(h, diagonal)
        lower = np.linalg.cholesky(h[::-1, ::-1])
        self.root = np.ascontiguousarray(lower[::-1, ::-1])  # R, float64
        self._by_size: dict[int, tuple[Floats, Floats]] = {}
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
            if size not in self._by_size:
                self._by_size[size] = self._feedback(size)
        return self._by_size[size]

    def _feedback(self, size: int) -> tuple[Floats, Floats]:
        n = len(self.root)
        blocks = self.root.reshape(n // size, size, n // size, size)
        corner = np.stack([blocks[k, :, k] for k in range(n // size)])
        passed = np.einsum("ikx,kxy->iky", self.root.reshape(n, n // size, size), np.linalg.inv(corner))
        passed = passed.reshape(n, n)
        for k in range(n // size):  # not within a code, and not back
            passed[k * size :, k * size : (k + 1) * size] = 0
        weights = np.square(corner).sum(axis=2).reshape(n)
        return passed.astype(np.float32), weights.astype(np.float32)


class Feedback:
    """Metrics of the matrices of one tensor, each made when it is first needed, on whichever thread."""

    def __init__(self, covariance: Covariance, name: str, choice: Choice) -> None:
        self._covariance, self._name, self._shape = covariance, name, choice.shape
        self._wanted = choice.changes and supports(choice.new) and covariance.find(name) is not None
        self._lock = threading.Lock()
        self._matrix = -1  # rows come matrix by matrix: only the last one is kept
        self._metric: Metric | None = None

    def metric(self, matrix: int) -> Metric | None:
        """That of one matrix, or None where there is no data or no way to use it: then rows are encoded without."""
        if not self._wanted:
            return None
        with self._lock:
            if matrix != self._matrix:
                moments = self._covariance.moments(self._name, self._shape, matrix)
                self._matrix, self._metric = matrix, Metric(moments) if moments is not None else None
            return self._metric


def supports(type: GGMLType) -> bool:
    """Whether rows of a type can be written with error feedback."""
    return group_size(FORMATS[type].base or type) > 0


def encode_with_feedback(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Rows (n_rows, ne0) float32 as the n_rows * row size bytes of a type that `supports` it."""
    base = FORMATS[type].base
    if base is not None:
        from ikcli.quant.repack import repack_rows

        return repack_rows(encode_with_feedback(values, base, metric), type, values.shape[1]).reshape(-1)
    values = np.ascontiguousarray(values, np.float32)
    order = column_order(type, values.shape[1])
    rows = choose(values, type, *(metric if order is None else metric.reordered(order)).feedback(group_size(type)))
    return unbias_metric(rows, values, type, values @ metric.moments)
