"""Rows that come with the micro-batch (pixels, embeddings of images), their positions, and rows joined or averaged."""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import add_span, copy_f32, scale_span
from ikcli.backends.cpu.kernels.common import N_TOKENS, n_rows, state_word
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import AxisRopeTableParams, MeanRowsParams, MediaRouteParams, MediaRowsParams
from ikcli.native.jit import inline
from ikcli.native.simd.vec import ld_f64, ld_i32, ld_i64, st_f32, st_i32

_F0, _F1 = np.float32(0.0), np.float32(1.0)
PLACES, MEDIA = 14, 15  # state words: addresses of places and rows
PLACE_BYTES, MEDIA_AT, AXES, SEEN, SEEN_END, VISUAL = 32, 0, 4, 16, 20, 24  # of a place, see graph/micro_batch.py


@inline
def place(params, token):
    """Return the address of the place of a token."""
    return state_word(params, PLACES) + PLACE_BYTES * token


def make_media_rows(replaces):
    """Return a kernel that copies columns of the rows, and x (or zeros) where a token has none."""

    @kernel(MediaRowsParams)
    def media_rows(params, ith, nth):
        x, out, cols, offset = params.x, params.out, params.cols, params.offset
        media = state_word(params, MEDIA) + 4 * offset
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            at, dst = ld_i32(place(params, row) + MEDIA_AT), out + 4 * row * cols
            if at >= 0:
                copy_f32(dst, media + 4 * at, cols)
            elif replaces:
                copy_f32(dst, x + 4 * row * cols, cols)
            else:
                for i in range(cols):
                    st_f32(dst + 4 * i, _F0)

    return media_rows


def make_media_route():
    """Return a kernel that routes the tokens of visual experts, or all others, to expert 0, and the rest nowhere."""

    @kernel(MediaRouteParams)
    def media_route(params, ith, nth):
        out, text = params.out, params.text
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            st_f32(out + 8 * row, _F1)
            visual = ld_i32(place(params, row) + VISUAL)
            st_i32(out + 8 * row + 4, np.int32(-1 if visual == text else 0))

    return media_route


def make_axis_rope_table():
    """Return a kernel that writes cos and sin per pair, each for its own axis of the position."""

    @kernel(AxisRopeTableParams)
    def axis_rope_table(params, ith, nth):
        out, pairs, freqs, axes, mscale = params.out, params.pairs, params.freqs, params.axes, params.mscale
        items = state_word(params, N_TOKENS) * pairs
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, pair = item // pairs, item % pairs
            position = ld_i32(place(params, row) + AXES + 4 * ld_i64(axes + 8 * pair))
            theta = position * ld_f64(freqs + 8 * pair)
            st_f32(out + 8 * item, np.float32(math.cos(theta)) * mscale)
            st_f32(out + 8 * item + 4, np.float32(math.sin(theta)) * mscale)

    return axis_rope_table


def make_mean_rows():
    """Return a kernel that averages n adjacent rows."""

    @kernel(MeanRowsParams)
    def mean_rows(params, ith, nth):
        x, out, cols, n = params.x, params.out, params.cols, params.n
        rows, row_bytes = n_rows(params), 4 * params.cols
        factor = np.float32(1.0) / np.float32(n)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            src, dst = x + row * n * row_bytes, out + row * row_bytes
            copy_f32(dst, src, cols)
            for i in range(1, n):
                add_span(dst, dst, src + i * row_bytes, 0, cols)
            scale_span(dst, dst, factor, 0, cols)

    return mean_rows
