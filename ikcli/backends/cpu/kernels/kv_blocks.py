"""Read and write quantized rows of the KV cache: q8_0 q8_KV q6_0 q5_0 q5_1 q4_0 q4_1 iq4_nl.

Layouts are those of the weight types of the same names (ggml-common.h): blocks of 32 with a half-float scale, and with
a minimum in the _1 types; q8_KV has one scale for the whole row. Scales (and minima) minimise the squared error of a
block: a few scales around the extreme value are tried, codes are rounded for each, and the best is refined once by
least squares. A NaN or infinity would be lost in codes and maxima, so it goes into the scale, where it will be seen.
"""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.blocks import (
    bits_to_lanes,
    lanes_to_bits,
    make_count_above,
    make_lookup16,
    store_lane_pairs,
    two_bit_lanes,
)
from ikcli.native.simd.half import bcast_f16x16, st_f16
from ikcli.native.simd.vec import (
    cvt_f32x16_i32,
    cvt_i32x16_f32,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32x16,
    load_i8x16,
    reduce_add,
    reduce_max,
    sext_i8x16_i32,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    st_i32,
    store_i8x16,
    trunc_i32x16_i8,
    vabs,
    vadd,
    vand,
    vfma,
    vlshr,
    vmax,
    vmin,
    vmul,
    vor,
    vround_even,
    vshl,
    vsub,
    zero_f32x16,
    zext_i8x16_i32,
)
from ikcli.quant.tables import IQ4_NL_VALUES

_F0, _F1, _F2, _F32, _F127 = (np.float32(x) for x in (0, 1, 2, 32, 127))
_TINY = np.float32(1e-20)  # below it a block is zero: its squares would vanish
_FACTORS_FIRST, _FACTORS_STEP = np.float32(0.95), np.float32(0.05)  # of the three scales tried per sign
_SHRINK = np.float32(0.03)  # of the range of the _1 types, per try
# Bytes of a header of the row, elements and bytes of a block.
GEOMETRY = {
    "q8_0": (0, 32, 34), "q8_KV": (8, 32, 32), "q6_0": (0, 32, 26), "q5_0": (0, 32, 22), "q5_1": (0, 32, 24),
    "q4_0": (0, 32, 18), "q4_1": (0, 32, 20), "iq4_nl": (0, 32, 18),
}  # fmt: skip

_iq4_value = make_lookup16(IQ4_NL_VALUES)
_iq4_code = make_count_above((IQ4_NL_VALUES[1:] + IQ4_NL_VALUES[:-1]) / 2)


# --- 16 elements, from an index that is a multiple of 16 -------------------------------------------------------------
@inline
def _nibbles(qs, i):
    """Return codes of a half of a block, whose low nibbles are elements 0..15."""
    return vand(vlshr(zext_i8x16_i32(load_i8x16(qs)), (i & 16) >> 2), splat_i32x16(15))


@inline
def _scaled(block, codes, zero):
    return vmul(cvt_i32x16_f32(vsub(codes, splat_i32x16(zero))), bcast_f16x16(block))


@inline
def _with_minimum(block, codes):
    return vfma(cvt_i32x16_f32(codes), bcast_f16x16(block), bcast_f16x16(block + 2))


@inline
def _load16_q8_0(row, i):
    block = row + 34 * (i >> 5)
    return _scaled(block, sext_i8x16_i32(load_i8x16(block + 2 + (i & 31))), 0)


@inline
def _load16_q8_kv(row, i):
    return vmul(cvt_i32x16_f32(sext_i8x16_i32(load_i8x16(row + 8 + i))), splat_f32x16(ld_f32(row)))


@inline
def _load16_q6_0(row, i):
    block = row + 26 * (i >> 5)
    high = two_bit_lanes(ld_i64(block + 2), (i & 16) >> 3)
    return _scaled(block, vor(_nibbles(block + 10, i), vshl(high, 4)), 32)


@inline
def _load16_q5_0(row, i):
    block = row + 22 * (i >> 5)
    return _scaled(block, vor(_nibbles(block + 6, i), bits_to_lanes(ld_i32(block + 2) >> (i & 16), 16)), 16)


@inline
def _load16_q5_1(row, i):
    block = row + 24 * (i >> 5)
    return _with_minimum(block, vor(_nibbles(block + 8, i), bits_to_lanes(ld_i32(block + 4) >> (i & 16), 16)))


@inline
def _load16_q4_0(row, i):
    block = row + 18 * (i >> 5)
    return _scaled(block, _nibbles(block + 2, i), 8)


@inline
def _load16_q4_1(row, i):
    block = row + 20 * (i >> 5)
    return _with_minimum(block, _nibbles(block + 4, i))


@inline
def _load16_iq4_nl(row, i):
    block = row + 18 * (i >> 5)
    return vmul(_iq4_value(_nibbles(block + 2, i)), bcast_f16x16(block))


LOAD16 = {
    "q8_0": _load16_q8_0, "q8_KV": _load16_q8_kv, "q6_0": _load16_q6_0, "q5_0": _load16_q5_0, "q5_1": _load16_q5_1,
    "q4_0": _load16_q4_0, "q4_1": _load16_q4_1, "iq4_nl": _load16_iq4_nl,
}  # fmt: skip


# --- packing: codes of the first and second half of a block ----------------------------------------------------------
@inline
def _put_nibbles(qs, a, b):
    fifteen = splat_i32x16(15)
    store_i8x16(qs, trunc_i32x16_i8(vor(vand(a, fifteen), vshl(vand(b, fifteen), 4))))


@inline
def _put_fifth(qh, a, b):
    st_i32(qh, lanes_to_bits(a, 16) | lanes_to_bits(b, 16) << 16)


@inline
def _pack_q6_0(block, a, b):
    store_lane_pairs(block + 2, vor(vlshr(a, 4), vshl(vlshr(b, 4), 2)))
    _put_nibbles(block + 10, a, b)


@inline
def _pack_q5_0(block, a, b):
    _put_fifth(block + 2, a, b)
    _put_nibbles(block + 6, a, b)


@inline
def _pack_q5_1(block, a, b):
    _put_fifth(block + 4, a, b)
    _put_nibbles(block + 8, a, b)


@inline
def _pack_q4_0(block, a, b):
    _put_nibbles(block + 2, a, b)


@inline
def _pack_q4_1(block, a, b):
    _put_nibbles(block + 4, a, b)


# --- storing ---------------------------------------------------------------------------------------------------------
@inline
def _nan_of(x, y):
    """Return 0, or NaN if a lane is NaN or infinite."""
    return reduce_add(vmul(vadd(x, y), splat_f32x16(_F0)))


@inline
def _int8(x, inverse):
    return trunc_i32x16_i8(cvt_f32x16_i32(vround_even(vmul(x, splat_f32x16(inverse)))))


@inline
def _store_q8_0(row, i, src, n):
    dst = row + 34 * (i >> 5)
    for j in range(0, n, 32):
        x, y = load_f32x16(src + 4 * j), load_f32x16(src + 4 * j + 64)
        largest = reduce_max(vmax(vabs(x), vabs(y)))
        inverse = _F127 / largest if largest > _F0 else _F0
        st_f16(dst, largest / _F127 + _nan_of(x, y))
        store_i8x16(dst + 2, _int8(x, inverse))
        store_i8x16(dst + 18, _int8(y, inverse))
        dst += 34


@inline
def _store_q8_kv(row, i, src, n):
    """Store a whole row: i is 0."""
    top, nan = zero_f32x16(), zero_f32x16()
    for j in range(0, n, 16):
        x = load_f32x16(src + 4 * j)
        top = vmax(top, vabs(x))
        nan = vfma(x, splat_f32x16(_F0), nan)
    largest = reduce_max(top)
    inverse = _F127 / largest if largest > _TINY else _F0
    total = zero_f32x16()
    for j in range(0, n, 16):
        codes = vround_even(vmul(load_f32x16(src + 4 * j), splat_f32x16(inverse)))
        total = vadd(total, codes)
        store_i8x16(row + 8 + j, trunc_i32x16_i8(cvt_f32x16_i32(codes)))
    st_f32(row, largest / _F127 + reduce_add(nan))
    st_i32(row + 4, np.int64(reduce_add(total)))


def _make_symmetric(zero):
    """Return code(x), level(code) of codes 0..2*zero-1 for the levels -zero..zero-1."""
    lowest, highest = np.float32(-zero), np.float32(zero - 1)

    @inline
    def code(x):
        level = vmin(vmax(vround_even(x), splat_f32x16(lowest)), splat_f32x16(highest))
        return vadd(cvt_f32x16_i32(level), splat_i32x16(zero))

    @inline
    def level(codes):
        return cvt_i32x16_f32(vsub(codes, splat_i32x16(zero)))

    return code, level, lowest, highest


def _make_store_scaled(block_bytes, code, level, lowest, highest, pack):
    """Return a store with one scale per block.

    The extreme value may get a level around the lowest or the highest one.
    """

    @inline
    def products(x, y, inverse):
        """Return the sum of x * level, and the sum of level**2."""
        scale = splat_f32x16(inverse)
        a, b = level(code(vmul(x, scale))), level(code(vmul(y, scale)))
        return reduce_add(vfma(x, a, vmul(y, b))), reduce_add(vfma(a, a, vmul(b, b)))

    @inline
    def best_scale(x, y, extreme):
        """Return (scale, inverse of the scale that the codes are rounded with)."""
        top_xl, top_ll, best = _F0, _F1, _F0
        for k in range(7):
            if k == 6:
                inverse = top_ll / top_xl if top_xl != _F0 else _F0
            else:
                outer = lowest if k < 3 else highest
                inverse = outer * (_FACTORS_FIRST + _FACTORS_STEP * np.float32(k % 3)) / extreme
            xl, ll = products(x, y, inverse)
            if xl * xl * top_ll > top_xl * top_xl * ll:
                top_xl, top_ll, best = xl, ll, inverse
        return top_xl / top_ll, best

    @inline
    def store(row, i, src, n):
        dst = row + block_bytes * (i >> 5)
        for j in range(0, n, 32):
            x, y = load_f32x16(src + 4 * j), load_f32x16(src + 4 * j + 64)
            high = reduce_max(vmax(x, y))
            low = -reduce_max(vmax(vsub(zero_f32x16(), x), vsub(zero_f32x16(), y)))
            extreme = high if high > -low else low
            scale, inverse = _F0, _F0
            if abs(extreme) > _TINY:
                scale, inverse = best_scale(x, y, extreme)
            st_f16(dst, scale + _nan_of(x, y))
            v = splat_f32x16(inverse)
            pack(dst, code(vmul(x, v)), code(vmul(y, v)))
            dst += block_bytes

    return store


def _make_store_range(block_bytes, highest, pack):
    """Return a store with scale and minimum per block.

    It tries ranges a little inside the smallest and largest value.
    """
    top_code = np.float32(highest)

    @inline
    def codes_of(x, low, inverse):
        level = vround_even(vmul(vsub(x, splat_f32x16(low)), splat_f32x16(inverse)))
        return vmin(vmax(level, zero_f32x16()), splat_f32x16(top_code))

    @inline
    def fit(x, y, low, inverse, mean):
        """Return 32 * covariance of values and codes, 32 * variance of the codes, mean code."""
        a, b = codes_of(x, low, inverse), codes_of(y, low, inverse)
        mid = reduce_add(vadd(a, b)) / _F32
        m, c = splat_f32x16(mean), splat_f32x16(mid)
        da, db = vsub(a, c), vsub(b, c)
        return reduce_add(vfma(vsub(x, m), da, vmul(vsub(y, m), db))), reduce_add(vfma(da, da, vmul(db, db))), mid

    @inline
    def best_range(x, y, low, width):
        """Return (scale, minimum, low end and inverse scale that the codes are rounded with)."""
        mean = reduce_add(vadd(x, y)) / _F32
        top_cov, top_var, top_mid, best_low, best = _F0, _F1, _F0, low, _F0
        for k in range(4):
            if k == 3:
                at = mean - top_cov / top_var * top_mid
                inverse = top_var / top_cov if top_cov > _F0 else _F0
            else:
                inside = _SHRINK * np.float32(k)
                at = low + inside * width
                inverse = top_code / (width * (_F1 - _F2 * inside))
            cov, var, mid = fit(x, y, at, inverse, mean)
            if cov * cov * top_var > top_cov * top_cov * var:
                top_cov, top_var, top_mid, best_low, best = cov, var, mid, at, inverse
        scale = top_cov / top_var
        return scale, mean - scale * top_mid, best_low, best

    @inline
    def store(row, i, src, n):
        dst = row + block_bytes * (i >> 5)
        for j in range(0, n, 32):
            x, y = load_f32x16(src + 4 * j), load_f32x16(src + 4 * j + 64)
            low = -reduce_max(vmax(vsub(zero_f32x16(), x), vsub(zero_f32x16(), y)))
            width = reduce_max(vmax(x, y)) - low
            scale, minimum, at, inverse = _F0, low, low, _F0
            if width > _TINY:
                scale, minimum, at, inverse = best_range(x, y, low, width)
            st_f16(dst, scale + _nan_of(x, y))
            st_f16(dst + 2, minimum)
            pack(dst, cvt_f32x16_i32(codes_of(x, at, inverse)), cvt_f32x16_i32(codes_of(y, at, inverse)))
            dst += block_bytes

    return store


STORE = {
    "q8_0": _store_q8_0,
    "q8_KV": _store_q8_kv,
    "q6_0": _make_store_scaled(26, *_make_symmetric(32), _pack_q6_0),
    "q5_0": _make_store_scaled(22, *_make_symmetric(16), _pack_q5_0),
    "q5_1": _make_store_range(24, 31, _pack_q5_1),
    "q4_0": _make_store_scaled(18, *_make_symmetric(8), _pack_q4_0),
    "q4_1": _make_store_range(20, 15, _pack_q4_1),
    "iq4_nl": _make_store_scaled(18, _iq4_code, _iq4_value, np.float32(-127), np.float32(113), _pack_q4_0),
}
