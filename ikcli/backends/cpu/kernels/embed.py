"""Rows of the token embedding as float32, for every weight type."""

import numpy as np

from ikcli.backends.cpu.jit import inline
from ikcli.backends.cpu.kernels.common import TOKENS, n_rows, state_word, word
from ikcli.backends.cpu.kernels.formats import scale_min_6bit
from ikcli.backends.cpu.simd.vec import ld_bf16, ld_f16, ld_f32, ld_i8, ld_i32, ld_u8, st_f32


def _float_row(ld, size):
    @inline
    def row(w, out, k):
        for i in range(k):
            st_f32(out + 4 * i, ld(w + size * i))

    return row


@inline
def row_q8_0(w, out, k):
    for ib in range(k // 32):
        d = ld_f16(w + 34 * ib)
        for i in range(32):
            st_f32(out + 4 * (32 * ib + i), d * np.float32(ld_i8(w + 34 * ib + 2 + i)))


@inline
def row_q4_0(w, out, k):
    for ib in range(k // 32):
        d = ld_f16(w + 18 * ib)
        for i in range(16):
            q = ld_u8(w + 18 * ib + 2 + i)
            st_f32(out + 4 * (32 * ib + i), d * np.float32((q & 15) - 8))
            st_f32(out + 4 * (32 * ib + 16 + i), d * np.float32((q >> 4) - 8))


@inline
def row_q5_0(w, out, k):
    for ib in range(k // 32):
        p = w + 22 * ib
        d, high = ld_f16(p), ld_i32(p + 2)
        for i in range(16):
            q = ld_u8(p + 6 + i)
            st_f32(out + 4 * (32 * ib + i), d * np.float32(((q & 15) | ((high >> i) & 1) << 4) - 16))
            st_f32(out + 4 * (32 * ib + 16 + i), d * np.float32(((q >> 4) | ((high >> (i + 16)) & 1) << 4) - 16))


@inline
def row_q4_k(w, out, k):
    for sb in range(k // 256):
        p = w + 144 * sb
        d, dmin = ld_f16(p), ld_f16(p + 2)
        for j in range(8):
            sc, mn = scale_min_6bit(p + 4, j)
            scale, low = d * np.float32(sc), dmin * np.float32(mn)
            for i in range(32):
                q = (ld_u8(p + 16 + 32 * (j >> 1) + i) >> (4 * (j & 1))) & 15
                st_f32(out + 4 * (256 * sb + 32 * j + i), scale * np.float32(q) - low)


@inline
def row_q5_k(w, out, k):
    for sb in range(k // 256):
        p = w + 176 * sb
        d, dmin = ld_f16(p), ld_f16(p + 2)
        for j in range(8):
            sc, mn = scale_min_6bit(p + 4, j)
            scale, low = d * np.float32(sc), dmin * np.float32(mn)
            for i in range(32):
                q = (ld_u8(p + 48 + 32 * (j >> 1) + i) >> (4 * (j & 1))) & 15
                q |= ((ld_u8(p + 16 + i) >> j) & 1) << 4
                st_f32(out + 4 * (256 * sb + 32 * j + i), scale * np.float32(q) - low)


@inline
def row_q6_k(w, out, k):
    for sb in range(k // 256):
        p = w + 210 * sb
        d = ld_f16(p + 208)
        for e in range(256):
            half, g, i = e >> 7, (e >> 5) & 3, e & 31
            low = (ld_u8(p + 64 * half + 32 * (g & 1) + i) >> (4 * (g >> 1))) & 15
            high = (ld_u8(p + 128 + 32 * half + i) >> (2 * g)) & 3
            scale = d * np.float32(ld_i8(p + 192 + (e >> 4)))
            st_f32(out + 4 * (256 * sb + e), scale * np.float32((low | high << 4) - 32))


EMBED_FORMATS = {
    "f32": _float_row(ld_f32, 4),
    "f16": _float_row(ld_f16, 2),
    "bf16": _float_row(ld_bf16, 2),
    "q8_0": row_q8_0,
    "q4_0": row_q4_0,
    "q5_0": row_q5_0,
    "q4_K": row_q4_k,
    "q5_K": row_q5_k,
    "q6_K": row_q6_k,
}


def make_embed(type_name):
    """params: 3 w, 4 row bytes, 5 columns, 6 out."""
    dequantize_row = EMBED_FORMATS[type_name]

    def embed(params, ith, nth):
        w, row_bytes, cols, out = word(params, 3), word(params, 4), word(params, 5), word(params, 6)
        tokens = state_word(params, TOKENS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            dequantize_row(w + ld_i32(tokens + 4 * row) * row_bytes, out + 4 * row * cols, cols)

    return embed
