"""Read rows of embeddings as float32."""

import numpy as np

from ikcli.backends.cpu.kernels.common import POS, TOKENS, n_rows, state_word
from ikcli.backends.cpu.kernels.formats import is_float, weight_format
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.rowformat import dequantize_row
from ikcli.backends.cpu.params_layers import EmbedParams, EmbedPositionsParams, EmbedTypesParams, HostRowsParams
from ikcli.native.jit import inline
from ikcli.native.simd.half import ld_bf16, ld_f16
from ikcli.native.simd.vec import ld_f32, ld_i32, st_f32

GIVEN = 13  # word of the state block: address of float32 rows that the caller provides
_FLOATS = {"f32": (ld_f32, 4), "f16": (ld_f16, 2), "bf16": (ld_bf16, 2)}


def _float_row(type_name):
    ld, size = _FLOATS[type_name]

    @inline
    def row(w, out, k):
        for i in range(k):
            st_f32(out + 4 * i, ld(w + size * i))

    return row


def make_embed(type_name):
    """Return a kernel for the embeddings of tokens."""
    dequantize = _dequantize(type_name)

    @kernel(EmbedParams)
    def embed(params, ith, nth):
        w, row_bytes, cols, out = params.w, params.row_bytes, params.cols, params.out
        tokens = state_word(params, TOKENS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            dequantize(w + ld_i32(tokens + 4 * row) * row_bytes, out + 4 * row * cols, cols)

    return embed


def make_embed_positions(type_name):
    """Return a kernel for the embeddings of positions; NaN for those that have none."""
    dequantize = _dequantize(type_name)

    @kernel(EmbedPositionsParams)
    def embed(params, ith, nth):
        w, row_bytes, cols, out = params.w, params.row_bytes, params.cols, params.out
        pos, n_pos = state_word(params, POS), params.n_pos
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            p = ld_i32(pos + 4 * row)
            if p < n_pos:
                dequantize(w + p * row_bytes, out + 4 * row * cols, cols)
            else:
                for i in range(cols):
                    st_f32(out + 4 * (row * cols + i), np.float32(np.nan))

    return embed


def make_host_rows():
    """Return a kernel that copies the rows which the caller provides."""

    @kernel(HostRowsParams)
    def host_rows(params, ith, nth):
        given, n = state_word(params, GIVEN), n_rows(params) * params.cols
        for i in range(n * ith // nth, n * (ith + 1) // nth):
            st_f32(params.out + 4 * i, ld_f32(given + 4 * i))

    return host_rows


def make_embed_types(type_name):
    """Return a kernel for the embeddings of the part of its text that a token is in."""
    dequantize = _dequantize(type_name)

    @kernel(EmbedTypesParams)
    def embed(params, ith, nth):
        w, row_bytes, cols, out, sep = params.w, params.row_bytes, params.cols, params.out, params.sep
        tokens, pos = state_word(params, TOKENS), state_word(params, POS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            part = 0
            if sep >= 0:
                for i in range(row - ld_i32(pos + 4 * row), row):
                    if ld_i32(tokens + 4 * i) == sep:
                        part = 1
                        break
            dequantize(w + part * row_bytes, out + 4 * row * cols, cols)

    return embed


def _dequantize(type_name):
    return _float_row(type_name) if is_float(type_name) else dequantize_row(weight_format(type_name))
