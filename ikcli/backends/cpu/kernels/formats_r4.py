"""Row-interleaved forms of the legacy and K quants: 4 or 8 rows side by side, so unpacking a tile is plain stores.

Layouts: "N4" packs 32 columns of 4 rows into 64 bytes; byte 16g+4k+i holds columns B+i (low nibble) and B+8+i (high
nibble) of row k, with B = 0, 16, 4, 20 for g = 0..3 (ik_llama.cpp: iqk_quantize.cpp, repack functions).
"""

import numpy as np

from ikcli.backends.cpu.jit import inline
from ikcli.backends.cpu.simd.vec import (
    ld_f16,
    ld_u8,
    load_i8x16,
    load_i8x32,
    splat_i8x16,
    splat_i8x32,
    st_f32,
    store_i8x16,
    store_i8x32,
    vadd,
    vand,
    vlshr,
    vxor,
)


@inline
def store_n4(src, tile, r):
    """64 bytes of N4 to columns 0..31 of rows r..r+3; `tile` is the address of the code area of a 32-column block."""
    mask = splat_i8x16(15)
    for g in range(4):
        v = load_i8x16(src + 16 * g)
        column = 16 * (g & 1) + 4 * (g >> 1)
        store_i8x16(tile + 16 * column + 4 * r, vand(v, mask))
        store_i8x16(tile + 16 * (column + 8) + 4 * r, vand(vlshr(v, 4), mask))


# --- q8_0_r8: d f16[8], byte 32l+4k+i = column 4l+i of row k ----------------------------------------------------------
@inline
def unpack_q8_0_r8(w, tile, r, k):
    flip = splat_i8x32(128)
    for _ in range(k // 32):
        for i in range(8):
            st_f32(tile + 4 * (r + i), ld_f16(w + 2 * i))
        for j in range(8):
            store_i8x32(tile + 64 + 64 * j + 4 * r, vxor(load_i8x32(w + 16 + 32 * j), flip))
        w += 272
        tile += 576


# --- q4_0_r8: d f16[8], byte 32l+4k+i: columns 4l+i (low) and 16+4l+i (high) of row k ---------------------------------
@inline
def unpack_q4_0_r8(w, tile, r, k):
    mask, bias = splat_i8x32(15), splat_i8x32(120)
    for _ in range(k // 32):
        for i in range(8):
            st_f32(tile + 4 * (r + i), ld_f16(w + 2 * i))
        for j in range(4):
            v = load_i8x32(w + 16 + 32 * j)
            store_i8x32(tile + 64 + 64 * j + 4 * r, vadd(vand(v, mask), bias))
            store_i8x32(tile + 64 + 64 * (j + 4) + 4 * r, vadd(vand(vlshr(v, 4), mask), bias))
        w += 144
        tile += 576


# --- q4_k_r4: d f16[4], dmin f16[4], scales_h[16], scales_l[32], then N4 per 32 columns -------------------------------
@inline
def scale_min_r4(w, n):
    """6-bit (scale, minimum) number n = 4*sub-block + row."""
    low, high = ld_u8(w + 32 + n), ld_u8(w + 16 + (n & 15)) >> (4 * (n >> 4))
    return (low & 15) | (high & 3) << 4, (low >> 4) | ((high >> 2) & 3) << 4


@inline
def unpack_q4_k_r4(w, tile, r, k):
    for _ in range(k // 256):
        for ib in range(8):
            for i in range(4):
                sc, mn = scale_min_r4(w, 4 * ib + i)
                st_f32(tile + 4 * (r + i), ld_f16(w + 2 * i) * np.float32(sc))
                st_f32(tile + 64 + 4 * (r + i), -ld_f16(w + 8 + 2 * i) * np.float32(mn))
            store_n4(w + 64 + 64 * ib, tile + 128, r)
            tile += 640
        w += 576


FORMATS = {
    "q8_0_r8": (8, None, unpack_q8_0_r8),
    "q4_0_r8": (8, None, unpack_q4_0_r8),
    "q4_k_r4": (4, None, unpack_q4_k_r4),
}
