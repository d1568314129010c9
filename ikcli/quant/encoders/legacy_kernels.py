"""Encode blocks of 32 without search: codes follow from the largest value, or the largest and smallest.

Kernel arguments: x (f32), number of blocks, out. Results equal the reference's bytes. Corresponds to
quantize_row_*_ref of ggml-quants.c: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, MXFP4.
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.half import st_f16
from ikcli.native.simd.vec import (
    bits_i32x16_f32,
    cvt_f32x16_i32,
    cvt_i32x16_f32,
    ld_f32,
    load_f32x16,
    reduce_add,
    reduce_max,
    splat_f32x16,
    splat_i32x16,
    st_i8,
    st_i32,
    store_i8x16,
    trunc_i32x16_i8,
    vabs,
    vadd,
    vfma,
    vmax,
    vmin,
    vmul,
    vor,
    vshl,
    vsub,
    zero_f32x16,
)
from ikcli.quant.encoders.lane_kernels import copy_sign, mask_less, where_less

_F0, _F1, _HALF, _F16_MAX = np.float32(0.0), np.float32(1.0), np.float32(0.5), np.float32(65504.0)
_BELOW_HALF = np.float32(np.nextafter(np.float32(0.5), np.float32(0.0)))


@inline
def inverse(d):
    return _F1 / d if d != _F0 else _F0


@inline
def held(d):
    """Clamp d to the finite half floats."""
    return min(max(d, -_F16_MAX), _F16_MAX)


@inline
def largest_of_block(x, v0, v1):
    """Return the value of largest magnitude with its sign, the first one of equals."""
    hi = reduce_max(vmax(v0, v1))
    lo = -reduce_max(vsub(zero_f32x16(), vmin(v0, v1)))
    if hi != -lo:
        return hi if hi > -lo else lo
    for i in range(32):
        if abs(ld_f32(x + 4 * i)) == hi:
            return ld_f32(x + 4 * i)
    return hi


@inline
def store_codes(out, q0, q1, n_bits):
    """Store codes as 4-bit pairs; the fifth bits of 5-bit codes come before them in a separate word."""
    if n_bits == 5:
        fifteen = splat_f32x16(np.float32(15.5))
        st_i32(out, mask_less(fifteen, q0) | mask_less(fifteen, q1) << 16)
        out += 4
        top = splat_f32x16(np.float32(16.0))
        q0 = where_less(fifteen, q0, vsub(q0, top), q0)
        q1 = where_less(fifteen, q1, vsub(q1, top), q1)
    pairs = vor(cvt_f32x16_i32(q0), vshl(cvt_f32x16_i32(q1), 4))
    store_i8x16(out, trunc_i32x16_i8(pairs))


@inline
def whole_codes(v, factor, offset, highest):
    """Return trunc(v * factor + offset), at most `highest`, as floats."""
    y = vfma(v, splat_f32x16(factor), splat_f32x16(offset))
    return cvt_i32x16_f32(cvt_f32x16_i32(vmin(y, splat_f32x16(highest))))


def make_symmetric(n_bits, narrow):
    """Return the encoder of Q4_0 and Q5_0, which give the largest value the lowest code.

    `narrow`: codes -7..7 of Q4_0, 7 or -7 for the largest.
    """
    half = 1 << (n_bits - 1)
    offset, highest = np.float32(half + 0.5), np.float32(2 * half - 1)
    divisor = np.float32(half - 1 if narrow else -half)
    n_bytes = 18 if n_bits == 4 else 22

    def symmetric(x, n_blocks, out):
        for _ in range(n_blocks):
            v0, v1 = load_f32x16(x), load_f32x16(x + 64)
            if narrow:
                d = reduce_max(vmax(vabs(v0), vabs(v1))) / divisor
            else:
                d = largest_of_block(x, v0, v1) / divisor
            factor = inverse(d)
            st_f16(out, held(d))
            q0, q1 = whole_codes(v0, factor, offset, highest), whole_codes(v1, factor, offset, highest)
            store_codes(out + 2, q0, q1, n_bits)
            x += 128
            out += n_bytes

    return symmetric, 3, False


def make_asymmetric(n_bits):
    """Return the encoder of Q4_1 and Q5_1: codes from the smallest to the largest value."""
    highest = np.float32((1 << n_bits) - 1)
    n_bytes = 20 if n_bits == 4 else 24

    def asymmetric(x, n_blocks, out):
        for _ in range(n_blocks):
            v0, v1 = load_f32x16(x), load_f32x16(x + 64)
            lo = _F0 - reduce_max(vsub(zero_f32x16(), vmin(v0, v1)))
            d = (reduce_max(vmax(v0, v1)) - lo) / highest
            factor = inverse(d)
            st_f16(out, held(d))
            st_f16(out + 2, held(lo))
            low = splat_f32x16(lo)
            q0 = whole_codes(vsub(v0, low), factor, _HALF, highest)
            q1 = whole_codes(vsub(v1, low), factor, _HALF, highest)
            store_codes(out + 4, q0, q1, n_bits)
            x += 128
            out += n_bytes

    return asymmetric, 3, False


@inline
def rounded_away(v):
    """Round to nearest integers, ties away from zero."""
    return cvt_f32x16_i32(vadd(v, copy_sign(splat_f32x16(_BELOW_HALF), v)))


def make_q8_0():
    """Return the encoder of Q8_0: d = max|x| / 127."""

    def q8_0(x, n_blocks, out):
        for _ in range(n_blocks):
            v0, v1 = load_f32x16(x), load_f32x16(x + 64)
            d = reduce_max(vmax(vabs(v0), vabs(v1))) / np.float32(127.0)
            factor = splat_f32x16(inverse(d))
            st_f16(out, held(d))
            store_i8x16(out + 2, trunc_i32x16_i8(rounded_away(vmul(v0, factor))))
            store_i8x16(out + 18, trunc_i32x16_i8(rounded_away(vmul(v1, factor))))
            x += 128
            out += 34

    return q8_0, 3, False


@inline
def power_of_two(e):
    """Return 2^e for -126 <= e <= 127, in all lanes."""
    return bits_i32x16_f32(vshl(splat_i32x16(127 + e), 23))


@inline
def e2m1(v, e):
    """Return (codes without sign, their values) of |v| / 2^(e-128).

    A value is the nearest of 0 1 2 3 4 6 8 12, ties to the smaller.
    """
    half = (128 - e) // 2
    y = vmul(vmul(vabs(v), power_of_two(half)), power_of_two(128 - e - half))
    zero, one = zero_f32x16(), splat_f32x16(_F1)
    code, value = zero, zero
    for step in range(7):
        at = np.float32(0.5 + step if step < 4 else (5.0 if step == 4 else (7.0 if step == 5 else 10.0)))
        jump = _F1 if step < 4 else (np.float32(4.0) if step == 6 else np.float32(2.0))
        above = splat_f32x16(at)
        code = vadd(code, where_less(above, y, one, zero))
        value = vadd(value, where_less(above, y, splat_f32x16(jump), zero))
    return y, code, value


@inline
def mxfp4_exponent(largest):
    """Return floor(log2(largest)) - 2 + 127 with the logarithm rounded to float32, as the reference does."""
    return max(0, np.int64(np.floor(np.float32(np.log2(np.float64(largest))))) + 125) if largest > _F0 else 0


@inline
def mxfp4_error(v0, v1, w0, w1, e):
    """Return the weighted squared error of a block for exponent e, in units of 2^(2*(e-128))."""
    y, _, k = e2m1(v0, e)
    a = vsub(y, k)
    y, _, k = e2m1(v1, e)
    b = vsub(y, k)
    return reduce_add(vfma(vmul(a, a), w0, vmul(vmul(b, b), w1)))


@inline
def mxfp4_search(v0, v1, weights, e0):
    """Return the exponent of the smallest weighted error near e0; e0 among equals."""
    w0, w1 = load_f32x16(weights), load_f32x16(weights + 64)
    best, least, unit = e0, mxfp4_error(v0, v1, w0, w1, e0), np.float32(4.0)
    if e0 < 252:
        error = mxfp4_error(v0, v1, w0, w1, e0 + 1) * unit
        if error < least:
            best, least = e0 + 1, error
    for down in range(1, min(e0, 4) + 1):
        unit *= np.float32(0.25) if down > 1 else np.float32(0.0625)
        error = mxfp4_error(v0, v1, w0, w1, e0 - down) * unit
        if error < least:
            best, least = e0 - down, error
    return best


@inline
def signed_e2m1(v, e):
    """Return codes with sign; negative zero is never used."""
    _, code, _ = e2m1(v, e)
    negative = where_less(v, zero_f32x16(), splat_f32x16(np.float32(8.0)), zero_f32x16())
    return vadd(code, where_less(zero_f32x16(), code, negative, zero_f32x16()))


def make_mxfp4():
    """Return the encoder of MXFP4: the largest value decides the exponent; with weights the best of six exponents."""

    def mxfp4(x, n_blocks, out, weights, ne0):
        for ib in range(n_blocks):
            v0, v1 = load_f32x16(x), load_f32x16(x + 64)
            e = mxfp4_exponent(reduce_max(vmax(vabs(v0), vabs(v1))))
            if weights != 0:
                e = mxfp4_search(v0, v1, weights + 4 * (32 * ib % ne0), e)
            st_i8(out, e)
            store_codes(out + 1, signed_e2m1(v0, e), signed_e2m1(v1, e), 4)
            x += 128
            out += 17

    return mxfp4, 5, False
