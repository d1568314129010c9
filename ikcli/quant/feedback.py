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
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant import tables
from ikcli.quant.code_fields import REPLACEABLE, code_space, replace_codes
from ikcli.quant.covariance_file import Covariance
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows
from ikcli.quant.encoders.iquants import find, grid_format
from ikcli.quant.encoders.iquants_pack import pack
from ikcli.quant.encoders.native_call import run
from ikcli.quant.encoders.unbiased import unbias_metric
from ikcli.quant.formats import FORMATS, row_size
from ikcli.quant.recipes import Choice

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_DAMPING = 0.03  # of the mean of the diagonal, added to it: directions that the text happened not to visit
_SUB = 16  # columns that share all scales, in every type
_LANES = 16
_FAR = np.float32(1e30)
_LEAST_SQUARES = EncodeOptions(least_squares=True)
_T = GGMLType
_GRIDS: dict[GGMLType, tuple[str, tuple[int, ...]]] = {  # kernels: factory and its arguments
    _T.IQ2_XXS: ("make_grid", (8, 256, 1)),
    _T.IQ2_XS: ("make_grid", (8, 512, 1)),
    _T.IQ2_S: ("make_grid", (8, 1024, 0)),
    _T.IQ3_XXS: ("make_grid", (4, 256, 1)),
    _T.IQ3_S: ("make_grid", (4, 512, 0)),
    _T.IQ1_S: ("make_ternary", (2048, 0)),
    _T.IQ1_M: ("make_ternary", (2048, 1)),
}


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
        self._lock = threading.Lock()

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
    plain = FORMATS[type].base or type
    return plain in REPLACEABLE or plain in _GRIDS


def encode_with_feedback(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Rows (n_rows, ne0) float32 as the n_rows * row size bytes of a type that `supports` it."""
    base = FORMATS[type].base
    if base is not None:
        from ikcli.quant.repack import repack_rows

        return repack_rows(encode_with_feedback(values, base, metric), type, values.shape[1]).reshape(-1)
    values = np.ascontiguousarray(values, np.float32)
    rows = _choose_points(values, type, metric) if type in _GRIDS else _choose_codes(values, type, metric)
    return unbias_metric(rows, values, type, values @ metric.moments)


def _choose_points(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Encoded rows of a grid type, super-block by super-block."""
    fmt = grid_format(type)
    n_rows, ne0 = values.shape
    size = 4 if type == GGMLType.IQ3_S else 8
    passed, weights = metric.feedback(size)
    weights = weights / max(float(weights.max()), 1e-30)
    grid = np.ascontiguousarray(tables.grid(fmt.grid).T)
    kernel = KernelKey("ikcli.quant.encoders.feedback_grids", *_GRIDS[type])
    scratch = np.empty(512 + 16 * grid.shape[1], np.uint8)
    targets, out = values.copy(), []
    for first in range(0, ne0, fmt.span):
        last = first + fmt.span
        mine, x = (np.ascontiguousarray(a[:, first:last]) for a in (targets, values))
        found = find(mine, type, weights[first:last])
        d = found.d.astype(np.float16).astype(np.float32)
        scales = np.repeat(d * fmt.multipliers[found.scales], fmt.sub // 8, axis=1)
        errors, inner = np.empty_like(x), np.ascontiguousarray(passed[first:last, first:last])
        arrays = (inner, weights[first:last], scales, grid, found.points, found.signs, errors, scratch)
        addresses = [a.ctypes.data for a in arrays]
        run(kernel, x.ctypes.data, mine.ctypes.data, n_rows, fmt.span, *addresses)
        out.append(pack(type, found))
        targets[:, last:] += errors @ passed[first:last, last:]
    return np.concatenate(out, axis=1).reshape(-1)


def _choose_codes(values: Floats, type: GGMLType, metric: Metric) -> Bytes:
    """Encoded rows, super-block by super-block."""
    fmt = FORMATS[type]
    n_rows, ne0 = values.shape
    space = code_space(type)
    assert space is not None
    passed, weights = metric.feedback(space.group)
    out = np.empty((n_rows, row_size(type, ne0)), np.uint8)
    head = fmt.row_meta_size
    if head:
        out[:] = quantize_rows(values, type, weights, options=_LEAST_SQUARES).reshape(n_rows, -1)
    targets = values.copy()
    unit = max(fmt.block_size, 2 * _SUB)
    for first in range(0, ne0, unit):
        last = first + unit
        at = slice(head + first // fmt.block_size * fmt.type_size, head + last // fmt.block_size * fmt.type_size)
        mine = np.ascontiguousarray(targets[:, first:last])
        if not head:
            out[:, at] = quantize_rows(mine, type, weights[first:last], options=_LEAST_SQUARES).reshape(n_rows, -1)
        block = np.concatenate((out[:, :head], out[:, at]), axis=1)
        inner = np.ascontiguousarray(passed[first:last, first:last])
        codes, errors = _codes(
            np.ascontiguousarray(values[:, first:last]),
            mine,
            value_tables(block, type, unit),
            inner,
            weights[first:last],
        )
        blocks = replace_codes(
            np.ascontiguousarray(out[:, at]).reshape(-1, fmt.type_size),
            type,
            codes.reshape(-1, fmt.block_size // space.group),
        )
        out[:, at] = blocks.reshape(n_rows, -1)
        targets[:, last:] += errors @ passed[first:last, last:]
    return out.reshape(-1)


def _codes(
    values: Floats, targets: Floats, tables: Floats, passed: Floats, weights: Floats
) -> tuple[npt.NDArray[np.int32], Floats]:
    """Codes (n_rows * blocks, codes per block's columns) and errors (n_rows, n) of the columns of one super-block."""
    n_rows, n = targets.shape
    size, n_codes = tables.shape[2:]
    codes, errors = np.empty((n_rows, n // size), np.int32), np.empty((n_rows, n), np.float32)
    scratch = np.empty(n_codes, np.float32)
    weights = np.ascontiguousarray(weights / max(float(weights.max()), 1e-30))
    key = KernelKey("ikcli.quant.encoders.feedback_kernels", "make_tables", (size,))
    arrays = (values, targets, passed, weights, tables, codes, errors, scratch)
    x, t, p, w, v, c, e, s = (a.ctypes.data for a in arrays)
    run(key, x, t, n_rows, n, p, w, v, n_codes, c, e, s)
    return codes.reshape(n_rows, -1), errors


def value_tables(rows: Bytes, type: GGMLType, ne0: int) -> Floats:
    """What every code would stand for in these rows: (n_rows, ne0 / 16, columns per code, codes), at least 16 codes.

    Decoded from rows in which the columns under one scale hold one code after the other.
    """
    fmt, space = FORMATS[type], code_space(type)
    assert space is not None
    n_rows, size = len(rows), space.group
    per_sub = _SUB // size
    n_codes = max(_LANES, space.n_codes)
    out = np.full((n_rows, ne0 // _SUB, size, n_codes), _FAR, np.float32)
    blocks = np.ascontiguousarray(rows[:, fmt.row_meta_size :]).reshape(-1, fmt.type_size)
    codes = np.arange(fmt.block_size // size) % per_sub
    for first in range(0, space.n_codes, per_sub):
        n = min(per_sub, space.n_codes - first)
        tried = np.broadcast_to(first + codes % n, (len(blocks), len(codes)))
        new = replace_codes(blocks, type, tried).reshape(n_rows, -1)
        data = np.concatenate((rows[:, : fmt.row_meta_size], new), axis=1)
        decoded = dequantize(data.reshape(-1), type, (ne0, n_rows)).reshape(n_rows, ne0 // _SUB, per_sub, size)
        out[:, :, :, first : first + n] = decoded[:, :, :n].transpose(0, 1, 3, 2)
    return out
