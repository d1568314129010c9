"""Encode ternary rows: find the scale d of least weighted squared error, then pack codes -1, 0, 1.

An element is nonzero if |x| > d/2, whatever its weight; d is the weighted mean of |x| over those elements. A coarse
pass over thresholds finds the right region, Lloyd's iteration the optimum in it. Rows whose elements are all 0 or of
one magnitude keep that magnitude. Sums run over |x| / max|x|, so that nothing overflows.
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.half import ld_f16, st_f16
from ikcli.native.simd.vec import (
    cvt_f32x16_i32,
    ld_i64,
    ld_u8,
    load_f32x16,
    reduce_add,
    reduce_max,
    splat_f32x16,
    st_f32,
    st_i8,
    store_f32x16,
    store_i8x16,
    trunc_i32x16_i8,
    vabs,
    vadd,
    vfma,
    vmax,
    vmul,
    vor,
    vshl,
    zero_f32x16,
)
from ikcli.quant.encoders.lane_kernels import where_less

_F0, _F1, _HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
_LEAST = np.float32(1e-37)  # of the divisor of a row
_F16_MAX = np.float32(65504.0)
_TRIALS, _FIRST, _RATIO, _ITERATIONS = 16, np.float32(0.75), np.float32(0.7), 24


@inline
def scale_row(x, n, amax, inverse, out):
    """Store |x| * inverse; return the largest |x| that is below the largest of all."""
    top, second, factor = splat_f32x16(amax), zero_f32x16(), splat_f32x16(inverse)
    for i in range(n // 16):
        v = vabs(load_f32x16(x + 64 * i))
        store_f32x16(out + 64 * i, vmul(v, factor))
        second = vmax(second, where_less(v, top, v, zero_f32x16()))
    return reduce_max(second)


@inline
def fit(xs, weights, n, threshold):
    """Return the sum of weights and of weighted magnitudes above the threshold."""
    t, total, mass = splat_f32x16(threshold), zero_f32x16(), zero_f32x16()
    zero, one = zero_f32x16(), splat_f32x16(_F1)
    for i in range(n // 16):
        v = load_f32x16(xs + 64 * i)
        w = where_less(t, v, load_f32x16(weights + 64 * i) if weights != 0 else one, zero)
        mass = vadd(mass, w)
        total = vfma(w, v, total)
    return reduce_add(mass), reduce_add(total)


@inline
def best_scale(xs, weights, n):
    """Return the scale of least error of a row of magnitudes."""
    threshold, best, d = _FIRST, _F0, _F0
    for _ in range(_TRIALS):
        mass, total = fit(xs, weights, n, threshold)
        if mass > _F0 and total * (total / mass) > best:
            best, d = total * (total / mass), total / mass
        threshold *= _RATIO
    for _ in range(_ITERATIONS):
        mass, total = fit(xs, weights, n, _HALF * d)
        if not mass > _F0 or total / mass == d:
            break
        d = total / mass
    return d


@inline
def codes(x, threshold):
    """Return 0, 1, 2 for 16 elements below -threshold, between, above threshold."""
    v, t = load_f32x16(x), splat_f32x16(threshold)
    up = where_less(t, v, splat_f32x16(np.float32(2.0)), splat_f32x16(_F1))
    return cvt_f32x16_i32(where_less(v, splat_f32x16(-threshold), zero_f32x16(), up))


@inline
def pack_two_bits(x, threshold, out):
    """Pack 64 elements into 16 bytes: byte p holds elements p, p + 16, p + 32, p + 48."""
    low = vor(codes(x, threshold), vshl(codes(x + 64, threshold), 2))
    high = vor(vshl(codes(x + 128, threshold), 4), vshl(codes(x + 192, threshold), 6))
    store_i8x16(out, trunc_i32x16_i8(vor(low, high)))


@inline
def base3(number):
    """Return five digits as a byte from which multiplications recover them."""
    return (256 * number + 242) // 243


@inline
def pack_base3(x, threshold, scratch, out):
    """Pack 64 elements into 13 bytes: five digits per byte.

    The last byte holds the last element of each run of 16.
    """
    rest, power = 0, 1
    for run in range(4):
        store_i8x16(scratch, trunc_i32x16_i8(codes(x + 64 * run, threshold)))
        for i in range(3):
            at = scratch + 5 * i
            number = ld_u8(at) + 3 * ld_u8(at + 1) + 9 * ld_u8(at + 2) + 27 * ld_u8(at + 3) + 81 * ld_u8(at + 4)
            st_i8(out + 3 * run + i, base3(number))
        rest += power * ld_u8(scratch + 15)
        power *= 3
    st_i8(out + 12, base3(rest))


def make_ternary(two_bits):
    """Return the encoder of rows for IQ2_BN (two_bits = 1) or IQ1_BN.

    slots: 0 x, 1 weights or 0, 2 rows, 3 ne0, 4 scratch (ne0 + 16 f32), 5 out.
    """
    header, block = (4, 16) if two_bits else (2, 13)

    def ternary(slots):
        x, weights, n_rows, ne0 = ld_i64(slots), ld_i64(slots + 8), ld_i64(slots + 16), ld_i64(slots + 24)
        xs, out = ld_i64(slots + 32), ld_i64(slots + 40)
        for row in range(n_rows):
            src = x + 4 * ne0 * row
            largest = zero_f32x16()
            for i in range(ne0 // 16):
                largest = vmax(largest, vabs(load_f32x16(src + 64 * i)))
            amax = reduce_max(largest)
            unit = max(amax, _LEAST)
            second = scale_row(src, ne0, amax, _F1 / unit, xs)
            d = amax
            if second > _F0:
                d = min(np.float32(best_scale(xs, weights, ne0) * unit), amax)
            if two_bits:
                st_f32(out, d)
            else:
                st_f16(out, min(d, _F16_MAX))
                d = ld_f16(out)
            threshold = _HALF * d if d > _F0 else amax
            for b in range(ne0 // 64):
                at = out + header + block * b
                if two_bits:
                    pack_two_bits(src + 256 * b, threshold, at)
                else:
                    pack_base3(src + 256 * b, threshold, xs + 4 * ne0, at)
            out += header + block * (ne0 // 64)

    return ternary, 1, False
