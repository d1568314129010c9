"""Input covariances of weight matrices, the Hessian proxy of GPTQ, accumulated by the streams of `collect`.

An entry is the second moment E[x_i x_j] of the activations. Sums are float32: products of successive micro-batches are
added, each no larger than the sum. A relative error of 1e-6 is far below the difference that another kind of text
makes, and below the damping of the search.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.errors import UsageError
from ikcli.quant.covariance_file import Moments

F32 = npt.NDArray[np.float32]
_LEAST_BLOCK = 32


def block_size(n_mat: int, ne0: int, limit: int) -> int:
    """Return the largest block of columns with which n_mat matrices take at most `limit` bytes: ne0, or at least 32.

    Super-blocks of 256 lie within blocks, or blocks within super-blocks.
    """
    if ne0 % _LEAST_BLOCK:
        return ne0
    even = [s for s in range(ne0, 0, -_LEAST_BLOCK) if ne0 % s == 0]
    sizes = [s for s in even if s == ne0 or s % 256 == 0 or 256 % s == 0]
    return next((s for s in sizes if 4 * n_mat * ne0 * s <= limit), _LEAST_BLOCK)


@dataclass(eq=False, slots=True)
class Products:
    """The growing sums for the matrices of one stream; arrays as in `Moments`."""

    products: F32
    sums: F32
    counts: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @staticmethod
    def empty(n_mat: int, ne0: int, block: int) -> Products:
        return Products(np.zeros((n_mat, ne0, block), np.float32), np.zeros((n_mat, ne0), np.float32), np.zeros(n_mat))

    def add(self, matrix: int, x: F32) -> None:
        """Add rows x (n, ne0) that were multiplied with one matrix."""
        size = self.products.shape[2]
        for first in range(0, x.shape[1], size):
            part = x[:, first : first + size]
            self.products[matrix, first : first + size] += part.T @ part
        self.sums[matrix] += x.sum(axis=0)
        self.counts[matrix] += len(x)

    def moments(self) -> Moments:
        return Moments(self.products, self.sums, self.counts)


def check_memory(sizes: Iterable[int], available: int | None) -> int:
    """Return the bytes of all sums; UsageError if they do not fit into RAM."""
    total = sum(sizes)
    if available is not None and total > available:
        raise UsageError(
            f"--covariance needs {total / 2**30:.1f} GiB of RAM, {available / 2**30:.1f} GiB are available; lower "
            "--covariance-limit, so that more inputs are measured in blocks of columns"
        )
    return total
