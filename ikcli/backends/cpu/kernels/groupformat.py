"""Row-interleaved weight formats, described once and used twice (as `rowformat.py` does for plain rows).

A group of R rows (4, 8 or 16) stores its codes in runs of four columns of all rows, so 64 bytes are 16/R column groups
of R rows, and neither use has to move bytes between lanes:

* `group_dot(format)`: R rows times one quantized activation row, each lane summing one row,
* `unpack_group(format)`: R lanes of a 16-row tile, by plain stores.

A format's codes are `value + bias` (symmetric modes) and come as vectors of 16/R column groups in the order it names.
Column group g of a block of 32 is columns 4g .. 4g+3. With g = 4a + 2h + c, four-row formats use ORDER4: vector h holds
its groups in chunk 2c + a, so that a bit position that depends on a, h and c is a shift by constants per chunk.
Layouts: `quant/interleave.py`.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.rowformat import RowEmitter, activation_floats, indices, steps
from ikcli.backends.cpu.tile_modes import LAYOUT, MODES
from ikcli.native.simd.emit import I32
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    f32x8,
    f32x16,
    half_to_f32,
    i8x16,
    i8x64,
    i32x8,
    i32x16,
    llvm_type,
    pointer,
)

_I8, _I16, _F32 = ir.IntType(8), ir.IntType(16), ir.FloatType()

_PREFETCH_BYTES = 4096  # ahead; the next groups follow in memory
ORDER4 = [[0, 4, 1, 5], [2, 6, 3, 7]]


class GroupEmitter(RowEmitter):
    """Operations that descriptions of interleaved formats are made of."""

    def constants(self, values, bits):
        """A constant vector of integers."""
        t = ir.IntType(bits)
        return ir.Constant(ir.VectorType(t, len(values)), [ir.Constant(t, x) for x in values])

    def bytes_at(self, address, count):
        """`count` bytes."""
        return self.b.load(pointer(self.b, address, ir.VectorType(_I8, count)), align=1)

    def words_at(self, address, count):
        """`count` u16 as i32 lanes."""
        v = self.b.load(pointer(self.b, address, ir.VectorType(_I16, count)), align=1)
        return self.b.zext(v, ir.VectorType(I32, count))

    def halves(self, address, count):
        """Adjacent half floats as f32."""
        return half_to_f32(self.b, self.b.load(pointer(self.b, address, ir.VectorType(_I16, count)), align=1))

    def singles(self, address, count):
        """Adjacent floats."""
        return self.b.load(pointer(self.b, address, ir.VectorType(_F32, count)), align=1)

    def field(self, v, shift, width):
        """`width` bits from bit `shift` of every lane."""
        bits = v.type.element.width
        return self.all_and(self.b.lshr(v, self.constants([shift] * v.type.count, bits)), (1 << width) - 1)

    def both(self, low, high, n_low):
        """low | high << n_low."""
        shifts = self.constants([n_low] * high.type.count, high.type.element.width)
        return self.b.or_(low, self.b.shl(high, shifts))

    def centred(self, v, middle):
        """Unsigned lanes minus a constant, as floats."""
        wide = v if v.type.element.width == 32 else self.b.zext(v, ir.VectorType(I32, v.type.count))
        return self.ints_to_f32(self.b.sub(wide, self.constants([middle] * wide.type.count, 32)))

    def affine(self, v, a, b):
        """a*v + b of unsigned lanes, as floats."""
        x = self.centred(v, 0)
        return self.fused(x, ir.Constant(x.type, [a] * x.type.count), ir.Constant(x.type, [b] * x.type.count))

    def repeated(self, v, times):
        """All lanes of v, `times` times."""
        return self.pick(v, list(range(v.type.count)) * times)

    def split(self, v, n):
        """v in pieces of n lanes."""
        return [self.pick(v, range(i, i + n)) for i in range(0, v.type.count, n)]

    # --- codes of four-row formats ------------------------------------------------------------------------------------
    def nibbles(self, address, v):
        """Vector v of 4-bit codes: byte 32c + 16a + 4*row + i, nibble h."""
        return self.all_and(self.shift_halves(self.load(i8x64, address), 4 * v, 4 * v), 15)

    def pairs(self, address, v, h=2, c=1):
        """Vector v of 2-bit codes: byte 16a + 4*row + i, field h*h + c*c (weights h, c)."""
        return self.all_and(self.shift_halves(self.twice(address), 2 * h * v, 2 * (h * v + c)), 3)

    def plane(self, address, v, a, h, c, to=0):
        """Vector v of single bits, moved to bit `to`: byte 4*row + i, bit a*a + h*h + c*c (weights a, h, c)."""
        positions = [a * (chunk % 2) + h * v + c * (chunk // 2) for chunk in range(4)]
        x = self.repeated(self.load(i8x16, address), 4)
        bit = self.all_and(self.shift_right(x, [p for p in positions for _ in range(4)]), 1)
        return self.shift_left(bit, to) if to else bit

    def plane_mask(self, address, v, a, h, c):
        """As `plane`, as <64 x i1>."""
        positions = [a * (chunk % 2) + h * v + c * (chunk // 2) for chunk in range(4)]
        x = self.repeated(self.load(i8x16, address), 4)
        bits = const_vector(i8x64, [1 << p if p < 7 else -128 for p in positions for _ in range(16)])
        return self.b.icmp_unsigned("!=", self.b.and_(x, bits), self.const64(0))

    def added(self, codes, on, amount):
        """codes + amount in the 32-bit lanes where `on` (<16 x i1>)."""
        some = self.ints([amount * 0x01010101] * 16, i32x16)
        return self.b.add(codes, self.b.bitcast(self.b.select(on, some, self.zero(i32x16)), llvm_type(i8x64)))

    def lookup(self, table, codes):
        """Entry of a table of at most 32 byte constants."""
        table = [x & 255 for x in table]
        if len(table) <= 16:
            return self.lookup16(table + [0] * (16 - len(table)), codes)
        if "avx512vbmi" in self.features():
            args = [const_vector(i8x64, (table * 2)[:64]), codes]
            return call_llvm(self.b, "llvm.x86.avx512.permvar.qi.512", codes.type, args)
        upper = self.b.icmp_unsigned(">", codes, self.const64(15))
        low = self.all_and(codes, 15)
        return self.b.select(upper, self.lookup16(table[16:], low), self.lookup16(table[:16], low))


class GroupFormat:
    """One format. `w` is the address of a step of 256 columns, `row` what `header` returned."""

    name = ""
    rows = 4
    step_bytes = 0  # bytes of 256 columns of the group
    block_bytes = 0  # bytes of the smallest stored unit ...
    block_columns = 256  # ... and its columns
    header_bytes = 0  # of the group
    bias = 128  # code - bias is a value; a power of two (symmetric modes)
    order = ORDER4  # column groups of each vector of codes

    def header(self, e, w):
        """Reads the headers of the rows."""

    def codes(self, e, w, ib, v):
        """Vector v of the codes of block ib (of 32 columns) as i8x64."""
        raise NotImplementedError

    def scales(self, e, w, row):
        """Per block: f32 lanes, one per row; modes *16: those of the first 16 columns, then of the others."""
        raise NotImplementedError

    def minima(self, e, w, row):
        """As scales, for modes m32 and m16."""
        raise NotImplementedError


@functools.cache
def group_dot(fmt):
    """dot(w, a, k, out): out[0:rows]."""
    mode = MODES[fmt.name]
    assert fmt.rows == 4 or mode.endswith("32")

    @intrinsic
    def dot(typingctx, w, a, k, out):
        def codegen(context, builder, sig, args):
            w, a, k, out = args
            e = GroupEmitter(builder)
            row = fmt.header(e, w)
            accs = [e.variable(e.zero(f32x16)) for _ in range(2)]
            low = e.variable(ir.Constant(ir.VectorType(_F32, _lanes(fmt, mode)), [0.0] * _lanes(fmt, mode)))
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                for line in range(0, fmt.step_bytes, 64):
                    e.prefetch(e.offset(at_w, _PREFETCH_BYTES + line))
                _dot_step(e, fmt, mode, at_w, row, _Activations(e, mode, a, k, i, valid), accs, low)
            total = _fold(e, builder.fadd(builder.load(accs[0]), builder.load(accs[1])), fmt.rows)
            e.store(builder.fadd(total, _fold(e, builder.load(low), fmt.rows)), out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return dot


class _Activations:
    """Step i of an activation row (layout: `kernels/activations.py`)."""

    def __init__(self, e, mode, a, k, i, valid):
        nb4 = e.times(e.b.lshr(k, e.int(5)), 4)
        i32 = e.times(i, 32)
        self.e, self.valid = e, valid
        self.codes_at = e.offset(a, e.times(i, 256))
        self.d_at = e.offset(a, k, i32)
        self.s_at = e.offset(self.d_at, nb4)
        if valid is not None:
            self.d, self.s = activation_floats(e, self.d_at, valid), activation_floats(e, self.s_at, valid)
        if mode == "s32":
            self.sums = e.load(i32x8, e.offset(self.s_at, nb4))
        elif mode.endswith("16"):
            self.sums = e.load(i32x16, e.offset(self.s_at, nb4, nb4, i32))
        if mode == "m16":
            d = e.mul(activation_floats(e, self.d_at, valid), ir.Constant(llvm_type(f32x8), [-1.0 / 128] * 8))
            self.halves = e.mul(e.ints_to_f32(self.sums), e.pick(d, [i // 2 for i in range(16)]))

    def scale(self, ib, lanes):
        """The float scale of block ib in all lanes."""
        return self._floats(self.d_at, "d", ib, lanes)

    def sum(self, ib, lanes):
        """scale * sum of codes of block ib."""
        return self._floats(self.s_at, "s", ib, lanes)

    def _floats(self, at, name, ib, lanes):
        e = self.e
        if self.valid is not None:
            return e.pick(getattr(self, name), [ib] * lanes)
        x = e.b.load(pointer(e.b, e.offset(at, 4 * ib), _F32), align=1)
        t = ir.VectorType(_F32, lanes)
        one = e.b.insert_element(ir.Constant(t, ir.Undefined), x, e.index(0))
        return e.pick(one, [0] * lanes)

    def groups(self, ib, order, rows):
        """Column groups of block ib, each repeated for the rows."""
        at = self.e.offset(self.codes_at, 32 * ib)
        if rows == 16:
            return self.e.splat_bytes(self.e.offset(at, 4 * order[0]))
        v = self.e.pick(self.e.load(i32x8, at), [g for g in order for _ in range(rows)])
        return self.e.b.bitcast(v, llvm_type(i8x64))


def _lanes(fmt, mode):
    """Scales per block."""
    return fmt.rows * (2 if mode.endswith("16") else 1)


def _fold(e, v, rows):
    """Lanes of the same row added."""
    while v.type.count > rows:
        lo, hi = e.split(v, v.type.count // 2)
        v = e.b.fadd(lo, hi)
    return v


def _dot_step(e, fmt, mode, w, row, act, accs, low):
    lanes = _lanes(fmt, mode)
    scales = fmt.scales(e, w, row)
    minima = fmt.minima(e, w, row) if mode[0] == "m" else None
    starts = None
    if mode[0] == "s":
        shift = 7 - fmt.bias.bit_length() + 1
        starts = e.b.ashr(act.sums, e.constants([shift] * act.sums.type.count, 32)) if shift else act.sums
    for ib in range(8):
        acc = e.zero(i32x16) if starts is None else _starts(e, starts, ib, lanes, fmt.rows)
        for v, order in enumerate(fmt.order):
            acc = e.dot(acc, fmt.codes(e, w, ib, v), act.groups(ib, order, fmt.rows))
        scaled = e.mul(e.to_f32(acc), act.scale(ib, 16))
        wide = e.repeated(scales[ib], 16 // lanes)
        slot = accs[ib % 2]
        e.b.store(e.fma(scaled, wide, e.b.load(slot)), slot)
        if minima is not None:
            e.b.store(e.fused(minima[ib], _sums(e, act, ib, lanes, fmt.rows), e.b.load(low)), low)


def _starts(e, sums, ib, lanes, rows):
    """-bias * sum of the activations in the first lane of each row (and half), zeros elsewhere."""
    halves = lanes // rows
    first = [halves * ib + i // rows for i in range(lanes)]
    outside = sums.type.count
    return e.b.shuffle_vector(sums, ir.Constant(sums.type, [0] * outside), indices(first + [outside] * (16 - lanes)))


def _sums(e, act, ib, lanes, rows):
    """What minima are multiplied with."""
    if lanes == rows:
        return act.sum(ib, lanes)
    return e.pick(act.halves, [2 * ib + i // rows for i in range(lanes)])


@functools.cache
def unpack_group(fmt):
    """unpack(w, tile, r, k): lanes r .. r+rows-1 of the tile; writes whole steps (the tile has room for them)."""
    mode = MODES[fmt.name]
    header, block_bytes = LAYOUT[mode]
    halves = 2 if mode.endswith("16") else 1
    rows = fmt.rows

    def put(e, values, to):
        for half, x in enumerate(e.split(values, rows)):
            e.store(x, e.offset(to, 64 * half))

    @intrinsic
    def unpack(typingctx, w, tile, r, k):
        def codegen(context, builder, sig, args):
            w, tile, r, k = args
            e = GroupEmitter(builder)
            row = fmt.header(e, w)
            lane = e.offset(tile, e.times(r, 4))
            for i, at_w, _ in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                start = e.offset(lane, e.times(i, 8 * block_bytes))
                scales = fmt.scales(e, at_w, row)
                minima = fmt.minima(e, at_w, row) if mode[0] == "m" else None
                for ib in range(8):
                    to = e.offset(start, ib * block_bytes)
                    put(e, scales[ib], to)
                    if minima is not None:
                        put(e, minima[ib], e.offset(to, 64 * halves))
                    for v, order in enumerate(fmt.order):
                        codes = fmt.codes(e, at_w, ib, v)
                        if mode[0] == "s" and fmt.bias != 128:
                            codes = builder.add(codes, e.const64(128 - fmt.bias))
                        words = builder.bitcast(codes, llvm_type(i32x16))
                        for g, x in zip(order, e.split(words, rows), strict=True):
                            e.store(x, e.offset(to, header + 64 * g))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return unpack
