"""Measure the error of a storage type on (samples of) the rows of a tensor: encode, decode, compare.

A sample is a set of runs of at most 16 adjacent rows, drawn with a fixed seed evenly over all matrices (experts).
Weighted errors use the mean squared input of every column: they estimate the squared error of the product. For an
interleaved type its plain twin, which has the same values, is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows
from ikcli.quant.encoding import TensorEncoding
from ikcli.quant.feedback_metric import Metric
from ikcli.quant.formats import row_size
from ikcli.quant.recipes import plain_twin

Floats = npt.NDArray[np.float32]
BLOCK_ROWS = 16


@dataclass(frozen=True, slots=True)
class RowSample:
    """Rows (n, ne0) of one matrix and the weights (ne0,) of its columns."""

    matrix: int
    values: Floats
    weights: Floats | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled rows of one tensor; `n_rows` is the number of rows that the tensor has."""

    name: str
    shape: tuple[int, ...]
    n_rows: int
    pieces: tuple[RowSample, ...]

    @property
    def n_sampled(self) -> int:
        return sum(len(p.values) for p in self.pieces)


@dataclass(frozen=True, slots=True)
class Errors:
    """Sums over elements in float64; without weights, the weighted sums treat all columns alike."""

    n: int = 0
    sum2: float = 0.0
    value2: float = 0.0
    weighted2: float = 0.0
    weighted_value2: float = 0.0
    largest: float = 0.0

    def __add__(self, other: Errors) -> Errors:
        return Errors(
            self.n + other.n,
            self.sum2 + other.sum2,
            self.value2 + other.value2,
            self.weighted2 + other.weighted2,
            self.weighted_value2 + other.weighted_value2,
            max(self.largest, other.largest),
        )

    @property
    def rmse(self) -> float:
        """Return the root of the mean squared error, in units of the weights."""
        return math.sqrt(self.sum2 / self.n) if self.n else 0.0

    @property
    def relative(self) -> float:
        """Return the RMSE over the RMS of the values."""
        return math.sqrt(self.sum2 / self.value2) if self.value2 > 0 else 0.0

    @property
    def weighted(self) -> float:
        """Return `relative` with columns weighted by importance: the relative error of the product's output."""
        return math.sqrt(self.weighted2 / self.weighted_value2) if self.weighted_value2 > 0 else 0.0


def sample_tensor(file: GGUFFile, t: TensorInfo, weights: Floats | None, n_rows: int = 0, seed: int = 0) -> Sample:
    """Decode about `n_rows` rows (0 = all) of a tensor; `weights` (n_mat, ne0) as from `Imatrix.weights`."""
    ne0, total = t.shape[0], math.prod(t.shape[1:])
    ne1 = t.shape[1] if len(t.shape) > 1 else 1
    runs = [
        (m, m * ne1 + r, m * ne1 + min(r + BLOCK_ROWS, ne1))
        for m in range(total // ne1)
        for r in range(0, ne1, BLOCK_ROWS)
    ]
    wanted = -(-n_rows // BLOCK_ROWS) if n_rows else len(runs)
    if wanted < len(runs):
        # one run from each of `wanted` equal parts, so that blocks, heads and experts are all met
        edges = np.linspace(0, len(runs), wanted + 1)
        shift = np.random.default_rng(seed).random(wanted)
        picked = np.floor(edges[:-1] + shift * np.diff(edges)).astype(int)
        runs = [runs[i] for i in sorted(set(picked.tolist()))]
    whole = dequantize(file.data(t.name), t.type, (ne0, total)).reshape(-1, ne0) if t.type == GGMLType.I2_S else None
    pieces: list[RowSample] = []
    for m, first, stop in _joined(runs):
        if whole is not None:
            values = whole[first:stop]
        else:
            size = row_size(t.type, ne0)
            values = dequantize(file.part(t.name, first * size, stop * size), t.type, (ne0, stop - first))
            values = values.reshape(-1, ne0)
        row = None if weights is None else np.ascontiguousarray(weights[m % len(weights)], np.float32)
        pieces.append(RowSample(m, np.ascontiguousarray(values, np.float32), row))
    return Sample(t.name, t.shape, total, tuple(pieces))


def _joined(runs: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join adjacent runs of one matrix."""
    out: list[tuple[int, int, int]] = []
    for m, first, stop in runs:
        if out and out[-1][0] == m and out[-1][2] == first:
            out[-1] = (m, out[-1][1], stop)
        else:
            out.append((m, first, stop))
    return out


def fits(type: GGMLType, shape: tuple[int, ...]) -> bool:
    """Return whether rows of this shape suit the type."""
    return shape[0] % TYPES[type].block_size == 0


def measure(sample: Sample, type: GGMLType) -> Errors:
    """Return the errors of the sampled rows stored as `type`; the encoder sees the importance weights of a real run."""
    plain = plain_twin(type)[0]
    return sum((errors_of(p, quantize_rows(p.values, plain, p.weights), plain) for p in sample.pieces), Errors())


def measure_piece(piece: RowSample, type: GGMLType, encoding: TensorEncoding) -> Errors:
    """Return the errors of one piece, stored as in a real run.

    With second moments the weighted errors are those of products.
    """
    plain = plain_twin(type)[0]
    encoded = encoding.encode(piece.values, plain, piece.matrix)
    return errors_of(piece, encoded, plain, encoding.metric(piece.matrix))


def errors_of(piece: RowSample, encoded: npt.NDArray[np.uint8], type: GGMLType, metric: Metric | None = None) -> Errors:
    """Return the errors of a piece that was stored as the bytes `encoded` of a type."""
    x = piece.values
    error = dequantize(encoded, type, (x.shape[1], len(x))).reshape(x.shape) - x
    by_column = np.square(error).sum(axis=0, dtype=np.float64)
    value_by_column = np.square(x).sum(axis=0, dtype=np.float64)
    w = np.ones(x.shape[1]) if piece.weights is None else piece.weights.astype(np.float64)
    # no scalar product, whose order of sums depends on the number of threads
    weighted = float((by_column * w).sum()), float((value_by_column * w).sum())
    if metric is not None:
        weighted = _products(error, metric), _products(x, metric)
    return Errors(
        x.size,
        float(by_column.sum()),
        float(value_by_column.sum()),
        *weighted,
        float(np.abs(error).max(initial=0)),
    )


def _products(rows: Floats, metric: Metric) -> float:
    """Return the sum of the mean squared products of rows (n, ne0) with the inputs."""
    return float(np.einsum("ij,ij->", metric.products(rows), rows, dtype=np.float64))
