"""Row-interleaved weight formats, described once and used twice (as `rowformat.py` does for plain rows).

A group of R rows (4, 8 or 16) stores its codes in runs of four columns of all rows, so 64 bytes are 16/R column groups
of R rows, and neither use has to move bytes between lanes:

* `group_dot(format, n)` (`group_dot.py`): R rows times n quantized activation rows, each lane summing one row,
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

from ikcli.backends.cpu.kernels.rowformat import RowEmitter, indices, steps
from ikcli.backends.cpu.tile_modes import LAYOUT, MODES, tile_bias
from ikcli.native.simd.emit import I32
from ikcli.native.simd.half import half_to_f32
from ikcli.native.simd.vec import const_vector, i8x16, i8x64, i32x16, llvm_type, pointer

_I8, _I16, _F32 = ir.IntType(8), ir.IntType(16), ir.FloatType()

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

    def joined(self, parts):
        """Vectors of equal length one after the other."""
        while len(parts) > 1:
            lanes = indices(range(2 * parts[0].type.count))
            parts = [self.b.shuffle_vector(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    # --- codes of four-row formats ------------------------------------------------------------------------------------
    def nibbles(self, address, v):
        """Vector v of 4-bit codes: byte 32c + 16a + 4*row + i, nibble h."""
        return self.all_and(self.shift_halves(self.load(i8x64, address), 4 * v, 4 * v), 15)

    def pairs(self, address, v, h=2, c=1):
        """Vector v of 2-bit codes: byte 16a + 4*row + i, field h*h + c*c (weights h, c)."""
        return self.all_and(self.shift_halves(self.twice(address), 2 * h * v, 2 * (h * v + c)), 3)

    def pair_entries(self, table, address, v):
        """Entries of a table of 4 byte constants for `pairs`: of two codes in four bits, one in each half."""
        x = self.twice(address)
        four = self.all_and(self.shift_right(x, [4] * 16) if v else x, 15)
        return self.lookup16([table[i & 3] for i in range(16)], four, [table[i >> 2] for i in range(16)])

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
    shift = 0  # what dot_codes leaves out of some codes

    def header(self, e, w):
        """Reads the headers of the rows."""

    def codes(self, e, w, ib, v):
        """Vector v of the codes of block ib (of 32 columns) as i8x64."""
        raise NotImplementedError

    def dot_codes(self, e, w, ib, v):
        """As codes, but `shift` smaller in the `shifted_lanes`."""
        return self.codes(e, w, ib, v)

    def shifted_lanes(self, e, w, part):
        """Mask, in the order of the scales, of lanes 16*part.. whose `dot_codes` are too small, or None."""

    def scales(self, e, w, row):
        """Per block: f32 lanes, one per row; modes *16: those of the first 16 columns, then of the others."""
        raise NotImplementedError

    def minima(self, e, w, row):
        """As scales, for modes m32 and m16."""
        raise NotImplementedError


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
                        if mode[0] == "s" and fmt.bias != tile_bias(fmt):
                            codes = builder.add(codes, e.const64(tile_bias(fmt) - fmt.bias))
                        words = builder.bitcast(codes, llvm_type(i32x16))
                        for g, x in zip(order, e.split(words, rows), strict=True):
                            e.store(x, e.offset(to, header + 64 * g))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return unpack
