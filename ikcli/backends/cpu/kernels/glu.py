"""Activation functions of vectors and numbers, alone and with a gate (defined in `graph/activations.py`)."""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import span
from ikcli.backends.cpu.kernels.common import n_rows
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import ClampParams, GluParams, MapParams
from ikcli.graph.activations import GELU_CUBE, GELU_SLOPE, QUICK_SLOPE
from ikcli.native.jit import inline
from ikcli.native.simd.math import vexp, vsilu
from ikcli.native.simd.tanh import vtanh
from ikcli.native.simd.vec import (
    ld_f32,
    load_f32x16,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vabs,
    vadd,
    vdiv,
    vfma,
    vmax,
    vmin,
    vmul,
    vsub,
)

_F = np.float32
_F0, _HALF, _F1, _FAR = _F(0.0), _F(0.5), _F(1.0), _F(100.0)
_ERFC_STEP = _F(0.5 / math.sqrt(2))
# Half of erfc by the Chebyshev fit of Numerical Recipes (erfcc), highest power first.
_ERFC = tuple(_F(c) for c in (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223 - math.log(2),
))  # fmt: skip
_GELU_SLOPE, _GELU_CUBED, _QUICK = _F(GELU_SLOPE), _F(GELU_SLOPE * GELU_CUBE), _F(QUICK_SLOPE)


@inline
def vsigmoid_times(x, y):
    """Return x * sigmoid(y); y of any size."""
    y = vmin(vmax(y, splat_f32x16(-_FAR)), splat_f32x16(_FAR))
    return vdiv(x, vadd(splat_f32x16(_F1), vexp(vsub(splat_f32x16(_F0), y))))


@inline
def sigmoid_times(x, y):
    return x / (_F1 + _F(math.exp(-min(max(y, -_FAR), _FAR))))


@inline
def vkept(x, y):
    """Return y, or NaN where x is NaN or infinite, which minimum and maximum would lose."""
    return vfma(vsub(x, x), splat_f32x16(_F0), y)


@inline
def kept(x, y):
    return y + (x - x) * _F0


@inline
def silu(x):
    return x / (_F1 + _F(math.exp(-x)))


@inline
def vgelu(x):
    u = vmul(x, vfma(vmul(x, x), splat_f32x16(_GELU_CUBED), splat_f32x16(_GELU_SLOPE)))
    return vsigmoid_times(x, u)


@inline
def gelu(x):
    return sigmoid_times(x, x * (x * x * _GELU_CUBED + _GELU_SLOPE))


@inline
def vgelu_erf(x):
    """Return x/2 * erfc(-x/sqrt(2)); erfc of |x| as t * e**(P(t) - x**2/2), whose relative error is about 1e-7."""
    size = vmin(vabs(x), splat_f32x16(_FAR))
    t = vdiv(splat_f32x16(_F1), vfma(size, splat_f32x16(_ERFC_STEP), splat_f32x16(_F1)))
    p = vfma(splat_f32x16(_ERFC[0]), t, splat_f32x16(_ERFC[1]))
    p = vfma(p, t, splat_f32x16(_ERFC[2]))
    p = vfma(p, t, splat_f32x16(_ERFC[3]))
    p = vfma(p, t, splat_f32x16(_ERFC[4]))
    p = vfma(p, t, splat_f32x16(_ERFC[5]))
    p = vfma(p, t, splat_f32x16(_ERFC[6]))
    p = vfma(p, t, splat_f32x16(_ERFC[7]))
    p = vfma(p, t, splat_f32x16(_ERFC[8]))
    p = vfma(p, t, splat_f32x16(_ERFC[9]))
    half_erfc = vmul(t, vexp(vfma(vmul(size, size), splat_f32x16(-_HALF), p)))
    return vkept(x, vsub(vmax(x, splat_f32x16(_F0)), vmul(size, half_erfc)))


@inline
def gelu_erf(x):
    size = min(abs(x), _FAR)
    t = _F1 / (size * _ERFC_STEP + _F1)
    p = (((_ERFC[0] * t + _ERFC[1]) * t + _ERFC[2]) * t + _ERFC[3]) * t + _ERFC[4]
    p = ((((p * t + _ERFC[5]) * t + _ERFC[6]) * t + _ERFC[7]) * t + _ERFC[8]) * t + _ERFC[9]
    return kept(x, max(x, _F0) - size * (t * _F(math.exp(p - _HALF * size * size))))


@inline
def vgelu_quick(x):
    return vsigmoid_times(x, vmul(x, splat_f32x16(_QUICK)))


@inline
def gelu_quick(x):
    return sigmoid_times(x, x * _QUICK)


@inline
def vrelu(x):
    return vkept(x, vmax(x, splat_f32x16(_F0)))


@inline
def relu(x):
    return kept(x, max(x, _F0))


@inline
def vrelu_sqr(x):
    return vmul(vrelu(x), vrelu(x))


@inline
def relu_sqr(x):
    return relu(x) * relu(x)


@inline
def velu_rest(x):
    y = vmin(x, splat_f32x16(_F0))
    return vkept(x, vsub(vsub(vexp(vmax(y, splat_f32x16(-_FAR))), splat_f32x16(_F1)), y))


@inline
def elu_rest(x):
    y = min(x, _F0)
    return kept(x, _F(math.exp(max(y, -_FAR))) - _F1 - y)


_UNARY = {
    "silu": (vsilu, silu), "gelu": (vgelu, gelu), "gelu_quick": (vgelu_quick, gelu_quick), "relu": (vrelu, relu),
    "relu_sqr": (vrelu_sqr, relu_sqr), "gelu_erf": (vgelu_erf, gelu_erf),
    "elu_rest": (velu_rest, elu_rest),
}  # fmt: skip


def _gated(kind, limited):
    """Return (vector, scalar) functions of (gate, up, limit, alpha)."""
    if kind == "swiglu_oai":
        return _oai(limited)
    if kind == "silu_of_capped":
        return _silu_of_capped(limited)
    if kind == "situ":
        return _situ(limited)
    vact, act = _UNARY[kind]
    if not limited:

        @inline
        def vglu(gate, up, limit, alpha):
            return vmul(vact(gate), up)

        @inline
        def glu(gate, up, limit, alpha):
            return act(gate) * up

        return vglu, glu

    @inline
    def vclamped(gate, up, limit, alpha):
        value = vact(gate)
        return vmul(vkept(value, vmin(value, splat_f32x16(limit))), vclamp(up, limit))

    @inline
    def clamped(gate, up, limit, alpha):
        value = act(gate)
        return kept(value, min(value, limit)) * clamp(up, limit)

    return vclamped, clamped


@inline
def vclamp(x, limit):
    return vkept(x, vmin(vmax(x, splat_f32x16(-limit)), splat_f32x16(limit)))


@inline
def clamp(x, limit):
    return kept(x, min(max(x, -limit), limit))


def _oai(limited):
    @inline
    def vglu(gate, up, limit, alpha):
        if limited:
            gate, up = vkept(gate, vmin(gate, splat_f32x16(limit))), vclamp(up, limit)
        return vmul(vsigmoid_times(gate, vmul(gate, splat_f32x16(alpha))), vadd(up, splat_f32x16(_F1)))

    @inline
    def glu(gate, up, limit, alpha):
        if limited:
            gate, up = kept(gate, min(gate, limit)), clamp(up, limit)
        return sigmoid_times(gate, gate * alpha) * (up + _F1)

    return vglu, glu


def _silu_of_capped(limited):
    @inline
    def vglu(gate, up, limit, alpha):
        if limited:
            gate, up = vkept(gate, vmin(gate, splat_f32x16(limit))), vclamp(up, limit)
        return vmul(vsilu(gate), up)

    @inline
    def glu(gate, up, limit, alpha):
        if limited:
            gate, up = kept(gate, min(gate, limit)), clamp(up, limit)
        return silu(gate) * up

    return vglu, glu


def _situ(limited):
    @inline
    def vglu(gate, up, limit, alpha):
        if limited:
            up = vmul(splat_f32x16(limit), vtanh(vmul(up, splat_f32x16(_F1 / limit))))
        return vmul(vsigmoid_times(vmul(splat_f32x16(alpha), vtanh(vmul(gate, splat_f32x16(_F1 / alpha)))), gate), up)

    @inline
    def glu(gate, up, limit, alpha):
        if limited:
            up = limit * _F(math.tanh(up * (_F1 / limit)))
        return sigmoid_times(alpha * _F(math.tanh(gate * (_F1 / alpha))), gate) * up

    return vglu, glu


def glu_span(kind, limited):
    """Return a function of (out, gate, up, lo, hi, limit, alpha): elements lo to hi of `Glu`."""
    vglu, glu = _gated(kind, limited)

    @inline
    def run(out, gate, up, lo, hi, limit, alpha):
        full = lo + ((hi - lo) & ~15)
        for i in range(lo, full, 16):
            store_f32x16(out + 4 * i, vglu(load_f32x16(gate + 4 * i), load_f32x16(up + 4 * i), limit, alpha))
        for i in range(full, hi):
            st_f32(out + 4 * i, glu(ld_f32(gate + 4 * i), ld_f32(up + 4 * i), limit, alpha))

    return run


def make_glu(kind, limited):
    glu = glu_span(kind, limited)

    @kernel(GluParams)
    def run(params, ith, nth):
        lo, hi = span(n_rows(params) * params.cols, ith, nth)
        glu(params.out, params.gate, params.up, lo, hi, params.limit, params.alpha)

    return run


def make_unary(kind):
    vact, act = _UNARY[kind]

    @kernel(MapParams)
    def unary(params, ith, nth):
        x, out = params.x, params.out
        lo, hi = span(n_rows(params) * params.cols, ith, nth)
        full = lo + ((hi - lo) & ~15)
        for i in range(lo, full, 16):
            store_f32x16(out + 4 * i, vact(load_f32x16(x + 4 * i)))
        for i in range(full, hi):
            st_f32(out + 4 * i, act(ld_f32(x + 4 * i)))

    return unary


def make_clamp():
    @kernel(ClampParams)
    def run(params, ith, nth):
        x, out, limit = params.x, params.out, params.limit
        lo, hi = span(n_rows(params) * params.cols, ith, nth)
        full = lo + ((hi - lo) & ~15)
        for i in range(lo, full, 16):
            store_f32x16(out + 4 * i, vclamp(load_f32x16(x + 4 * i), limit))
        for i in range(full, hi):
            st_f32(out + 4 * i, clamp(ld_f32(x + 4 * i), limit))

    return run
