"""Multiply a weight row by a few quantized activation rows, straight from memory (generation).

The row is decoded once for all of them; each result is the same, bit for bit, as that of the activation row alone.

Columns are summed by blocks of 16: lane b of a vector of codes holds four columns of block b of a step. Four integer
dot products then leave the sum of each block in its own lane, and scales are applied without moving lanes. Activation
rows have a copy in this order (`kernels/activations.py`); shuffles bring codes into it. Plain AVX2 has a separate
kernel: `row_dot_avx2.py`.
"""

import functools

from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow, without_bias
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import prefetch_step, steps
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.backends.cpu.tile_modes import most_code
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import f32x8, f32x16, i8x64, i32x16, llvm_type

_TWICE = [i // 2 for i in range(16)]


class _Token:
    """One activation row, and its running sums: of products with codes, and with minima."""

    def __init__(self, e, fmt, mode, a, k):
        self.mode = mode
        self.row = ActivationRow(e, a, k)
        self.most = most_code(fmt, mode)
        self.sum = e.variable(e.zero(f32x16))
        self.low = e.variable(e.zero(f32x16)) if mode.startswith("m") else None

    def begin(self, e, fmt, w, scales, minima, i, valid):
        """Load the scales of step i times those of the activations, and the start values of the integer sums."""
        d = self.row.scales(e, i, valid)
        self.scales = e.mul(scales, d) if self.mode.endswith("32") else e.mul(scales, e.pick(d, _TWICE))
        self.dots = [e.zero(i32x16), e.zero(i32x16)]  # two: half the latency
        if self.mode == "m32":
            # Of the width of the other sums, so that both are folded together at the end.
            self.add(e, self.low, _widen(e, minima), _widen(e, self.row.scaled_sums(e, i, valid, 1)))
        elif self.mode == "m16":
            self.add(e, self.low, minima, self.row.scaled_sums(e, i, valid, 2))
        else:
            # Codes are value + bias. Starting from -bias * (sum of activations) keeps integer sums exact.
            plain, shifted = without_bias(e, fmt, e.load(i32x16, e.offset(self.row.sums_at, e.times(i, 64))))
            on = fmt.shifted_blocks(e, w)
            if on is not None and on.type.count == 8:
                on = e.pick(on, _TWICE)
            self.dots[0] = plain if on is None else e.b.select(on, shifted, plain)

    def dot(self, e, n, codes, i):
        """Add columns 4n .. 4n+3 of every block of step i."""
        x = e.load(i8x64, e.offset(self.row.second_at, e.times(i, 256), 64 * n))
        self.dots[n % 2] = e.dot(self.dots[n % 2], codes, x, self.most)

    def finish(self, e):
        """Add the step to the sum."""
        scales = e.pick(self.scales, _TWICE) if self.scales.type.count == 8 else self.scales
        self.add(e, self.sum, e.to_f32(e.b.add(*self.dots)), scales)

    def add(self, e, slot, x, y):
        """Add x * y to a sum."""
        e.b.store(e.fused(x, y, e.b.load(slot)), slot)

    def total(self, e):
        v = e.b.load(self.sum)
        return folded(e.b, v if self.low is None else e.b.fadd(v, e.b.load(self.low)), 1)


@functools.cache
def row_dot(fmt, n_tokens):
    """Return dot(w, a, a_stride, k, out, out_stride): out[t] for n_tokens activation rows (strides in bytes)."""
    mode = fmt.mode

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, k, out, out_stride = args
            e = RowEmitter(builder)
            tokens = [_Token(e, fmt, mode, e.opaque(e.offset(a, e.times(a_stride, t))), k) for t in range(n_tokens)]
            row = fmt.header(e, w)
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                # Scales, minima and codes are decoded once, for all activation rows.
                scales = fmt.scales(e, at_w, row)
                minima = fmt.minima(e, at_w, row) if mode.startswith("m") else None
                for t in tokens:
                    t.begin(e, fmt, at_w, scales, minima, i, valid)
                quarters = fmt.quarters(e, at_w)
                if quarters is None:  # the format decodes in the order of columns
                    quarters = _by_quarters(e, [fmt.dot_codes(e, at_w, j) for j in range(4)])
                # A vector of codes serves all activation rows while it is in a register.
                for n, codes in enumerate(quarters):
                    for t in tokens:
                        t.dot(e, n, codes, i)
                for t in tokens:
                    t.finish(e)
            for n, t in enumerate(tokens):
                e.store(t.total(e), e.offset(out, e.times(out_stride, n)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


def _by_quarters(e, codes):
    """Reorder 16 blocks of 16 columns in a row to columns 4n .. 4n+3 of every block, n = 0..3."""
    words = [e.b.bitcast(v, llvm_type(i32x16)) for v in codes]
    halves = []
    # Two rounds of two-input shuffles: pairs of vectors first, then halves of the results.
    for n in (0, 2):
        for x, y in (words[:2], words[2:]):
            lanes = [4 * b + n + m for m in range(2) for b in range(8)]
            halves.append(e.b.shuffle_vector(x, y, indices(lanes)))
    out = []
    for x, y in (halves[:2], halves[2:]):
        for m in (0, 8):
            out.append(e.b.shuffle_vector(x, y, indices([*range(m, m + 8), *range(16 + m, 24 + m)])))
    return [e.b.bitcast(v, codes[0].type) for v in out]


def _widen(e, v):
    """Append 8 zeros to 8 lanes."""
    return e.b.shuffle_vector(v, e.zero(f32x8), indices(range(16)))
