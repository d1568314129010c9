"""Read rows of embeddings as float32."""

import numpy as np

from ikcli.backends.cpu.kernels.common import (
    N_SEG,
    POS,
    SEG_N_TOKENS,
    SEG_TOKEN,
    SEG_WORDS,
    SEGMENTS,
    TOKENS,
    n_rows,
    state_word,
)
from ikcli.backends.cpu.kernels.formats import is_float, weight_format
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.rowformat import dequantize_row
from ikcli.backends.cpu.kernels.state_rows import begins, state_row
from ikcli.backends.cpu.params_layers import (
    EmbedIdsParams,
    EmbedParams,
    EmbedPositionsParams,
    EmbedTypesParams,
    HostRowsParams,
    NGramIdsParams,
)
from ikcli.native.jit import inline
from ikcli.native.simd.half import ld_bf16, ld_f16
from ikcli.native.simd.vec import ld_f32, ld_i32, ld_i64, st_f32, st_i32

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


def make_embed_ids(type_name):
    """Return a kernel for rows of a table by number, those of a token side by side."""
    dequantize = _dequantize(type_name)

    @kernel(EmbedIdsParams)
    def embed(params, ith, nth):
        w, row_bytes, cols, out = params.w, params.row_bytes, params.cols, params.out
        items = n_rows(params) * params.per_row
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            dequantize(w + ld_i32(params.ids + 4 * item) * row_bytes, out + 4 * item * cols, cols)

    return embed


def make_ngram_ids():
    """Return a kernel for the rows of n-grams in a table; one thread does it, as it also replaces the states."""

    @inline
    def token_at(tokens, state, fresh, i, before, end):
        """Return token i of a segment; those before it (i < 0) are in the state."""
        if i >= 0:
            return ld_i32(tokens + 4 * i)
        return end if fresh else int(ld_f32(state + 4 * (before + i)))

    @kernel(NGramIdsParams)
    def ngram_ids(params, ith, nth):
        if ith != 0:
            return
        before, end, per = params.before, params.end, params.per_length
        segments = state_word(params, SEGMENTS)
        for s in range(state_word(params, N_SEG)):
            segment = segments + 8 * SEG_WORDS * s
            start, n = ld_i64(segment + 8 * SEG_TOKEN), ld_i64(segment + 8 * SEG_N_TOKENS)
            tokens = state_word(params, TOKENS) + 4 * start
            state, fresh = state_row(params, s, params.states, 4 * before), begins(params, s)
            for i in range(n):
                out = params.out + 4 * per * before * (start + i)
                mixed, ended = ld_i32(tokens + 4 * i) * ld_i64(params.multipliers), False
                for j in range(1, before + 1):
                    token = end if ended else token_at(tokens, state, fresh, i - j, before, end)
                    ended = token == end
                    mixed ^= token * ld_i64(params.multipliers + 8 * j)
                    for k in range(per * (j - 1), per * j):
                        st_i32(out + 4 * k, mixed % ld_i64(params.sizes + 8 * k) + ld_i64(params.offsets + 8 * k))
            for j in range(before):  # ascending, so that what is still to be read is not replaced
                st_f32(state + 4 * j, np.float32(token_at(tokens, state, fresh, n - before + j, before, end)))

    return ngram_ids


def _dequantize(type_name):
    return _float_row(type_name) if is_float(type_name) else dequantize_row(weight_format(type_name))
