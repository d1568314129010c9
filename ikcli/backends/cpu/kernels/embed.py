"""Rows of the token embedding as float32: float types directly, the others by way of a one-row tile."""

import numpy as np

from ikcli.backends.cpu.kernels.common import TOKENS, n_rows, state_word, word
from ikcli.backends.cpu.kernels.format_api import unpack_few
from ikcli.backends.cpu.kernels.formats import FORMATS
from ikcli.backends.cpu.tile_modes import LAYOUT, MODES
from ikcli.native.jit import inline
from ikcli.native.simd.vec import ld_bf16, ld_f16, ld_f32, ld_i32, ld_u8, st_f32

_FLOATS = {"f32": (ld_f32, 4), "f16": (ld_f16, 2), "bf16": (ld_bf16, 2)}


def _float_row(type_name):
    ld, size = _FLOATS[type_name]

    @inline
    def row(w, out, k, tile):
        for i in range(k):
            st_f32(out + 4 * i, ld(w + size * i))

    return row


def _integer_row(type_name):
    unpack = unpack_few(FORMATS[type_name])
    mode = MODES[type_name]
    header, block_bytes = LAYOUT[mode]
    halves = 2 if mode.endswith("16") else 1
    with_min = mode.startswith("m")
    bias = 0 if with_min else 128

    @inline
    def row(w, out, k, tile):
        unpack(w, tile, 0, k)
        for ib in range(k // 32):
            for i in range(32):
                half = 64 * (i // 16) if halves == 2 else 0
                code = ld_u8(tile + header + 64 * (i // 4) + i % 4) - bias
                x = ld_f32(tile + half) * np.float32(code)
                if with_min:
                    x += ld_f32(tile + 64 * halves + half)
                st_f32(out + 4 * (32 * ib + i), x)
            tile += block_bytes

    return row


def make_embed(type_name):
    """params: 3 w, 4 row bytes, 5 columns, 6 out, 7 tiles, 8 tile bytes."""
    dequantize_row = _float_row(type_name) if type_name in _FLOATS else _integer_row(type_name)

    def embed(params, ith, nth):
        w, row_bytes, cols, out = word(params, 3), word(params, 4), word(params, 5), word(params, 6)
        tile = word(params, 7) + ith * word(params, 8)
        tokens = state_word(params, TOKENS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            dequantize_row(w + ld_i32(tokens + 4 * row) * row_bytes, out + 4 * row * cols, cols, tile)

    return embed
