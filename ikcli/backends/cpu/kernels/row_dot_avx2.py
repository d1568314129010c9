"""Multiply a weight row by a few quantized activation rows with AVX2, in the order of columns.

A product of bytes takes a few instructions there, and adding lanes costs as much as multiplying. AVX-VNNI has one for
the sums of four products, which pays only where those of two do not fit 16 bits: smaller ones are added two vectors at
a time, and bringing codes into the order of `row_dot.py` costs more than that saves. With a scale per 32
columns, four blocks are shuffled and added until each has one lane in both halves of a vector, so that they share a
conversion and a multiplication by their scales. Nibbles of which the lower ones are 16 columns and the upper ones the
next need one shift per 64 columns in another order, of which activation rows have a copy; two blocks then share a
vector. With a scale per 16 columns, sums stay at 16 bits for as long as they fit, and scales are brought into the order
in which the sums come out, which costs nothing. Scales that are integers are factors of the instruction that widens
these sums. Fields of two bits are shuffled before they are multiplied ("crossed", another copy of activations), so that
sums need not be. The bias of codes is applied to the sums of activations. Memory is prefetched line by line: rows are
read slowly enough for that to help.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow
from ikcli.backends.cpu.kernels.row_dot import MOST_ROWS
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import RowFormat, prefetch_step, steps
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.backends.cpu.tile_modes import MORE_BYTES, most_code, scales_per_block
from ikcli.native.simd.dot import SUMS_OF_TWO, emit_dot, emit_products, emit_sums_of_two
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import (
    call_llvm,
    f32x8,
    f32x16,
    i8x32,
    i16x16,
    i32x8,
    llvm_type,
    magnitude,
    pointer,
    with_sign,
)

_TWICE = [i // 2 for i in range(16)]
_EVERY_OTHER = [*range(0, 8, 2), *range(1, 8, 2)]
# blocks of 16 columns in the order in which `_sums_of_sixteen` has their sums: every other one of eight, the others
_APART = tuple(8 * n + 2 * i + odd for n in range(2) for odd in range(2) for i in range(4))
_MOST_SUM = 32767


@functools.cache
def row_dot_avx2(fmt):
    """Return dot(w, a, a_stride, k, out, out_stride): out[0] for one activation row; strides are unused."""

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, _, k, out, _ = args
            e = _emitter(fmt, builder)
            x, row = ActivationRow(e, a, k), fmt.header(e, w)
            # Two, so that successive additions do not wait for each other.
            sums = [e.variable(e.zero(_vector(fmt))) for _ in range(2)]
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                _add_step(e, fmt, _factors(e, fmt, at_w, row), _parts(e, fmt, at_w), x, i, valid, sums)
            e.store(_total(e, fmt, sums), out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


@functools.cache
def row_dots_avx2(fmt):
    """Return dots(w, row_bytes, a, a_stride, m, k, out, out_stride): out[t] for m <= MOST_ROWS activation rows.

    Strides are in bytes, row_bytes is unused. The sums of each are those of `row_dot_avx2`.
    """

    @intrinsic
    def dots(typingctx, w, row_bytes, a, a_stride, m, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, _, a, a_stride, m, k, out, out_stride = args
            e = _emitter(fmt, builder)
            first, row = ActivationRow(e, e.opaque(a), k), fmt.header(e, w)
            vector = _vector(fmt)
            sums_at = e.room(2 * 4 * vector.n * MOST_ROWS)

            def slots(t):
                at = e.offset(sums_at, e.times(t, 2 * 4 * vector.n))
                return [pointer(builder, e.offset(at, 4 * vector.n * n), llvm_type(vector)) for n in range(2)]

            with e.loop(m) as t:
                for slot in slots(t):
                    builder.store(e.zero(vector), slot)
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                # Decoded once, for all activation rows; the registers do not hold it, but loads are cheap.
                factors, parts, here = _factors(e, fmt, at_w, row), list(_parts(e, fmt, at_w)), first.at_step(e, i)
                with e.loop(m) as t:
                    x = here.moved(e, builder.mul(t, a_stride))
                    _add_step(e, fmt, factors, parts, x, e.int(0), valid, slots(t))
            with e.loop(m) as t:
                e.store(_total(e, fmt, slots(t)), e.offset(out, builder.mul(t, out_stride)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return dots


@functools.cache
def two_rows_avx2(fmt):
    """Return two(w, a, out): out[0] and out[1] of two rows of HALF_STEP columns, one behind the other.

    a: the row with the activations twice (`kernels/activations.py`). There is a scale per 32 columns.
    """

    @intrinsic
    def two(typingctx, w, a, out):
        def codegen(context, builder, sig, args):
            w, a, out = args
            e = _emitter(fmt, builder)
            x, offsets_slot = ActivationRow(e, a, e.int(256)), e.variable(e.zero(f32x8))
            slots = [e.variable(e.zero(f32x8)) for _ in range(2)]
            prefetch_step(e, fmt, w)
            _add_step(e, fmt, _factors(e, fmt, w, None), _parts(e, fmt, w), x, e.int(0), None, [offsets_slot, *slots])
            if _is_paired(fmt):  # lanes are in the order of _EVERY_OTHER
                products = builder.load(slots[0])
                rows = [e.pick(products, [n + 2 * r for n in (0, 1, 4, 5)]) for r in range(2)]
            else:
                rows = [folded(builder, builder.load(slot), 4) for slot in slots]
            offsets_sum = builder.load(offsets_slot)
            for r, v in enumerate(rows):
                v = builder.fadd(v, e.pick(offsets_sum, range(4 * r, 4 * r + 4)))
                e.store(folded(builder, v, 1), e.offset(out, 4 * r))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return two


def _emitter(fmt, builder):
    return (RowEmitter if scales_per_block(fmt.mode) == 1 or _has_whole_scales(fmt) else _ApartEmitter)(builder)


def _vector(fmt):
    return f32x8 if scales_per_block(fmt.mode) == 1 or _has_whole_scales(fmt) else f32x16


def _has_whole_scales(fmt):
    """Return whether integer sums are multiplied by scales that are integers."""
    return type(fmt).whole_scales is not RowFormat.whole_scales


def _is_paired(fmt):
    """Return whether codes are in the order of `RowFormat.paired_codes`."""
    return type(fmt).paired_codes is not RowFormat.paired_codes


def _is_crossed(fmt):
    """Return whether codes are in the order of `RowFormat.crossed_codes`."""
    return type(fmt).crossed_codes is not RowFormat.crossed_codes


def _factors(e, fmt, w, row):
    """Return the scales of a step, and what the sums of activations are multiplied by, or None."""
    if _has_whole_scales(fmt):
        return _WholeFactors(e, fmt, w, row)
    if _is_paired(fmt):
        return _PairedFactors(e, fmt, w, row)
    scales = fmt.scales(e, w, row)
    return scales, fmt.minima(e, w, row) if fmt.mode[0] == "m" else offsets(e, fmt, w, scales)


def _add_step(e, fmt, factors, parts, x, i, valid, sums):
    """Add the products of the `parts` of a step with step i of an activation row to the sums.

    Of three sums the first is of offsets; with a scale per 32 columns the others are of 128 columns each, or of all.
    Two sums are shared evenly.
    """

    def add(n, x, y):
        e.b.store(e.fused(x, y, e.b.load(sums[n])), sums[n])

    if _is_paired(fmt) or _has_whole_scales(fmt):
        products = _crossed_products if _is_crossed(fmt) else _paired_products if _is_paired(fmt) else _products
        factors.add_step(list(products(e, fmt, parts, x, i)), x, i, valid, add)
        return
    per_block = scales_per_block(fmt.mode)
    scales, factors = factors
    if factors is not None:
        add(0, factors, x.scaled_sums(e, i, valid, 1) if per_block == 1 else _sums_apart(e, x, i, valid))
    if per_block == 1:
        scales, products = e.mul(scales, x.scales(e, i, valid)), _products(e, fmt, parts, x, i)
        for n in range(2):
            # Points of grids are decoded through many registers: of two blocks at a time.
            v = _sums_of_four(e, products, most_code(fmt, fmt.mode), in_turn=fmt.most_magnitude() > 0)
            add(1 + n if len(sums) == 3 else 1 - n, e.ints_to_f32(v), e.pick(scales, [*range(4 * n, 4 * n + 4)] * 2))
    else:
        v = _sums_of_sixteen(e, list(_products(e, fmt, parts, x, i)), most_code(fmt, fmt.mode))
        add(1, e.ints_to_f32(v), e.mul(scales, _scales_apart(e, x, i, valid)))


def _total(e, fmt, sums):
    """Return the total of both sums; those of whole scales lack constant factors."""
    first, second = (e.b.load(slot) for slot in sums)
    if not _has_whole_scales(fmt):
        return folded(e.b, e.b.fadd(first, second), 1)
    of_sums, of_products = (ir.Constant(first.type, x) for x in _constants(fmt))
    return folded(e.b, e.fused(first, of_sums, e.mul(second, of_products)), 1)


def _times(fmt):
    """Return by how much whole scales grow where they become words.

    Signed bytes are put into the upper halves of words if products then stay within 32 bits. These are of eight columns
    (crossed ones of 16) at most, or of words that hold their sums.
    """
    most = (16 if _is_crossed(fmt) else 8) * 127 * fmt.most_dot_code() * fmt.most_scale
    return 256 if fmt.signed_scales and 256 * most < 1 << 31 else 1


def _constants(fmt):
    """Return what sums of activations and sums of products are multiplied by at the end of a row."""
    of_products = [x / _times(fmt) for x in fmt.whole_units]
    if fmt.mode[0] == "m":
        of_sums = -1.0
    else:  # see `_WholeFactors._offsets`
        of_sums = 1.0 if fmt.bias and fmt.shift else (fmt.shift - fmt.bias) / _times(fmt)
    return [of_sums] * 8, of_products


class _ApartEmitter(RowEmitter):
    scale_order = _APART


def _sums_apart(e, x, i, valid):
    """Return the scaled sums of the activations of step i in the order of `_APART`, zeros beyond `valid` blocks."""
    if valid is not None:
        return e.pick(x.scaled_sums(e, i, valid, 2), _APART)
    return e.load(f32x16, e.offset(x.more_at, e.times(i, MORE_BYTES)))


def _scales_apart(e, x, i, valid):
    """Return the scales of the activations' eight blocks for the 16 blocks of `_APART`, zeros beyond `valid` blocks."""
    if valid is not None:
        return e.pick(x.scales(e, i, valid), [n // 2 for n in _APART])
    at = e.offset(x.d_at, e.times(i, 32))
    four = [e.singles(e.offset(at, first), 4) for first in (0, 16)]
    return e.joined([e.pick(v, [*range(4)] * 2) for v in four])


def offsets(e, fmt, w, scales):
    """Return scales times the difference between values and `dot_codes`, or None."""
    if fmt.most_magnitude() or not (fmt.bias or fmt.shift):
        return None
    count = scales.type.count
    plain, shifted = (ir.Constant(scales.type, [float(x)] * count) for x in (-fmt.bias, fmt.shift - fmt.bias))
    on = fmt.shifted_blocks(e, w)
    if on is None:
        return e.mul(scales, plain)
    if on.type.count < count:
        on = e.in_scale_order(e.pick(on, _TWICE))
    return e.mul(scales, e.b.select(on, shifted, plain))


def _parts(e, fmt, w):
    """Yield (codes, None) or (magnitudes, signs) of each block of 32 columns of a step, or codes in another order."""
    if _is_crossed(fmt):
        yield from (fmt.crossed_codes(e, w, h, n) for h in range(2) for n in range(4))
        return
    for j in range(4):
        if _is_paired(fmt):
            codes = fmt.paired_codes(e, w, j)
            yield from (e.pick(codes, range(first, first + 32)) for first in (0, 32))
            continue
        apart = fmt.magnitudes(e, w, j) if fmt.most_magnitude() else None
        codes = apart[0] if apart else fmt.dot_codes(e, w, j)
        for half in range(2):
            lanes = range(32 * half, 32 * half + 32)
            yield e.pick(codes, lanes), e.pick(apart[1], lanes) if apart else None


def _products(e, fmt, parts, x, i):
    """Yield for each of the `parts` the sums of two products with step i, 16 lanes of 16 bits; or `_sums` of four."""
    at, magnitudes_at = (e.offset(start, e.times(i, 256)) for start in (x.codes_at, x.second_at))
    for n, (v, signs) in enumerate(parts):
        y = e.load(i8x32, e.offset(at, 32 * n))
        if signs is not None:
            u, y = v, with_sign(e.b, y, signs)
        elif fmt.mode[0] == "m" or fmt.bias:
            u = v
        # The instruction multiplies unsigned by signed bytes, so one factor gives its sign to the other.
        elif fmt.full_range:  # magnitudes of the weights, as the sign of -128 cannot be changed
            u, y = magnitude(e.b, v), with_sign(e.b, y, v)
        else:
            u, y = e.load(i8x32, e.offset(magnitudes_at, 32 * n)), with_sign(e.b, v, y)
        yield _multiplied(e, fmt, u, y)


def _multiplied(e, fmt, u, y):
    """Return the sums of two products, or of four where AVX-VNNI has them and sums of two would not fit 16 bits."""
    if _has_whole_scales(fmt) or 4 * 127 * most_code(fmt, fmt.mode) <= _MOST_SUM or "avxvnni" not in e.features():
        return emit_products(e.b, u, y)
    return emit_dot(e.b, e.zero(i32x8), u, y, 8)


def _paired_products(e, fmt, parts, x, i):
    """Yield what `_products` does for the `parts`, which are in the order of `RowFormat.paired_codes`."""
    at = e.offset(x.more_at, e.times(i, MORE_BYTES), 256)
    for n, v in enumerate(parts):
        y = e.load(i8x32, e.offset(at, 32 * n))
        if fmt.mode[0] == "m" or fmt.bias:
            u = v
        else:
            u, y = e.load(i8x32, e.offset(at, 256 + 32 * n)), with_sign(e.b, v, y)
        yield _multiplied(e, fmt, u, y)


def _crossed_products(e, fmt, parts, x, i):
    """Yield what `_products` does for the `parts`, unsigned codes in the order of `RowFormat.crossed_codes`."""
    at = _place(e, x.more_at, i, MORE_BYTES, 768)
    for n, u in enumerate(parts):
        y = e.load(i8x32, e.offset(at, 32 * n))
        yield emit_products(e.b, u, y)


class _PairedFactors:
    """Scales of blocks of 32 columns, two of which are side by side: the first in the lower halves of two vectors."""

    def __init__(self, e, fmt, w, row):
        scales = fmt.scales(e, w, row)
        self.e, self.apart = e, e.pick(scales, _EVERY_OTHER)
        self.offsets = fmt.minima(e, w, row) if fmt.mode[0] == "m" else offsets(e, fmt, w, scales)
        self.most = fmt.most_dot_code()

    def add_step(self, pairs, x, i, valid, add):
        """Call add(number of a sum, float, float) for `_paired_products` with step i of x."""
        e = self.e
        if self.offsets is not None:
            add(0, self.offsets, x.scaled_sums(e, i, valid, 1))
        if valid is None:
            d = e.load(f32x8, e.offset(x.more_at, e.times(i, MORE_BYTES), 96))
        else:
            d = e.pick(x.scales(e, i, valid), _EVERY_OTHER)
        v = _sums_of_four(e, (self._both(*pairs[n : n + 2]) for n in range(0, 8, 2)), 2 * self.most)
        add(1, e.ints_to_f32(v), e.mul(self.apart, d))

    def _both(self, x, y):
        """Add the products of two vectors with the same blocks."""
        if x.type == SUMS_OF_TWO and 4 * 127 * self.most > _MOST_SUM:
            x, y = emit_sums_of_two(self.e.b, x), emit_sums_of_two(self.e.b, y)
        return self.e.b.add(x, y)


def _sums_of_four(e, pairs, most, in_turn=False):
    """Return sums of the halves of the next four vectors, in i32x8.

    `pairs` yields `_products` of codes up to `most`. Four sums share a conversion and an addition of floats, which
    saves more than these shuffles cost. in_turn: two vectors are finished before the next ones are decoded.
    """

    def merged(x, y, width, most_sum):
        if x.type == SUMS_OF_TWO and most_sum > _MOST_SUM:
            x, y = emit_sums_of_two(e.b, x), emit_sums_of_two(e.b, y)
        return _interleaved(e, x, y, width)

    def two():
        v = merged(next(pairs), next(pairs), 32, 4 * most * 127)
        return e.in_register(v) if in_turn else v

    first, second = two(), two()
    v = merged(first, second, 64, 8 * most * 127)
    return emit_sums_of_two(e.b, v) if v.type == SUMS_OF_TWO else v


def _interleaved(e, x, y, width):
    """Add each two neighbours of `width` bits of x, and of y; sums of both take turns."""
    count = 256 // width
    a, b = (e.b.bitcast(v, ir.VectorType(ir.IntType(width), count)) for v in (x, y))
    half = count // 2
    starts = [start for first in (0, half) for start in range(first, first + half // 2)]
    low, high = ([n for s in starts for n in (s + more, count + s + more)] for more in (0, half // 2))
    parts = [e.b.shuffle_vector(a, b, indices(lanes)) for lanes in (low, high)]
    return e.b.add(*(e.b.bitcast(v, x.type) for v in parts))


def _sums_of_sixteen(e, pairs, most):
    """Return the sums of the 16 blocks of 16 columns, i32x16 in the order of `_APART`.

    `pairs` come from `_products` of codes up to `most`.
    """
    if pairs[0].type == SUMS_OF_TWO:
        pairs = [emit_sums_of_two(e.b, v) for v in _sums_of_words(e, pairs, most, _horizontal)]
    return e.joined(_merged_to_two(e, pairs, _horizontal))


def _sums_of_words(e, pairs, most, merged):
    """Add lanes of 16 bits while no sum can overflow: such additions handle twice as many sums as those of 32 bits."""
    largest = 2 * most * 127
    while len(pairs) > 2 and 2 * largest <= _MOST_SUM:
        pairs, largest = merged(e, pairs), 2 * largest
    return pairs


def _merged_to_two(e, sums, merged):
    while len(sums) > 2:
        sums = merged(e, sums)
    return sums


def _horizontal(e, vectors):
    """Add adjacent lanes of eight or four vectors, of which half as many are left."""
    op = "llvm.x86.avx2.phadd." + ("w" if vectors[0].type == SUMS_OF_TWO else "d")
    return [call_llvm(e.b, op, x.type, [x, y]) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]


def _shuffled(e, vectors):
    """Add lanes as `_horizontal` does, other ones of the same blocks.

    Such an instruction takes longer than two shuffles and an addition, but LLVM mixes these until registers run out.
    """
    width = 64 if len(vectors) == 8 else 32
    count = 128 // width
    kind = ir.VectorType(ir.IntType(width), 2 * count)

    def merged(x, y):
        a, b = (e.b.bitcast(v, kind) for v in (x, y))
        lanes = [at + n for half in (0, count) for at in (half, half + 2 * count) for n in range(0, count, 2)]
        parts = [e.b.shuffle_vector(a, b, indices([n + odd for n in lanes])) for odd in (0, 1)]
        return e.b.add(*(e.b.bitcast(v, x.type) for v in parts))

    return [merged(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]


class _WholeFactors:
    """Scales of 16 blocks of 16 columns that are integers: with them products stay integers up to 32 columns."""

    def __init__(self, e, fmt, w, row):
        self.e, self.most, self.paired, self.crossed = e, fmt.most_dot_code(), _is_paired(fmt), _is_crossed(fmt)
        self.scales, self.signed, self.memo = fmt.whole_scales(e, w), fmt.signed_scales, {}
        self.unit, self.unit_of_minima = fmt.units(e, w, row)
        self.times = _times(fmt)
        if fmt.mode[0] == "m":
            self.of_sums = e.lshr(self._words(fmt.whole_minima(e, w), range(16)), [fmt.whole_minima_at] * 16)
        else:
            self.of_sums = self._offsets(fmt, w)

    def _offsets(self, fmt, w):
        """Return scales times the difference between values and `dot_codes`, without `_constants`, or None."""
        if not (fmt.bias or fmt.shift):
            return None
        e, words = self.e, self._words(self.scales, range(16))
        on = fmt.shifted_words(e, w) if fmt.shift else None
        if on is None or not fmt.bias:
            return words if on is None else e.b.and_(words, on)
        # As many times larger, so that 16 bits hold the upper halves of the products.
        times = 256 if self.times > 1 else 1
        shift, plain = (ir.Constant(SUMS_OF_TWO, [n * times] * 16) for n in (fmt.shift, -fmt.bias))
        differences = e.b.add(e.b.and_(on, shift), plain)
        if times == 1:
            return e.b.mul(words, differences)
        return call_llvm(e.b, "llvm.x86.avx2.pmulh.w", SUMS_OF_TWO, [words, differences])

    def add_step(self, pairs, x, i, valid, add):
        """Call add(number of a sum, float, float) for products with step i of x, which is whole."""
        e, d_at = self.e, _place(self.e, x.d_at, i, 32)
        of_step = self._paired_sums(pairs, x, i) if self.paired else self._sums(pairs, x, i)
        add(1, of_step, self.unit)
        if self.of_sums is not None:
            v = e.ints_to_f32(
                emit_sums_of_two(e.b, e.load(i16x16, _place(e, x.more_at, i, MORE_BYTES, 64)), self.of_sums)
            )
            add(0, e.mul(v, e.load(f32x8, d_at)), self.unit_of_minima or self.unit)

    def _sums(self, pairs, x, i):
        """Return the sums of a step, without the unit."""
        e = self.e
        if self.crossed:  # lanes are those of `_shuffled`
            sums, columns = [pairs[:4], pairs[4:]], 4
            while len(sums[0]) > 1 and columns * 127 * self.most <= _MOST_SUM:
                sums = [[e.b.add(*two) for two in zip(v[::2], v[1::2], strict=True)] for v in sums]
                columns *= 2
        else:
            sums = [[v] for v in _sums_of_words(e, pairs, self.most, _shuffled)]
        per = 8 // len(sums)
        scaled = []
        for n, parts in enumerate(sums):
            blocks = [2 * (per * n + lane * per // 8) for lane in range(8)]
            words = self._words(self.scales, [*blocks, *(b + 1 for b in blocks)])
            scaled.append(functools.reduce(e.b.add, [emit_sums_of_two(e.b, v, words) for v in parts]))
        # Blocks of 32 columns: as many in the lower half as in the upper half, which has their other 16 columns.
        total = None
        for v, d in zip(scaled, self._scales_of(x, i, per), strict=True):
            v = e.ints_to_f32(v)
            total = e.mul(v, d) if total is None else e.fused(v, d, total)
        return total

    def _scales_of(self, x, i, per):
        """Yield the scales of the next `per` blocks of 32 columns of step i, for the lanes of both halves."""
        e = self.e
        for b in range(0, 8, per):
            if per == 2:  # out of four copies of each
                four = _place(e, x.more_at, i, MORE_BYTES, 128 + 16 * b + 8)
            else:
                four = _place(e, x.d_at, i, 32, 4 * b)
            yield e.splat(e.single(four)) if per == 1 else e.pick(e.singles(four, 4), [*range(4)] * 2)

    def _paired_sums(self, pairs, x, i):
        """Return what `_sums` does from `_paired_products`."""
        e, total = self.e, None
        for n in range(4):
            both = []
            for m in range(2):
                words = self._words(self.scales, [4 * n + m] * 8 + [4 * n + 2 + m] * 8)
                both.append(emit_sums_of_two(e.b, pairs[2 * n + m], words))
            v, d = e.ints_to_f32(e.b.add(*both)), e.load(f32x8, _place(e, x.more_at, i, MORE_BYTES, 128 + 32 * n))
            total = e.mul(v, d) if total is None else e.fused(v, d, total)
        return total

    def _words(self, v, blocks):
        """Return bytes of these blocks, eight of each half, in 16 bits: signed ones `times` as much."""
        key = v, tuple(blocks)
        if key not in self.memo:
            lanes = [(32, 16 * (n // 8) + b) for n, b in enumerate(blocks)]
            lanes = [at for two in lanes for at in (two if self.signed else two[::-1])]
            b = self.e.b
            words = b.bitcast(b.shuffle_vector(v, ir.Constant(v.type, None), indices(lanes)), SUMS_OF_TWO)
            if self.signed and self.times == 1:
                words = b.ashr(words, ir.Constant(SUMS_OF_TWO, [8] * 16))
            self.memo[key] = words
        return self.memo[key]


def _place(e, base, i, size, more=0):
    """Return the address `more` bytes into part i."""
    return e.offset(base, e.times(i, size), more)
