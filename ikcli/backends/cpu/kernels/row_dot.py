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
from ikcli.backends.cpu.tile_modes import FIRST_SUM_F32, first_sum, most_code
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import const_vector, f32x8, f32x16, i8x64, i32x16, llvm_type, pointer

_TWICE = [i // 2 for i in range(16)]
MOST_ROWS = 16  # that a weight row is decoded for at a time; their sums are on the stack


class _Token:
    """One activation row, and pointers to its running sums: of products with codes, and with minima."""

    def __init__(self, fmt, row, sums, n_chains):
        self.mode, self.row, self.sums = fmt.mode, row, sums
        self.most = most_code(fmt, fmt.mode)
        # Two chains of dot products have half the latency; beside other activation rows, one is less work.
        self.n_chains = n_chains
        self.starts_high = False

    def begin(self, e, fmt, scales, minima, shifted, i, valid):
        """Load the scales of step i times those of the activations, and the start values of the integer sums."""
        d = self.row.scales(e, i, valid)
        self.scales = e.mul(scales, d) if self.mode.endswith("32") else e.mul(scales, e.pick(d, _TWICE))
        self.dots = [e.zero(i32x16) for _ in range(self.n_chains)]
        if self.mode == "m32":
            # Of the width of the other sums, so that both are folded together at the end.
            self.add(e, self.sums[1], _widen(e, minima), _widen(e, self.row.scaled_sums(e, i, valid, 1)))
        elif self.mode == "m16":
            self.add(e, self.sums[1], minima, self.row.scaled_sums(e, i, valid, 2))
        else:
            # Codes are value + bias. Starting from -bias * (sum of activations) keeps integer sums exact.
            sums = e.load(i32x16, e.offset(self.row.sums_at, e.times(i, 64)))
            # The bits of such a sum, read as a float, are the sum plus a constant (`tile_modes.first_sum`). Behind the
            # last block there may be any bits, those of NaN too.
            self.starts_high = bool(first_sum()) and fmt.bias == 128 and not fmt.shift and valid is None
            if self.starts_high:
                self.dots[0] = sums
                return
            plain, more = without_bias(e, fmt, sums)
            self.dots[0] = plain if shifted is None else e.b.select(shifted, more, plain)

    def dot(self, e, n, codes, i):
        """Add columns 4n .. 4n+3 of every block of step i."""
        x = e.load(i8x64, e.offset(self.row.second_at, e.times(i, 256), 64 * n))
        chain = n % self.n_chains
        self.dots[chain] = e.dot(self.dots[chain], codes, x, self.most)

    def finish(self, e):
        """Add the step to the sum."""
        scales = e.pick(self.scales, _TWICE) if self.scales.type.count == 8 else self.scales
        total = functools.reduce(e.b.add, self.dots)
        if self.starts_high:
            v = e.b.fsub(e.b.bitcast(total, llvm_type(f32x16)), const_vector(f32x16, [FIRST_SUM_F32] * 16))
        else:
            v = e.to_f32(total)
        self.add(e, self.sums[0], v, scales)

    def add(self, e, slot, x, y):
        """Add x * y to a sum."""
        e.b.store(e.fused(x, y, e.b.load(slot)), slot)

    def total(self, e):
        return folded(e.b, functools.reduce(e.b.fadd, [e.b.load(slot) for slot in self.sums]), 1)


@functools.cache
def row_dot(fmt):
    """Return dot(w, a, a_stride, k, out, out_stride): out[0] for one activation row; strides are unused."""
    has_minima = fmt.mode[0] == "m"

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, _, k, out, _ = args
            e = RowEmitter(builder)
            sums = [e.variable(e.zero(f32x16)) for _ in range(1 + has_minima)]
            x, row = _Token(fmt, ActivationRow(e, e.opaque(a), k), sums, n_chains=2), fmt.header(e, w)
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                x.begin(e, fmt, *_factors(e, fmt, at_w, row), i, valid)
                for n, codes in enumerate(_codes(e, fmt, at_w)):
                    x.dot(e, n, codes, i)
                x.finish(e)
            e.store(x.total(e), out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


@functools.cache
def row_dots(fmt):
    """Return dots(w, a, a_stride, m, k, out, out_stride): out[t] for m <= MOST_ROWS activation rows; strides in bytes.

    The sums of each are those of `row_dot`, in a loop that covers any number of them.
    """
    has_minima = fmt.mode[0] == "m"

    @intrinsic
    def dots(typingctx, w, a, a_stride, m, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, m, k, out, out_stride = args
            e = RowEmitter(builder)
            rooms = [e.room(64 * MOST_ROWS) for _ in range(1 + has_minima)]

            def token(first, t):
                slots = [pointer(builder, e.offset(at, e.times(t, 64)), llvm_type(f32x16)) for at in rooms]
                return _Token(fmt, first.moved(e, builder.mul(t, a_stride)), slots, n_chains=1)

            first, row = ActivationRow(e, e.opaque(a), k), fmt.header(e, w)
            with e.loop(m) as t:
                for slot in token(first, t).sums:
                    builder.store(e.zero(f32x16), slot)
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w, several=True)
                # Decoded once, for all activation rows, and kept in registers.
                factors, vectors, here = _factors(e, fmt, at_w, row), list(_codes(e, fmt, at_w)), first.at_step(e, i)
                with e.loop(m) as t:
                    x = token(here, t)
                    x.begin(e, fmt, *factors, e.int(0), valid)
                    for n, codes in enumerate(vectors):
                        x.dot(e, n, codes, e.int(0))
                    x.finish(e)
            with e.loop(m) as t:
                e.store(token(first, t).total(e), e.offset(out, builder.mul(t, out_stride)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return dots


def _factors(e, fmt, w, row):
    """Return the scales of a step, its minima or None, and the mask of its shifted blocks or None."""
    if fmt.mode[0] == "m":
        return fmt.scales(e, w, row), fmt.minima(e, w, row), None
    scales, shifted = fmt.scales(e, w, row), fmt.shifted_blocks(e, w)
    if shifted is not None and shifted.type.count == 8:
        shifted = e.pick(shifted, _TWICE)
    return scales, None, shifted


def _codes(e, fmt, w):
    """Return four vectors: lane b of vector n has columns 4n .. 4n+3 of block b of 16."""
    quarters = fmt.quarters(e, w)
    if quarters is None:  # the format decodes in the order of columns
        return _by_quarters(e, [fmt.dot_codes(e, w, j) for j in range(4)])
    return quarters


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
