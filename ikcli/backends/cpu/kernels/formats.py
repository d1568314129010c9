"""Weight formats for the integer kernels: per type, how one row is dotted in registers and unpacked into a tile.

`dot_row(w, a, k)` multiplies a stored row with a quantized activation row (generation: memory-bound).
`unpack_row(w, tile, r, k)` writes row r of a 16-row tile (prompt: compute-bound); tile layout in `simd/gemm.py`.
Layouts: ggml-common.h. Symmetric codes are biased to code + 128 so that they fit the unsigned operand.
"""

import numpy as np

from ikcli.backends.cpu.jit import inline
from ikcli.backends.cpu.simd.dot import dot_u8_i8_half
from ikcli.backends.cpu.simd.lanes import (
    bits_i8x32,
    decode_scales_6bit,
    first_i32x8,
    high_half_f32x16,
    lane_scalar,
    low_half_f32x16,
    scatter_dwords,
    splat_lane,
    spread_scales,
)
from ikcli.backends.cpu.simd.vec import (
    concat_i8x16,
    cvt_i32x8_f32,
    cvt_i32x16_f32,
    ld_f16,
    ld_f32,
    ld_i32,
    load_f32x8,
    load_i8x16,
    load_i8x32,
    pair_i32x8,
    reduce_add,
    sext_i8x16_i32,
    splat_f32x8,
    splat_f32x16,
    splat_i8x16,
    splat_i8x32,
    st_f32,
    vadd,
    vand,
    vfma,
    vlshr,
    vmul,
    vor,
    vshl,
    vxor,
    zero_f32x8,
    zero_i32x8,
)

_F0 = np.float32(0.0)


# --- q8_0: d f16, 32 int8 --------------------------------------------------------------------------------------------
@inline
def dot_q8_0(w, a, k):
    nb = k // 32
    acc = zero_f32x8()
    flip = splat_i8x32(128)
    for ib in range(nb):
        codes = vxor(load_i8x32(w + 2), flip)
        dot = dot_u8_i8_half(first_i32x8(a + k + 8 * nb + 4 * ib), codes, load_i8x32(a + 32 * ib))
        acc = vfma(cvt_i32x8_f32(dot), splat_f32x8(ld_f16(w) * ld_f32(a + k + 4 * ib)), acc)
        w += 34
    return reduce_add(acc)


@inline
def unpack_q8_0(w, tile, r, k):
    flip = splat_i8x32(128)
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, vxor(load_i8x32(w + 2), flip))
        w += 34
        tile += 576


# --- q4_0: d f16, 16 bytes (low nibbles first half) ------------------------------------------------------------------
@inline
def nibbles(p):
    """32 codes 0..15 from 16 bytes: low nibbles, then high nibbles."""
    v = load_i8x16(p)
    mask = splat_i8x16(15)
    return concat_i8x16(vand(v, mask), vand(vlshr(v, 4), mask))


@inline
def dot_q4_0(w, a, k):
    nb = k // 32
    acc = zero_f32x8()
    bias = splat_i8x32(120)
    for ib in range(nb):
        codes = vadd(nibbles(w + 2), bias)
        dot = dot_u8_i8_half(first_i32x8(a + k + 8 * nb + 4 * ib), codes, load_i8x32(a + 32 * ib))
        acc = vfma(cvt_i32x8_f32(dot), splat_f32x8(ld_f16(w) * ld_f32(a + k + 4 * ib)), acc)
        w += 18
    return reduce_add(acc)


@inline
def unpack_q4_0(w, tile, r, k):
    bias = splat_i8x32(120)
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, vadd(nibbles(w + 2), bias))
        w += 18
        tile += 576


# --- q5_0: d f16, fifth bits u32, 16 bytes of nibbles ---------------------------------------------------------------
@inline
def codes_q5_0(w):
    """32 codes + 112 (so that 16 becomes 128)."""
    high = vshl(bits_i8x32(w + 2), 4)
    return vadd(vor(nibbles(w + 6), high), splat_i8x32(112))


@inline
def dot_q5_0(w, a, k):
    nb = k // 32
    acc = zero_f32x8()
    for ib in range(nb):
        dot = dot_u8_i8_half(first_i32x8(a + k + 8 * nb + 4 * ib), codes_q5_0(w), load_i8x32(a + 32 * ib))
        acc = vfma(cvt_i32x8_f32(dot), splat_f32x8(ld_f16(w) * ld_f32(a + k + 4 * ib)), acc)
        w += 22
    return reduce_add(acc)


@inline
def unpack_q5_0(w, tile, r, k):
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, codes_q5_0(w))
        w += 22
        tile += 576


# --- q4_K: d, dmin f16, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles -------------------------------------
@inline
def dot_q4_k(w, a, k):
    nb = k // 32
    acc, acc_min = zero_f32x8(), zero_f32x8()
    mask = splat_i8x32(15)
    d_at, s_at = a + k, a + k + 4 * nb
    for ib in range(0, nb, 8):
        scales = cvt_i32x16_f32(decode_scales_6bit(w + 4))
        acc_min = vfma(vmul(high_half_f32x16(scales), splat_f32x8(-ld_f16(w + 2))), load_f32x8(s_at + 4 * ib), acc_min)
        sc = vmul(vmul(low_half_f32x16(scales), splat_f32x8(ld_f16(w))), load_f32x8(d_at + 4 * ib))
        for j in range(4):
            q, x = load_i8x32(w + 16 + 32 * j), a + 32 * ib + 64 * j
            lo = dot_u8_i8_half(zero_i32x8(), vand(q, mask), load_i8x32(x))
            hi = dot_u8_i8_half(zero_i32x8(), vand(vlshr(q, 4), mask), load_i8x32(x + 32))
            acc = vfma(cvt_i32x8_f32(lo), splat_lane(sc, 2 * j), acc)
            acc = vfma(cvt_i32x8_f32(hi), splat_lane(sc, 2 * j + 1), acc)
        w += 144
    return reduce_add(vadd(acc, acc_min))


@inline
def scale_min_6bit(p, j):
    """(scale, minimum) j of 8, from the 12 packed bytes at p."""
    shift = 8 * (j & 3)
    u0, u1, u2 = ld_i32(p), ld_i32(p + 4), ld_i32(p + 8)
    if j < 4:
        return (u0 >> shift) & 63, (u1 >> shift) & 63
    lo = (u2 >> shift) & 255
    return (lo & 15) | (((u0 >> shift) >> 6) & 3) << 4, (lo >> 4) | (((u1 >> shift) >> 6) & 3) << 4


@inline
def unpack_q4_k(w, tile, r, k):
    mask = splat_i8x32(15)
    for _ in range(k // 256):
        d, dmin = ld_f16(w), ld_f16(w + 2)
        for j in range(8):
            sc, mn = scale_min_6bit(w + 4, j)
            st_f32(tile + 640 * j + 4 * r, d * np.float32(sc))
            st_f32(tile + 640 * j + 64 + 4 * r, -dmin * np.float32(mn))
        for j in range(4):
            q = load_i8x32(w + 16 + 32 * j)
            scatter_dwords(tile + 1280 * j + 128 + 4 * r, vand(q, mask))
            scatter_dwords(tile + 1280 * j + 768 + 4 * r, vand(vlshr(q, 4), mask))
        w += 144
        tile += 8 * 640


# --- q5_K: as q4_K with 32 bytes of fifth bits before the nibbles ----------------------------------------------------
@inline
def codes_q5_k(w, j):
    """32 codes of sub-block j (0..7)."""
    low = vand(vlshr(load_i8x32(w + 48 + 32 * (j >> 1)), 4 * (j & 1)), splat_i8x32(15))
    high = vshl(vand(vlshr(load_i8x32(w + 16), j), splat_i8x32(1)), 4)
    return vor(low, high)


@inline
def dot_q5_k(w, a, k):
    nb = k // 32
    acc, acc_min = zero_f32x8(), zero_f32x8()
    d_at, s_at = a + k, a + k + 4 * nb
    for ib in range(0, nb, 8):
        scales = cvt_i32x16_f32(decode_scales_6bit(w + 4))
        acc_min = vfma(
            vmul(high_half_f32x16(scales), splat_f32x8(-ld_f16(w + 2))), load_f32x8(s_at + 4 * ib), acc_min
        )
        sc = vmul(vmul(low_half_f32x16(scales), splat_f32x8(ld_f16(w))), load_f32x8(d_at + 4 * ib))
        for j in range(8):
            dot = dot_u8_i8_half(zero_i32x8(), codes_q5_k(w, j), load_i8x32(a + 32 * (ib + j)))
            acc = vfma(cvt_i32x8_f32(dot), splat_lane(sc, j), acc)
        w += 176
    return reduce_add(vadd(acc, acc_min))


@inline
def unpack_q5_k(w, tile, r, k):
    for _ in range(k // 256):
        d, dmin = ld_f16(w), ld_f16(w + 2)
        for j in range(8):
            sc, mn = scale_min_6bit(w + 4, j)
            st_f32(tile + 4 * r, d * np.float32(sc))
            st_f32(tile + 64 + 4 * r, -dmin * np.float32(mn))
            scatter_dwords(tile + 128 + 4 * r, codes_q5_k(w, j))
            tile += 640
        w += 176


# --- q6_K: ql[128], qh[64], int8 scales[16] (per 16 columns), d f16 ---------------------------------------------------
@inline
def codes_q6_k(w, half, g):
    """32 codes + 96 (so that 32 becomes 128) of group g (0..3) of a half (128 columns)."""
    ql = load_i8x32(w + 64 * half + 32 * (g & 1))
    qh = load_i8x32(w + 128 + 32 * half)
    low = vand(vlshr(ql, 4 * (g >> 1)), splat_i8x32(15))
    high = vshl(vand(vlshr(qh, 2 * g), splat_i8x32(3)), 4)
    return vadd(vor(low, high), splat_i8x32(96))


@inline
def dot_q6_k(w, a, k):
    nb = k // 32
    acc = zero_f32x8()
    d_at, sums_at = a + k, a + k + 12 * nb
    for ib in range(0, nb, 8):
        scales = vmul(cvt_i32x16_f32(sext_i8x16_i32(load_i8x16(w + 192))), splat_f32x16(ld_f16(w + 208)))
        for g in range(8):
            b = ib + g
            start = pair_i32x8(ld_i32(sums_at + 8 * b), ld_i32(sums_at + 8 * b + 4))
            dot = dot_u8_i8_half(start, codes_q6_k(w, g >> 2, g & 3), load_i8x32(a + 32 * b))
            sc = vmul(spread_scales(scales, g), splat_f32x8(ld_f32(d_at + 4 * b)))
            acc = vfma(cvt_i32x8_f32(dot), sc, acc)
        w += 210
    return reduce_add(acc)


@inline
def unpack_q6_k(w, tile, r, k):
    for _ in range(k // 256):
        d = ld_f16(w + 208)
        scales = cvt_i32x16_f32(sext_i8x16_i32(load_i8x16(w + 192)))
        for g in range(8):
            st_f32(tile + 4 * r, d * lane_scalar(scales, 2 * g))
            st_f32(tile + 64 + 4 * r, d * lane_scalar(scales, 2 * g + 1))
            scatter_dwords(tile + 128 + 4 * r, codes_q6_k(w, g >> 2, g & 3))
            tile += 640
        w += 210


# type name -> (dot_row, unpack_row, tile mode)
INTEGER_FORMATS = {
    "q8_0": (dot_q8_0, unpack_q8_0, "s32"),
    "q4_0": (dot_q4_0, unpack_q4_0, "s32"),
    "q5_0": (dot_q5_0, unpack_q5_0, "s32"),
    "q4_K": (dot_q4_k, unpack_q4_k, "m32"),
    "q5_K": (dot_q5_k, unpack_q5_k, "m32"),
    "q6_K": (dot_q6_k, unpack_q6_k, "s16"),
}
