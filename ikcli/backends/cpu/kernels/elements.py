"""Element-wise kernels of single architectures: factors, gates. float32, rows contiguous."""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import scale_span, span
from ikcli.backends.cpu.kernels.common import POS, n_rows, state_word
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import AlibiParams, GateParams, PosScaleParams, ScaleParams, SoftCapParams
from ikcli.graph.ops_alibi import BASE, BLOCK
from ikcli.native.jit import inline
from ikcli.native.simd.math import vexp, vsigmoid
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i32,
    load_f32x16,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vadd,
    vdiv,
    vmul,
    vsub,
)

_F0, _F1, _F2 = np.float32(0.0), np.float32(1.0), np.float32(2.0)


def make_scale():
    @kernel(ScaleParams)
    def scale(params, ith, nth):
        x, out, factor = params.x, params.out, params.factor
        lo, hi = span(n_rows(params) * params.cols, ith, nth)
        scale_span(out, x, factor, lo, hi)

    return scale


def make_softcap():
    """Return cap * tanh(x / cap), as cap - 2 cap / (1 + e**(2 x / cap))."""

    @kernel(SoftCapParams)
    def softcap(params, ith, nth):
        x, out, cap = params.x, params.out, params.cap
        lo, hi = span(n_rows(params) * params.cols, ith, nth)
        slope, twice = _F2 / cap, _F2 * cap
        full = lo + ((hi - lo) & ~15)
        vslope, vtwice, vcap, one = splat_f32x16(slope), splat_f32x16(twice), splat_f32x16(cap), splat_f32x16(_F1)
        for i in range(lo, full, 16):
            e = vexp(vmul(load_f32x16(x + 4 * i), vslope))
            store_f32x16(out + 4 * i, vsub(vcap, vdiv(vtwice, vadd(e, one))))
        for i in range(full, hi):
            st_f32(out + 4 * i, cap * np.float32(math.tanh(ld_f32(x + 4 * i) / cap)))

    return softcap


@inline
def sigmoid(x):
    return _F1 / (_F1 + np.float32(math.exp(-x)))


@inline
def softplus(x):
    return max(x, np.float32(0.0)) + np.float32(math.log1p(math.exp(-abs(x)))) + (x - x)  # NaN stays


@inline
def itself(x):
    return x


_GATES = {"sigmoid": sigmoid, "softplus": softplus, "product": itself}


def make_gate(kind):
    value = _GATES[kind]

    @kernel(GateParams)
    def gate(params, ith, nth):
        x, gates, out, cols, parts = params.x, params.gate, params.out, params.cols, params.gate_cols
        width = cols // parts
        if width == 1 and kind == "sigmoid":
            gate_each(x, gates, out, n_rows(params) * cols, ith, nth)
            return
        if width == 1 and kind == "product":
            multiply_each(x, gates, out, n_rows(params) * cols, ith, nth)
            return
        items = n_rows(params) * parts
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            g = value(ld_f32(gates + 4 * item))
            scale_span(out + 4 * item * width, x + 4 * item * width, g, 0, width)

    return gate


@inline
def gate_each(x, gates, out, n, ith, nth):
    """Apply this thread's share of n values that have a gate each."""
    lo, hi = span(n, ith, nth)
    full = lo + ((hi - lo) & ~15)
    for i in range(lo, full, 16):
        store_f32x16(out + 4 * i, vmul(load_f32x16(x + 4 * i), vsigmoid(load_f32x16(gates + 4 * i))))
    for i in range(full, hi):
        st_f32(out + 4 * i, ld_f32(x + 4 * i) * sigmoid(ld_f32(gates + 4 * i)))


@inline
def multiply_each(x, y, out, n, ith, nth):
    """Multiply this thread's share of n pairs of values."""
    lo, hi = span(n, ith, nth)
    full = lo + ((hi - lo) & ~15)
    for i in range(lo, full, 16):
        store_f32x16(out + 4 * i, vmul(load_f32x16(x + 4 * i), load_f32x16(y + 4 * i)))
    for i in range(full, hi):
        st_f32(out + 4 * i, ld_f32(x + 4 * i) * ld_f32(y + 4 * i))


def make_pos_scale():
    """Return a kernel over rows, one per token."""

    @kernel(PosScaleParams)
    def pos_scale(params, ith, nth):
        x, out, cols, length, shift = params.x, params.out, params.cols, params.length, params.shift
        scale, pos = params.scale, state_word(params, POS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            steps = (np.int64(ld_i32(pos + 4 * row)) + shift) // length
            factor = np.float32(1.0 + scale * math.log1p(np.float64(steps)))
            scale_span(out + 4 * row * cols, x + 4 * row * cols, factor, 0, cols)

    return pos_scale


def make_alibi():
    """Return a kernel that writes columns of queries or keys (`graph/ops_alibi.py`)."""

    @kernel(AlibiParams)
    def alibi(params, ith, nth):
        out, width, slopes, heads = params.out, params.width, params.slopes, params.heads
        pos, first = state_word(params, POS), width - BLOCK
        items = n_rows(params) * heads
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            dst, p = out + 4 * item * width, np.int64(ld_i32(pos + 4 * (item // heads)))
            for i in range(first):
                st_f32(dst + 4 * i, _F0)
            slope = _F1 if slopes == 0 else ld_f32(slopes + 4 * (item % heads))
            st_f32(dst + 4 * first, np.float32(BASE) if slopes == 0 else _F0)
            st_f32(dst + 4 * (first + 1), np.float32(p % BASE) if slopes == 0 else slope)
            for i in range(BLOCK - 2):
                part = min(max(p // BASE - BASE * i, 0), BASE)
                st_f32(dst + 4 * (first + 2 + i), np.float32(part) if slopes == 0 else np.float32(BASE) * slope)

    return alibi
