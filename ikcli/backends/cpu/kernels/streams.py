"""Residuals of several streams (`graph/ops_streams.py`).

Hyper-connections: the weights of the streams, their sum before a layer and their mixture after it. AltUp: the streams
predicted from each other, corrected, and brought to one level. Also attention to earlier outputs, whose sum is weighted
by a soft-max of scores of themselves.
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import scale_span, sum_squares
from ikcli.backends.cpu.kernels.common import n_rows
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import (
    GatedStreamsParams,
    ResidualParams,
    StreamAddParams,
    StreamLevelParams,
    StreamMatchParams,
    StreamParams,
    StreamWeightsParams,
)
from ikcli.native.jit import inline
from ikcli.native.simd.math import vsigmoid
from ikcli.native.simd.vec import (
    ld_f32,
    load_f32x16,
    reduce_add,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vfma,
    vmul,
    zero_f32x16,
)

_LEAST = np.float32(1e-6)
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
                after = params.most * _sigmoid(ld_f32(out + 4 * i))
                st_f32(out + 4 * i, after + eps if cols == 2 * n else after)
            if cols == 2 * n:
                continue
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
                if params.weight_cols == 2 * n:  # streams go on as they are
                    for j in range(n):
                        at = 4 * cols * j + c
                        store_f32x16(
                            out + at, vfma(own, splat_f32x16(ld_f32(weights + 4 * (n + j))), load_f32x16(x + at))
                        )
                    continue
                for j in range(n):
                    total = vmul(own, splat_f32x16(ld_f32(weights + 4 * (n + j))))
                    for i in range(n):
                        share = splat_f32x16(ld_f32(weights + 4 * (2 * n + n * i + j)))
                        total = vfma(load_f32x16(x + 4 * cols * i + c), share, total)
                    store_f32x16(out + 4 * cols * j + c, total)

    return stream_mix


def make_gated_streams():
    """Return the kernel of the mean of gated streams."""

    @kernel(GatedStreamsParams)
    def gated_streams(params, ith, nth):
        n, cols, factor = params.n, params.cols, splat_f32x16(params.factor)
        items = n_rows(params) * (cols // 16)
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, c = item // (cols // 16), 64 * (item % (cols // 16))
            at, total = 4 * n * cols * row + c, zero_f32x16()
            for i in range(n):
                gate = vsigmoid(load_f32x16(params.gate + at + 4 * cols * i))
                total = vfma(load_f32x16(params.x + at + 4 * cols * i), gate, total)
            store_f32x16(params.out + 4 * cols * row + c, vmul(total, factor))

    return gated_streams


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
        n, cols, scale = params.n, params.cols, params.scale
        items = n_rows(params) * n
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            x, out = params.x + 4 * cols * item, params.out + 4 * cols * item
            if item % n < params.first:
                scale_span(out, x, _F1, 0, cols)
                continue
            share, added = _F1, params.added + 4 * cols * (item // n)
            if params.weights:
                weight = ld_f32(params.weights + 4 * item)
                share = _F1 + weight if scale == _F0 else _F2 * _sigmoid(scale * weight)
            v = splat_f32x16(share)
            for c in range(0, 4 * cols, 64):
                store_f32x16(out + c, vfma(load_f32x16(added + c), v, load_f32x16(x + c)))

    return stream_add


def make_stream_match():
    """Return the kernel that gates a value by how well keys of streams fit their queries."""

    @kernel(StreamMatchParams)
    def stream_match(params, ith, nth):
        n, cols = params.n, params.cols
        items = n_rows(params) * n
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            at, total = 4 * cols * item, zero_f32x16()
            for c in range(0, 4 * cols, 64):
                total = vfma(load_f32x16(params.key + at + c), load_f32x16(params.query + at + c), total)
            fit = reduce_add(total) * params.scale
            root = np.float32(math.sqrt(max(abs(fit), _LEAST)))
            gate = splat_f32x16(_sigmoid(_F0 if fit == _F0 else root if fit > _F0 else -root))
            value = params.value + 4 * cols * (item // n)
            for c in range(0, 4 * cols, 64):
                store_f32x16(params.out + at + c, vmul(load_f32x16(value + c), gate))

    return stream_match


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


@inline
def _score(x, w, cols, eps):
    """Return the product of a row with w, over the root mean square of the row."""
    squares, product = zero_f32x16(), zero_f32x16()
    for c in range(0, 4 * cols, 64):
        v = load_f32x16(x + c)
        squares = vfma(v, v, squares)
        product = vfma(v, load_f32x16(w + c), product)
    return reduce_add(product) / np.float32(math.sqrt(reduce_add(squares) / np.float32(cols) + eps))


def make_residual_attn():
    """Return the kernel that mixes rows with earlier ones."""

    @kernel(ResidualParams)
    def residual_attn(params, ith, nth):
        n, cols, w, eps = params.n, params.cols, params.w, params.eps
        shares = params.scratch + params.scratch_bytes * ith
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            kept, x, out = params.kept + 4 * n * cols * row, params.x + 4 * cols * row, params.out + 4 * cols * row
            top = _score(x, w, cols, eps)
            st_f32(shares + 4 * n, top)
            for i in range(n):
                score = _score(kept + 4 * cols * i, w, cols, eps)
                st_f32(shares + 4 * i, score)
                top = max(top, score)
            total = _F0
            for i in range(n + 1):
                e = np.float32(math.exp(ld_f32(shares + 4 * i) - top))
                st_f32(shares + 4 * i, e)
                total += e
            for i in range(n + 1):
                st_f32(shares + 4 * i, ld_f32(shares + 4 * i) / total)
            for c in range(0, 4 * cols, 64):
                mixed = vmul(load_f32x16(x + c), splat_f32x16(ld_f32(shares + 4 * n)))
                for i in range(n):
                    mixed = vfma(load_f32x16(kept + 4 * cols * i + c), splat_f32x16(ld_f32(shares + 4 * i)), mixed)
                store_f32x16(out + c, mixed)

    return residual_attn
