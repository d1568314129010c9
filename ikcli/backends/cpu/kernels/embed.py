"""Rows of the token embedding as float32."""

from ikcli.backends.cpu.kernels.common import TOKENS, n_rows, state_word, word
from ikcli.backends.cpu.kernels.formats import is_float, weight_format
from ikcli.backends.cpu.kernels.rowformat import dequantize_row
from ikcli.native.jit import inline
from ikcli.native.simd.half import ld_bf16, ld_f16
from ikcli.native.simd.vec import ld_f32, ld_i32, st_f32

_FLOATS = {"f32": (ld_f32, 4), "f16": (ld_f16, 2), "bf16": (ld_bf16, 2)}


def _float_row(type_name):
    ld, size = _FLOATS[type_name]

    @inline
    def row(w, out, k):
        for i in range(k):
            st_f32(out + 4 * i, ld(w + size * i))

    return row


def make_embed(type_name):
    """params: 3 w, 4 row bytes, 5 columns, 6 out."""
    dequantize = _float_row(type_name) if is_float(type_name) else dequantize_row(weight_format(type_name))

    def embed(params, ith, nth):
        w, row_bytes, cols, out = word(params, 3), word(params, 4), word(params, 5), word(params, 6)
        tokens = state_word(params, TOKENS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            dequantize(w + ld_i32(tokens + 4 * row) * row_bytes, out + 4 * row * cols, cols)

    return embed
