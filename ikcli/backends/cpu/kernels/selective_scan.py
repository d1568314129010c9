"""Run Mamba's selective scan: token by token, in lanes of 16 columns, which do not depend on each other.

The numbers and decays of a block of 16 columns stay in the first-level cache while the block goes through the tokens of
a sequence. So prompts and single tokens are the same code, and results are batch-invariant. The exponentials take most
of the time: `n_state` of them per token and column.
"""

from ikcli.backends.cpu.kernels.basic import span
from ikcli.backends.cpu.kernels.common import N_SEG, SEG_N_TOKENS, SEG_TOKEN, SEG_WORDS, SEGMENTS, state_word
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import transpose16
from ikcli.backends.cpu.kernels.state_rows import begins, state_row
from ikcli.backends.cpu.params_layers import SelectiveScanParams
from ikcli.native.jit import inline
from ikcli.native.simd.control import flush_denormals, restore_denormals
from ikcli.native.simd.math import vexp, vsoftplus
from ikcli.native.simd.vec import (
    bcast_f32x16,
    ld_i64,
    load_f32x16,
    store_f32x16,
    vadd,
    vfma,
    vmul,
    zero_f32x16,
)

_LINE = 64  # bytes of a row of 16 columns


def make_selective_scan():
    """Return the kernel; n_state and columns are multiples of 16."""

    @inline
    def one_token(h, decays, n_state, x, step, b, c, y):
        """Advance and read the numbers of 16 columns."""
        taken = vmul(step, x)
        for i in range(n_state):
            left = vmul(vexp(vmul(step, load_f32x16(decays + _LINE * i))), load_f32x16(h + _LINE * i))
            new = vfma(taken, bcast_f32x16(b + 4 * i), left)
            store_f32x16(h + _LINE * i, new)
            y = vfma(new, bcast_f32x16(c + 4 * i), y)
        return y

    @kernel(SelectiveScanParams)
    def selective_scan(params, ith, nth):
        mode = flush_denormals()
        states, state_bytes, n_state, cols = params.states, params.state_bytes, params.n_state, params.cols
        x, dt, out = params.x, params.dt, params.out
        b, b_stride, c, c_stride = params.b, params.b_stride, params.c, params.c_stride
        decays = params.scratch + ith * params.scratch_bytes
        lo, hi = span(cols, ith, nth)
        segments, n_seg = state_word(params, SEGMENTS), state_word(params, N_SEG)
        for c0 in range(lo, hi, 16):
            for i in range(0, n_state, 16):
                transpose16(params.a + 4 * (c0 * n_state + i), 4 * n_state, decays + _LINE * i, _LINE)
            bias, through = load_f32x16(params.dt_bias + 4 * c0), load_f32x16(params.d + 4 * c0)
            for s in range(n_seg):
                start = ld_i64(segments + 8 * (SEG_WORDS * s + SEG_TOKEN))
                n = ld_i64(segments + 8 * (SEG_WORDS * s + SEG_N_TOKENS))
                h = state_row(params, s, states, state_bytes) + 4 * n_state * c0
                if begins(params, s):
                    for i in range(n_state):
                        store_f32x16(h + _LINE * i, zero_f32x16())
                for t in range(start, start + n):
                    at = 4 * (t * cols + c0)
                    step, row = vsoftplus(vadd(load_f32x16(dt + at), bias)), load_f32x16(x + at)
                    y = one_token(h, decays, n_state, row, step, b + t * b_stride, c + t * c_stride, vmul(through, row))
                    store_f32x16(out + at, y)
        restore_denormals(mode)

    return selective_scan
