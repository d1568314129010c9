"""Residuals of several streams (`graph/ops_streams.py`).

Hyper-connections: the weights of the streams, their sum before a layer and their mixture after it. AltUp: the streams
predicted from each other, corrected, and brought to one level.
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import scale_span, sum_squares
from ikcli.backends.cpu.kernels.common import n_rows
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import StreamAddParams, StreamLevelParams, StreamParams, StreamWeightsParams
from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    ld_f32,
    load_f32x16,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vfma,
    vmul,
    zero_f32x16,
)

_F0, _F1, _F2 = np.float32(0.0), np.float32(1.0), np.float32(2.0)


@inline
def _sigmoid(x):
    return _F1 / (_F1 + np.float32(math.exp(-x)))


@inline
def _divide(m, n, step, over, eps):
    """Divide the numbers at m by sums along one axis: `step` bytes from number to number, `over` from sum to sum."""
    for i in range(n):
        total = _F0
        for j in range(n):
            total += ld_f32(m + over * i + step * j)
        for j in range(n):
            at = m + over * i + step * j
            st_f32(at, ld_f32(at) / (total + eps))


def make_stream_weights():
    """Return the kernel that makes the weights of rows from their projections."""

    @kernel(StreamWeightsParams)
    def stream_weights(params, ith, nth):
        n, cols, base, scale, eps = params.n, params.cols, params.base, params.scale, params.eps
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            x, out = params.x + 4 * cols * row, params.out + 4 * cols * row
            for i in range(cols):
                part = min(i // n, 2)
                st_f32(out + 4 * i, ld_f32(x + 4 * i) * ld_f32(scale + 4 * part) + ld_f32(base + 4 * i))
            for i in range(n):
                st_f32(out + 4 * i, _sigmoid(ld_f32(out + 4 * i)) + eps)
            if cols == n:
                continue
            for i in range(n, 2 * n):
                st_f32(out + 4 * i, _F2 * _sigmoid(ld_f32(out + 4 * i)))
            mixing = out + 8 * n
            for i in range(n):
                at, top, total = mixing + 4 * n * i, ld_f32(mixing + 4 * n * i), _F0
                for j in range(1, n):
                    top = max(top, ld_f32(at + 4 * j))
                for j in range(n):
                    e = np.float32(math.exp(ld_f32(at + 4 * j) - top))
                    st_f32(at + 4 * j, e)
                    total += e
                for j in range(n):
                    st_f32(at + 4 * j, ld_f32(at + 4 * j) / total + eps)
            _divide(mixing, n, 4 * n, 4, eps)
            for _ in range(params.n_iter - 1):
                _divide(mixing, n, 4, 4 * n, eps)
                _divide(mixing, n, 4 * n, 4, eps)

    return stream_weights


def make_stream_sum():
    """Return the kernel that sums up the streams of rows."""

    @kernel(StreamParams)
    def stream_sum(params, ith, nth):
        n, cols = params.n, params.cols
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            x, weights = params.x + 4 * n * cols * row, params.weights + 4 * params.weight_cols * row
            out = params.out + 4 * cols * row
            for c in range(0, 4 * cols, 64):
                total = zero_f32x16()
                for i in range(n):
                    total = vfma(load_f32x16(x + 4 * cols * i + c), splat_f32x16(ld_f32(weights + 4 * i)), total)
                store_f32x16(out + c, total)

    return stream_sum


def make_stream_mix():
    """Return the kernel that mixes the streams of rows and adds their shares."""

    @kernel(StreamParams)
    def stream_mix(params, ith, nth):
        n, cols = params.n, params.cols
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            x, weights = params.x + 4 * n * cols * row, params.weights + 4 * params.weight_cols * row
            added, out = params.added + 4 * cols * row, params.out + 4 * n * cols * row
            for c in range(0, 4 * cols, 64):
                own = load_f32x16(added + c)
                for j in range(n):
                    total = vmul(own, splat_f32x16(ld_f32(weights + 4 * (n + j))))
                    for i in range(n):
                        share = splat_f32x16(ld_f32(weights + 4 * (2 * n + n * i + j)))
                        total = vfma(load_f32x16(x + 4 * cols * i + c), share, total)
                    store_f32x16(out + 4 * cols * j + c, total)

    return stream_mix


def make_stream_predict():
    """Return the kernel that adds sums of all streams to the streams of rows."""

    @kernel(StreamParams)
    def stream_predict(params, ith, nth):
        n, cols = params.n, params.cols
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            x, weights = params.x + 4 * n * cols * row, params.weights + 4 * params.weight_cols * row
            out = params.out + 4 * n * cols * row
            for c in range(0, 4 * cols, 64):
                for j in range(n):
                    total = load_f32x16(x + 4 * cols * j + c)
                    for i in range(n):
                        share = splat_f32x16(ld_f32(weights + 4 * (n * j + i)))
                        total = vfma(load_f32x16(x + 4 * cols * i + c), share, total)
                    store_f32x16(out + 4 * cols * j + c, total)

    return stream_predict


def make_stream_add():
    """Return the kernel that adds a row to streams, by their shares of it."""

    @kernel(StreamAddParams)
    def stream_add(params, ith, nth):
        n, cols, first, weights = params.n, params.cols, params.first, params.weights
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            x, added, out = (
                params.x + 4 * n * cols * row,
                params.added + 4 * cols * row,
                params.out + 4 * n * cols * row,
            )
            for j in range(n):
                at = 4 * cols * j
                if j < first:
                    scale_span(out + at, x + at, _F1, 0, cols)
                    continue
                share = _F1
                if weights:
                    share += ld_f32(weights + 4 * (n * row + j))
                v = splat_f32x16(share)
                for c in range(0, 4 * cols, 64):
                    store_f32x16(out + at + c, vfma(load_f32x16(added + c), v, load_f32x16(x + at + c)))

    return stream_add


def make_stream_level():
    """Return the kernel that scales streams to the mean square of the first."""

    @kernel(StreamLevelParams)
    def stream_level(params, ith, nth):
        n, cols = params.n, params.cols
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            x, out = params.x + 4 * n * cols * row, params.out + 4 * n * cols * row
            first = sum_squares(x, cols) / np.float32(cols)
            scale_span(out, x, _F1, 0, cols)
            for j in range(1, n):
                at = 4 * cols * j
                own = sum_squares(x + at, cols) / np.float32(cols)
                own = params.least if own < params.least else own  # NaN stays
                scale_span(out + at, x + at, np.float32(math.sqrt(first / own)), 0, cols)

    return stream_level
