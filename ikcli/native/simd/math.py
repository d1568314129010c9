"""Vector functions on f32x16: exp, sigmoid, silu, logarithm; about one ulp, correct at the extremes."""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bits_f32x16_i32,
    bits_i32x16_f32,
    cvt_f32x16_i32,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
    vabs,
    vadd,
    vdiv,
    vfma,
    vmax,
    vmax_fast,
    vmin,
    vmul,
    vround_even,
    vshl,
    vsub,
)

_F = np.float32
_LOG2E, _LN2_HI, _LN2_LO = _F(1.44269504), _F(0.693359375), _F(-2.12194440e-4)
_C = [_F(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5, 1.0)]
_C0, _C1, _C2, _C3, _C4, _C5, _ONE = _C
_LOWEST, _HIGHEST = _F(-87.33), _F(88.37)
_ZERO = _F(0.0)
_HALF, _LN2, _SQRT2_1 = _F(0.5), _F(0.69314718), _F(0.41421356)
_L = tuple(_F(c) for c in (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
))  # fmt: skip


@inline
def _exp_parts(x):
    """Return (p, 2**n) with e**x = p * 2**n, for x in [_LOWEST, _HIGHEST] (Cephes expf polynomial)."""
    n = vround_even(vmul(x, splat_f32x16(_LOG2E)))
    r = vfma(n, splat_f32x16(-_LN2_HI), x)
    r = vfma(n, splat_f32x16(-_LN2_LO), r)
    p = vfma(splat_f32x16(_C0), r, splat_f32x16(_C1))
    p = vfma(p, r, splat_f32x16(_C2))
    p = vfma(p, r, splat_f32x16(_C3))
    p = vfma(p, r, splat_f32x16(_C4))
    p = vfma(p, r, splat_f32x16(_C5))
    p = vfma(p, vmul(r, r), vadd(r, splat_f32x16(_ONE)))
    return p, bits_i32x16_f32(vshl(vadd(cvt_f32x16_i32(n), splat_i32x16(127)), 23))


@inline
def vexp(x):
    """Return e**x; below -87.3 the smallest normal numbers, above 88.3 the largest. NaN gives NaN."""
    nan = vmul(vsub(x, x), splat_f32x16(_ZERO))  # 0, or NaN for NaN and Inf
    p, two_n = _exp_parts(vmin(vmax(x, splat_f32x16(_LOWEST)), splat_f32x16(_HIGHEST)))
    return vfma(p, two_n, nan)


@inline
def vexp_fast(x):
    """Return e**x for x that is never NaN and never above 0 (soft-max); -inf gives a number below 1.2e-38."""
    p, two_n = _exp_parts(vmax_fast(x, splat_f32x16(_LOWEST)))
    return vmul(p, two_n)


@inline
def vsilu(x):
    """Return x / (1 + e**-x)."""
    one = splat_f32x16(_ONE)
    return vdiv(x, vadd(one, vexp(vsub(splat_f32x16(_ZERO), x))))


@inline
def vsigmoid(x):
    """Return 1 / (1 + e**-x)."""
    one = splat_f32x16(_ONE)
    return vdiv(one, vadd(one, vexp(vsub(splat_f32x16(_ZERO), x))))


@inline
def vsoftplus(x):
    """Return log(1 + e**x)."""
    zero = splat_f32x16(_ZERO)
    return vadd(vmax(x, zero), vlog1p_unit(vexp(vsub(zero, vabs(x)))))


@inline
def vlog1p_unit(y):
    """Return log(1 + y) for y of 0 to 1, with small relative error down to 0 (Cephes logf polynomial)."""
    one = splat_f32x16(_ONE)
    # log(1 + y) as it is up to sqrt(2), from there on as log(2) + log((1 + y) / 2): small numbers are not rounded.
    small = vsub(splat_f32x16(_SQRT2_1), y)
    low = bits_f32x16_i32(small)
    half = vmul(vsub(y, one), splat_f32x16(_HALF))
    f = select_less_i32(low, splat_i32x16(0), half, y)
    shift = select_less_i32(low, splat_i32x16(0), splat_f32x16(_LN2), splat_f32x16(_ZERO))
    p = splat_f32x16(_L[0])
    p = vfma(p, f, splat_f32x16(_L[1]))
    p = vfma(p, f, splat_f32x16(_L[2]))
    p = vfma(p, f, splat_f32x16(_L[3]))
    p = vfma(p, f, splat_f32x16(_L[4]))
    p = vfma(p, f, splat_f32x16(_L[5]))
    p = vfma(p, f, splat_f32x16(_L[6]))
    p = vfma(p, f, splat_f32x16(_L[7]))
    p = vfma(p, f, splat_f32x16(_L[8]))
    square = vmul(f, f)
    tail = vfma(vmul(p, f), square, vmul(square, splat_f32x16(-_HALF)))
    return vadd(vadd(f, tail), shift)
