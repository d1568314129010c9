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
    word,
)
from ikcli.backends.cpu.kernels.state_rows import begins, state_row
from ikcli.native.simd.vec import ld_f32, ld_i64, st_f32


def make_relu_squared_glu():
    """params: 3 gate, 4 up, 5 out, 6 columns."""

    def relu_squared_glu(params, ith, nth):
        gate, up, out, n = word(params, 3), word(params, 4), word(params, 5), n_rows(params) * word(params, 6)
        for i in range(n * ith // nth, n * (ith + 1) // nth):
            x = max(ld_f32(gate + 4 * i), np.float32(0))
            st_f32(out + 4 * i, x * x * ld_f32(up + 4 * i))

    return relu_squared_glu


def make_decay_sum():
    """params: 3 x, 4 out, 5 states, 6 columns; a column of all segments by one thread."""

    def decay_sum(params, ith, nth):
        x, out, states, cols = word(params, 3), word(params, 4), word(params, 5), word(params, 6)
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
