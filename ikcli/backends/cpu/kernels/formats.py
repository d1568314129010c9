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
    first_i32x8,
    lane_scalar,
    scatter_dwords,
)
from ikcli.backends.cpu.simd.rowdot import row_dot
from ikcli.backends.cpu.simd.vec import (
    concat_i8x16,
    cvt_i32x8_f32,
    cvt_i32x16_f32,
    ld_f16,
    ld_f32,
    ld_i32,
    load_i8x16,
    load_i8x32,
    reduce_add,
    sext_i8x16_i32,
    splat_f32x8,
    splat_i8x16,
    splat_i8x32,
    st_f32,
    vadd,
    vand,
    vfma,
    vlshr,
    vor,
    vshl,
    vxor,
    zero_f32x8,
)

_F0 = np.float32(0.0)


@inline
def nibbles(p):
    """32 codes 0..15 from 16 bytes: low nibbles, then high nibbles."""
    v = load_i8x16(p)
    mask = splat_i8x16(15)
    return concat_i8x16(vand(v, mask), vand(vlshr(v, 4), mask))


@inline
def codes_q8_0(w):
    """32 codes + 128."""
    return vxor(load_i8x32(w + 2), splat_i8x32(128))


@inline
def codes_q4_0(w):
    """32 codes + 120 (so that 8 becomes 128)."""
    return vadd(nibbles(w + 2), splat_i8x32(120))


def _make_dot32(type_name, codes, block_bytes):
    """dot_row of a symmetric format of 32-column blocks; rows need not be multiples of 256 columns."""
    whole = row_dot(type_name)

    @inline
    def dot_row(w, a, k):
        total = whole(w, a, k)
        first, nb = k // 256 * 8, k // 32
        if first == nb:
            return total
        acc = zero_f32x8()
        for ib in range(first, nb):
            p = w + ib * block_bytes
            dot = dot_u8_i8_half(first_i32x8(a + k + 8 * nb + 4 * ib), codes(p), load_i8x32(a + 32 * ib))
            acc = vfma(cvt_i32x8_f32(dot), splat_f32x8(ld_f16(p) * ld_f32(a + k + 4 * ib)), acc)
        return total + reduce_add(acc)

    return dot_row


# --- q8_0: d f16, 32 int8 --------------------------------------------------------------------------------------------
@inline
def unpack_q8_0(w, tile, r, k):
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, codes_q8_0(w))
        w += 34
        tile += 576


# --- q4_0: d f16, 16 bytes (low nibbles first half) ------------------------------------------------------------------
@inline
def unpack_q4_0(w, tile, r, k):
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, codes_q4_0(w))
        w += 18
        tile += 576


# --- q5_0: d f16, fifth bits u32, 16 bytes of nibbles ---------------------------------------------------------------
@inline
def codes_q5_0(w):
    """32 codes + 112 (so that 16 becomes 128)."""
    high = vshl(bits_i8x32(w + 2), 4)
    return vadd(vor(nibbles(w + 6), high), splat_i8x32(112))


@inline
def unpack_q5_0(w, tile, r, k):
    for _ in range(k // 32):
        st_f32(tile + 4 * r, ld_f16(w))
        scatter_dwords(tile + 64 + 4 * r, codes_q5_0(w))
        w += 22
        tile += 576


# --- q4_K: d, dmin f16, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles -------------------------------------
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
    "q8_0": (_make_dot32("q8_0", codes_q8_0, 34), unpack_q8_0, "s32"),
    "q4_0": (_make_dot32("q4_0", codes_q4_0, 18), unpack_q4_0, "s32"),
    "q5_0": (_make_dot32("q5_0", codes_q5_0, 22), unpack_q5_0, "s32"),
    "q4_K": (row_dot("q4_K"), unpack_q4_k, "m32"),
    "q5_K": (row_dot("q5_K"), unpack_q5_k, "m32"),
    "q6_K": (row_dot("q6_K"), unpack_q6_k, "s16"),
}
