"""K-quants: super-blocks of 256 columns with packed sub-block scales (layouts: ggml-common.h)."""

import numpy as np

from ikcli.backends.cpu.jit import inline
from ikcli.backends.cpu.kernels.format_api import one_row
from ikcli.backends.cpu.simd.lanes import (
    lane_scalar,
    scatter_dwords,
)
from ikcli.backends.cpu.simd.rowdot import row_dot
from ikcli.backends.cpu.simd.vec import (
    cvt_i32x16_f32,
    ld_f16,
    ld_i32,
    load_i8x16,
    load_i8x32,
    sext_i8x16_i32,
    splat_i8x32,
    st_f32,
    vadd,
    vand,
    vlshr,
    vor,
    vshl,
)


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


FORMATS = {
    "q4_K": (1, one_row(row_dot("q4_K")), unpack_q4_k),
    "q5_K": (1, one_row(row_dot("q5_K")), unpack_q5_k),
    "q6_K": (1, one_row(row_dot("q6_K")), unpack_q6_k),
}
