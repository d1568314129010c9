"""The kernel."""

import numpy as np

from ikcli.backends.cpu.kernels.common import n_rows, word
from ikcli.native.simd.vec import ld_f32, st_f32


def make_relu_squared_glu():
    """params: 3 gate, 4 up, 5 out, 6 columns."""

    def relu_squared_glu(params, ith, nth):
        gate, up, out, n = word(params, 3), word(params, 4), word(params, 5), n_rows(params) * word(params, 6)
        for i in range(n * ith // nth, n * (ith + 1) // nth):
            x = max(ld_f32(gate + 4 * i), np.float32(0))
            st_f32(out + 4 * i, x * x * ld_f32(up + 4 * i))

    return relu_squared_glu
