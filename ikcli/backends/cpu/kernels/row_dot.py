"""Multiply a weight row by a few quantized activation rows, straight from memory (generation).

The row is decoded once for all of them; each result is the same, bit for bit, as that of the activation row alone.
Several activation rows are multiplied with a few weight rows side by side.

Columns are summed by blocks of 16: lane b of a vector of codes holds four columns of block b of a step. Four integer
dot products then leave the sum of each block in its own lane, and scales are applied without moving lanes. Activation
rows have a copy in this order (`kernels/activations.py`); shuffles bring codes into it. AVX2, with AVX-VNNI as well,
has a separate kernel: `row_dot_avx2.py`.
"""

import functools

from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow, without_bias
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import PREFETCH_BYTES, ahead_in_rows, prefetch_step, steps, steps_of_rows
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.backends.cpu.tile_modes import FIRST_SUM_F32, first_sum, most_code
from ikcli.native import isa
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import const_vector, f32x8, f32x16, i8x64, i32x16, llvm_type, pointer

_TWICE = [i // 2 for i in range(16)]
MOST_ROWS = 8  # activation rows that weights are decoded for at a time; their sums are on the stack


def rows_side_by_side(fmt):
    """Return the weight rows that are multiplied together with several activation rows: as many as fit 32 registers."""
    return 4 if fmt.mode[0] == "s" else 2


def _is_wide():
    return "avx512f" in isa.current().features


class _Columns:
    """Step i of an activation row: what the weight rows share is loaded once."""

    def __init__(self, e, fmt, row, i, valid):
        self.e, self.fmt, self.row, self.i, self.valid = e, fmt, row, i, valid
        # The bits of such a sum, read as a float, are the sum plus a constant (`tile_modes.first_sum`). Behind the
        # last block there may be any bits, those of NaN too.
        self.starts_high = bool(first_sum()) and fmt.mode[0] == "s" and fmt.bias == 128 and not fmt.shift and not valid

    @functools.cached_property
    def scales(self):
        """Return the scales, in as many lanes as `_factors` has."""
        d = self.row.scales(self.e, self.i, self.valid)
        return d if _eight_scales(self.fmt) else self.e.pick(d, _TWICE)

    @functools.cached_property
    def scaled_sums(self):
        """Return what minima are multiplied by."""
        return self.row.scaled_sums(self.e, self.i, self.valid, 2 if self.fmt.mode == "m16" else 1)

    @functools.cached_property
    def starts(self):
        """Return the start values of integer sums, and those of shifted blocks."""
        # Codes are value + bias. Starting from -bias * (sum of activations) keeps integer sums exact.
        sums = self.e.load(i32x16, self.e.offset(self.row.sums_at, self.e.times(self.i, 64)))
        return (sums, sums) if self.starts_high else without_bias(self.e, self.fmt, sums)

    @functools.cached_property
    def codes(self):
        """Return four vectors, in the order of `_codes`."""
        at = self.e.offset(self.row.second_at, self.e.times(self.i, 256))
        return [self.e.load(i8x64, self.e.offset(at, 64 * n)) for n in range(4)]


class _Product:
    """One weight row times one activation row, and pointers to the running sums: of codes' products, of minima's."""

    def __init__(self, fmt, sums, n_chains=1):
        self.mode, self.sums, self.most = fmt.mode, sums, most_code(fmt, fmt.mode)
        # Two chains of dot products have half the latency; beside other products, one is less work.
        self.n_chains = n_chains

    def begin(self, e, factors, x):
        """Take the `_factors` of a step and its activations."""
        scales, minima, shifted = factors
        self.starts_high, self.scales = x.starts_high, e.mul(scales, x.scales)
        self.dots = [e.zero(i32x16) for _ in range(self.n_chains)]
        if minima is not None:
            # Of the width of the other sums, so that both are folded together at the end.
            self.add(e, self.sums[1], _widen(e, minima), _widen(e, x.scaled_sums))
        else:
            plain, more = x.starts
            self.dots[0] = plain if shifted is None else e.b.select(shifted, more, plain)

    def dot(self, e, n, codes, x):
        """Add columns 4n .. 4n+3 of every block."""
        chain = n % self.n_chains
        self.dots[chain] = e.dot(self.dots[chain], codes, x.codes[n], self.most)

    def finish(self, e):
        """Add the step to the sum."""
        total = functools.reduce(e.b.add, self.dots)
        if self.starts_high:
            v = e.b.fsub(e.b.bitcast(total, llvm_type(f32x16)), const_vector(f32x16, [FIRST_SUM_F32] * 16))
        else:
            v = e.to_f32(total)
        self.add(e, self.sums[0], v, _by_block(e, self.scales))

    def add(self, e, slot, x, y):
        """Add x * y to a sum."""
        e.b.store(e.fused(x, y, e.b.load(slot)), slot)

    def total(self, e):
        return folded(e.b, functools.reduce(e.b.fadd, [e.b.load(slot) for slot in self.sums]), 1)


@functools.cache
def row_dot(fmt):
    """Return dot(w, a, a_stride, k, out, out_stride): out[0] for one activation row; strides are unused."""

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, _, k, out, _ = args
            e = RowEmitter(builder)
            sums = [e.variable(e.zero(f32x16)) for _ in range(_n_sums(fmt))]
            product, activations, row = _Product(fmt, sums, 2), ActivationRow(e, e.opaque(a), k), fmt.header(e, w)
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                x = _Columns(e, fmt, activations, i, valid)
                product.begin(e, _factors(e, fmt, at_w, row), x)
                for n, codes in enumerate(_codes(e, fmt, at_w)):
                    product.dot(e, n, codes, x)
                product.finish(e)
            e.store(product.total(e), out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


@functools.cache
def row_dots(fmt, n_rows):
    """Return dots(w, row_bytes, a, a_stride, m, k, out, out_stride): out[t][r] for n_rows weight rows side by side.

    There are m <= MOST_ROWS activation rows; strides are in bytes. The sums of each are those of `row_dot`, in a loop
    that covers any number of them. What is loaded of an activation row serves all weight rows: several activation rows
    do not stay in the first-level cache.
    """

    @intrinsic
    def dots(typingctx, w, row_bytes, a, a_stride, m, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, row_bytes, a, a_stride, m, k, out, out_stride = args
            e = RowEmitter(builder)
            room, size = e.room(64 * MOST_ROWS * n_rows * _n_sums(fmt)), 64 * n_rows * _n_sums(fmt)
            starts = [w]
            for _ in range(1, n_rows):
                starts.append(e.opaque(e.offset(starts[-1], row_bytes)))

            def slots(t):
                """Return pointers to the sums of activation row t, by weight row."""
                at = e.offset(room, e.times(t, size))
                to = [pointer(builder, e.offset(at, 64 * n), llvm_type(f32x16)) for n in range(size // 64)]
                return [to[r::n_rows] for r in range(n_rows)]

            first, rows = ActivationRow(e, e.opaque(a), k), [fmt.header(e, at) for at in starts]
            with e.loop(m) as t:
                for sums in slots(t):
                    for slot in sums:
                        builder.store(e.zero(f32x16), slot)
            # Of all rows together, twice the usual distance is best: there are as many places that are read in order.
            others = e.b.mul(row_bytes, e.int(n_rows - 1))
            near, far = e.int(2 * PREFETCH_BYTES // n_rows), e.b.sub(e.int(2 * PREFETCH_BYTES), others)
            near = e.b.select(e.b.icmp_signed("<", near, far), far, near)
            for i, places, valid in steps_of_rows(e, fmt, [e.offset(at, fmt.header_bytes) for at in starts], k):
                here = first.at_step(e, i)
                ahead = ahead_in_rows(e, e.times(i, fmt.step_bytes), near, row_bytes, others)
                factors, vectors = [], []
                for at_w, row in zip(places, rows, strict=True):
                    prefetch_step(e, fmt, at_w, ahead=ahead)
                    # Decoded once, for all activation rows, and kept in registers.
                    factors.append(_factors(e, fmt, at_w, row))
                    vectors.append(list(_codes(e, fmt, at_w)))
                with e.loop(m) as t:
                    x = _Columns(e, fmt, here.moved(e, builder.mul(t, a_stride)), e.int(0), valid)
                    products = [_Product(fmt, sums) for sums in slots(t)]
                    for product, of_row in zip(products, factors, strict=True):
                        product.begin(e, of_row, x)
                    for n in range(4):
                        for product, codes in zip(products, vectors, strict=True):
                            product.dot(e, n, codes[n], x)
                    for product in products:
                        product.finish(e)
            with e.loop(m) as t:
                to = e.offset(out, builder.mul(t, out_stride))
                for r, sums in enumerate(slots(t)):
                    e.store(_Product(fmt, sums).total(e), e.offset(to, 4 * r))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return dots


@functools.cache
def two_rows(fmt):
    """Return two(w, a, out): out[0] and out[1] of two rows of HALF_STEP columns, one behind the other.

    a: the row with the activations twice (`kernels/activations.py`). The lower lanes of the sums are of the first row.
    """

    @intrinsic
    def two(typingctx, w, a, out):
        def codegen(context, builder, sig, args):
            w, a, out = args
            e = RowEmitter(builder)
            sums = [e.variable(e.zero(f32x16)) for _ in range(_n_sums(fmt))]
            product = _Product(fmt, sums, 2)
            x = _Columns(e, fmt, ActivationRow(e, e.opaque(a), e.int(256)), e.int(0), None)
            prefetch_step(e, fmt, w)
            product.begin(e, _factors(e, fmt, w, None), x)
            for n, codes in enumerate(_codes(e, fmt, w)):
                product.dot(e, n, codes, x)
            product.finish(e)
            for r in range(2):
                of_products = folded(e.b, e.pick(builder.load(sums[0]), range(8 * r, 8 * r + 8)), 4)
                of_minima = [e.pick(builder.load(slot), range(4 * r, 4 * r + 4)) for slot in sums[1:]]
                e.store(folded(e.b, functools.reduce(builder.fadd, of_minima, of_products), 1), e.offset(out, 4 * r))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return two


def _n_sums(fmt):
    return 2 if fmt.mode[0] == "m" else 1


def _factors(e, fmt, w, row):
    """Return the scales of a step, its minima or None, and the mask of its shifted blocks or None, in 16 lanes.

    Minima are in as many lanes as blocks have them, scales in eight lanes if there are `_eight_scales`.
    """
    scales = fmt.scales(e, w, row)
    if fmt.quarter_shifts:
        n = scales.type.count
        units = [2.0**-s for s in fmt.quarter_shifts[:: 16 // n]]
        scales = e.mul(scales, const_vector(f32x8 if n == 8 else f32x16, units))
    scales = scales if _eight_scales(fmt) else _by_block(e, scales)
    if fmt.mode[0] == "m":
        return scales, fmt.minima(e, w, row), None
    shifted = fmt.shifted_blocks(e, w)
    return scales, None, None if shifted is None else _by_block(e, shifted)


def _eight_scales(fmt):
    """Return whether scales of 32 columns are multiplied before they are repeated: in half of the registers."""
    return fmt.mode.endswith("32") and not _is_wide()


def _by_block(e, v):
    """Return lanes of blocks of 32 columns for the 16 blocks of 16."""
    return e.pick(v, _TWICE) if v.type.count == 8 else v


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
    return v if v.type.count == 16 else e.b.shuffle_vector(v, e.zero(f32x8), indices(range(16)))
