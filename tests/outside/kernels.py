"""The kernels."""

import numpy as np

from ikcli.backends.cpu.kernels.common import (
    N_SEG,
    SEG_N_TOKENS,
    SEG_TOKEN,
    SEG_WORDS,
    SEGMENTS,
    n_rows,
    state_word,
)
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.state_rows import begins, state_row
from ikcli.native.simd.vec import ld_f32, ld_i64, st_f32
from outside.params import DecaySumParams, GluParams


def make_relu_squared_glu():
    @kernel(GluParams)
    def relu_squared_glu(params, ith, nth):
        gate, up, out, n = params.gate, params.up, params.out, n_rows(params) * params.cols
        for i in range(n * ith // nth, n * (ith + 1) // nth):
            x = max(ld_f32(gate + 4 * i), np.float32(0))
            st_f32(out + 4 * i, x * x * ld_f32(up + 4 * i))

    return relu_squared_glu


def make_decay_sum():
    """A column of all segments by one thread."""

    @kernel(DecaySumParams)
    def decay_sum(params, ith, nth):
        x, out, states, cols = params.x, params.out, params.states, params.cols
        segments = state_word(params, SEGMENTS)
        for i in range(state_word(params, N_SEG)):
            state = state_row(params, i, states, 4 * cols)
            start = ld_i64(segments + 8 * (SEG_WORDS * i + SEG_TOKEN))
            stop = start + ld_i64(segments + 8 * (SEG_WORDS * i + SEG_N_TOKENS))
            for c in range(cols * ith // nth, cols * (ith + 1) // nth):
                s = np.float32(0) if begins(params, i) else ld_f32(state + 4 * c)
                for t in range(start, stop):
                    s = np.float32(0.75) * s + ld_f32(x + 4 * (cols * t + c))
                    st_f32(out + 4 * (cols * t + c), s)
                st_f32(state + 4 * c, s)

    return decay_sum
