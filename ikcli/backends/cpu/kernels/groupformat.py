"""Describe row-interleaved weight formats, once for two uses (as `rowformat.py` does for plain rows).

A group of R rows (4, 8 or 16) stores its codes in runs of four columns of all rows, so 64 bytes are 16/R column groups
of R rows, and neither use has to move bytes between lanes:

* `group_dot(format, n)` (`group_dot.py`): R rows times n quantized activation rows, each lane summing one row,
* `unpack_group(format)`: R lanes of a 16-row tile, by plain stores.

A format's codes are `value + bias` (symmetric modes) and come as vectors of 16/R column groups in the order it names.
Column group g of a unit, of one or two blocks of 32 columns, is columns 4g .. 4g+3 of it. In four-row formats g = 8p +
4a + 2h + c: of one block, vector h holds its groups in chunk 2c + a (ORDER4); of two, vector 2h + c holds its groups in
chunk 2p + a (PAIR4), where each lane is one row of 16 columns, as are the scales of modes *16. Layouts:
`quant/interleave.py`.
"""

import functools
import itertools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.gemm import add_negative, split_signs, tile_scale
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import WeightFormat, steps
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.backends.cpu.tile_modes import (
    FIRST_SUM,
    folds_scales,
    has_signs,
    minima_per_block,
    multiplies_matrices,
    scales_per_block,
    tile_bias,
    tile_layout,
    tile_mode,
)
from ikcli.native import isa
from ikcli.native.simd.emit import I32
from ikcli.native.simd.half import half_to_f32
from ikcli.native.simd.vec import f32x16, i8x16, i8x32, i8x64, i32x16, llvm_type, pointer

_I8, _I16, _F32 = ir.IntType(8), ir.IntType(16), ir.FloatType()

ORDER4 = [[0, 4, 1, 5], [2, 6, 3, 7]]
PAIR4 = [[2 * h + c + 4 * i for i in range(4)] for h in range(2) for c in range(2)]


class GroupEmitter(RowEmitter):
    """Operations that descriptions of interleaved formats are made of."""

    def halves(self, address, count):
        """Load adjacent half floats as f32."""
        return half_to_f32(self.b, self.b.load(pointer(self.b, address, ir.VectorType(_I16, count)), align=1))

    def field(self, v, shift, width):
        """Return `width` bits from bit `shift` of every lane."""
        bits = v.type.element.width
        return self.all_and(self.b.lshr(v, self.constants([shift] * v.type.count, bits)), (1 << width) - 1)

    def both(self, low, high, n_low):
        """Return low | high << n_low."""
        shifts = self.constants([n_low] * high.type.count, high.type.element.width)
        return self.b.or_(low, self.b.shl(high, shifts))

    def centred(self, v, middle):
        """Subtract a constant from unsigned lanes, as floats; in bytes only if the differences are signed bytes."""
        width, count = v.type.element.width, v.type.count
        if middle:
            v = self.b.sub(v, self.constants([middle] * count, width))
        # Only integers of 32 bits have an instruction that converts them to floats.
        if width < 32:
            v = (self.b.sext if middle else self.b.zext)(v, ir.VectorType(I32, count))
        return self.ints_to_f32(v)

    def affine(self, v, a, b):
        """Return a*v + b of unsigned lanes, as floats."""
        x = self.centred(v, 0)
        return self.fused(x, ir.Constant(x.type, [a] * x.type.count), ir.Constant(x.type, [b] * x.type.count))

    def ones(self):
        """Return 16 floats of 1."""
        return ir.Constant(llvm_type(f32x16), [1.0] * 16)

    def repeated(self, v, times):
        """Repeat all lanes of v `times` times."""
        return self.pick(v, list(range(v.type.count)) * times)

    def split(self, v, n):
        """Split v into pieces of n lanes."""
        return [self.pick(v, range(i, i + n)) for i in range(0, v.type.count, n)]

    def sixteens(self, parts):
        """Yield vectors of equal length as vectors of 16 lanes, each made on demand."""
        # On demand, so that scales are read between the codes, in the order of memory.
        parts = iter(parts)
        for first in parts:
            yield self.joined([first, *itertools.islice(parts, 16 // first.type.count - 1)])

    # --- codes of four-row formats: vector v of one block, or (`pair_`) of two ----------------------------------------
    def nibbles(self, address, v):
        """Return 4-bit codes: byte 32c + 16a + 4*row + i, nibble h."""
        return self.bits(self.load(i8x64, address), [4 * v] * 4, 4)

    def pair_nibbles(self, address, v):
        """Return the codes of two blocks as `nibbles` does."""
        return self.bits(self._two_blocks(address, v), [4 * (v // 2)] * 4, 4)

    def _two_blocks(self, address, v):
        return self.join(*(self.load(i8x32, self.offset(address, 64 * p + 32 * (v % 2))) for p in range(2)))

    def pairs(self, address, v, h=2, c=1, to=0):
        """Return 2-bit codes of two blocks, moved to bit `to`.

        They are in byte 16a + 4*row + i, field h*h + c*c (weights h, c).
        """
        return self.bits(self.load(i8x64, address), [2 * (h * (v // 2) + c * (v % 2))] * 4, 2, to)

    def plane(self, address, v, a, h, c):
        """Return bytes with a bit of each code, and where it is in each 16.

        It is in byte 4*row + i, bit a*a + h*h + c*c (weights).
        """
        return self.repeated(self.load(i8x16, address), 4), self._planes(v, a, h, c)

    def pair_plane(self, address, v, a, h, c):
        """Return the bits of two blocks as `plane` does."""
        return self._two_planes(address), [a * (chunk % 2) + h * (v // 2) + c * (v % 2) for chunk in range(4)]

    def _two_planes(self, address):
        return self.pick(self.load(i8x32, address), [*range(16), *range(32), *range(16, 32)])

    def _planes(self, v, a, h, c):
        return [a * (chunk % 2) + h * v + c * (chunk // 2) for chunk in range(4)]

    # --- codes for `value_of`: (vector, first bit of the code), masked only where it has to be ----------------------
    def nibble_codes(self, address, v):
        """Return the codes of `nibbles` as `code` does."""
        return self.code(self.load(i8x64, address), 4 * v, 4)

    def pair_nibble_codes(self, address, v):
        """Return the codes of `pair_nibbles` as `code` does."""
        return self.code(self._two_blocks(address, v), 4 * (v // 2), 4)

    def pair_codes(self, address, v):
        """Return the codes of `pairs` as `code` does."""
        return self.code(self.load(i8x64, address), 2 * v, 2)

    def code(self, v, at, width):
        """Return bits at .. at + width - 1 of the bytes of v."""
        # A table of 64 entries looks at six bits wherever they are, so codes need no shift to the bottom; a table of 16
        # needs its four bits in place.
        if not self.looks_at_six_bits():
            return self.bits(v, [at & 4] * 4, 4), at & 3
        out_of_sight = max(0, at + width - 6)
        return self.shift_right(v, [out_of_sight] * 16) if out_of_sight else v, at - out_of_sight

    def looks_at_six_bits(self):
        """Return whether a lookup in a table of 64 bytes is one instruction."""
        return "avx512vbmi" in self.features()

    def value_of(self, table, code, width, upper=None):
        """Look up a table of byte constants by `width` bits and, above four, a bit of a `plane`."""
        v, at = code
        if upper and not self.looks_at_six_bits():
            return self.entry_with_bit(table, v, *upper)
        places = list(range(at, at + width))
        if upper:
            places.append(next(bit for bit in range(6) if bit not in places))
            v = self.with_bits(v, self.bits(*upper, 1, places[-1]), 1 << places[-1])
        return self.scattered(table, places, v)

    def scattered(self, table, places, v):
        """Look up a table by codes whose bit i is bit places[i] of a byte.

        The lookup ignores all other bits (`nibble_codes`).
        """
        # Entries repeat for every value of the bits that are not part of the code.
        size = 64 if self.looks_at_six_bits() else 16 << (max(places) > 3)
        return self.lookup([table[sum((n >> at & 1) << i for i, at in enumerate(places))] for n in range(size)], v)

    def with_bits(self, v, bits, mask):
        """Replace the bits of each byte of v that are in `mask` by those of `bits`, which has no others."""
        return self.b.or_(self.all_and(v, ~mask & 255), bits)

    # --- three-bit codes of two blocks: two bits as `pairs`, the third as `pair_plane` with weights 4, 2, 1 ----------
    def triples(self, low_at, high_at, v):
        """Return vector v of the codes."""
        if self.moves_bits():
            return self.affine_bits(self._two_triples(low_at, high_at, v), [_triple_places(v)] * 4)
        return self.all_and(self._triple_nibbles(low_at, high_at, v), 7)

    def triple_values(self, table, low_at, high_at, v):
        """Look up a table of 8 byte constants by the codes."""
        if self.looks_at_six_bits():
            return self.scattered(table, _triple_places(v), self._two_triples(low_at, high_at, v))
        return self.lookup16(table + [0] * 8, self._triple_nibbles(low_at, high_at, v))

    def _two_triples(self, low_at, high_at, v):
        """Return the codes of vectors v & 2 (bits 0, 1, 4) and v | 1 (bits 2, 3, 5)."""
        low = self.load(i8x64, low_at)
        low = self.shift_right(low, [4] * 16) if v >= 2 else low
        return self.with_bits(low, self.bits(self._two_planes(high_at), [v & 2, 4 + (v & 2)] * 2, 2, to=4), 0x30)

    def _triple_nibbles(self, low_at, high_at, v):
        """Return the codes of vector v in the lower nibbles; bit 7 is 0, as table lookups need it."""
        c = v % 2
        both = self.all_and(self.shift_right(self.load(i8x64, low_at), [2 * c] * 16), 0x33)  # of vectors c and c + 2
        thirds = self.bits(self._two_planes(high_at), [0, 4, 0, 4], 4)
        both = self.b.or_(both, self.third_bits(thirds, c))
        return self.shift_right(both, [4] * 16) if v >= 2 else both

    def plane_signs(self, address, v, a, h, c):
        """Return the bits of `plane` as `signs_of_bits` does."""
        bytes_, starts = self.plane(address, v, a, h, c)
        return self.signs_of_bits(bytes_, range(64), [start for start in starts for _ in range(16)])

    def added(self, codes, on, amount):
        """Return codes + amount in the 32-bit lanes where `on` (<16 x i1>) is set."""
        some = self.ints([amount * 0x01010101] * 16, i32x16)
        return self.b.add(codes, self.b.bitcast(self.b.select(on, some, self.zero(i32x16)), llvm_type(i8x64)))


def _triple_places(v):
    """Return where `_two_triples` has the bits of a code of vector v."""
    return [2 * (v % 2), 2 * (v % 2) + 1, 4 + v % 2]


class GroupFormat(WeightFormat):
    """One format. `w` is the address of a step of 256 columns of the group, `row` what `header` returned."""

    unit = 1  # blocks of 32 columns that share vectors of codes
    order = ORDER4  # column groups of each vector of codes
    shift = 0  # what dot_codes leaves out of some codes
    in_quarters = False  # whether `dot_lanes` has runs n, 4 + n, 8 + n and 12 + n of a unit in vector n, row by row

    @property
    def bias(self):
        """Return the bias: code - bias is a value (symmetric modes).

        It is 0, for signed bytes, or a power of two. See `RowFormat.bias`.
        """
        return 0 if isa.current().signed_codes else 128

    def header(self, e, w):
        """Read the headers of the rows."""

    def codes(self, e, w, u, v):
        """Return vector v of the codes of unit u as i8x64."""
        raise NotImplementedError

    def dot_codes(self, e, w, u, v):
        """Return the codes, but `shift` smaller in the `shifted_lanes`."""
        return self.codes(e, w, u, v)

    def shifted_lanes(self, e, w, part):
        """Return a mask of lanes 16*part.. whose `dot_codes` are too small, in the order of the scales, or None."""

    def scales(self, e, w, row):
        """Yield f32x16 vectors of the scales without `d`: by block, by row; modes *16: by block, by half, by row.

        The caller takes them one by one, between the codes, so that memory is read in order.
        """
        raise NotImplementedError

    def minima(self, e, w, row):
        """Yield the minima like the scales, without `dmin`, for modes m32 and m16."""
        raise NotImplementedError

    def d(self, e, w, row):
        """Return f32 lanes, one per row, that multiply all scales, or None."""

    def dmin(self, e, w, row):
        """Return the same for the minima."""

    def folded_codes(self, e, w, u, v):
        """Return `codes` times whole scales of 16 columns, with a bias of 128 in symmetric modes."""
        raise NotImplementedError

    def folded_d(self, e, w):
        """Return f32 lanes, one per row, that multiply all `folded_codes`."""
        raise NotImplementedError

    def most_magnitude(self):
        """Return 0, or the largest magnitude of a value if `dot_codes` yields magnitudes and signs (1 or -1)."""
        return 0

    def dot_lanes(self):
        """Return (column group, row) of each run of four columns of the vectors of `dot_codes`."""
        return [[(g, r) for g in order for r in range(self.rows)] for order in self.order]

    def scale_lanes(self, mode):
        """Return the scales of a block of 32 columns."""
        return self.rows * scales_per_block(mode)

    def runs(self):
        """Return (block in its unit, half of that, row) of each run of four columns of the vectors of `dot_codes`."""
        return [(g // 8, g % 8 // 4, r) for g, r in self.dot_lanes()[0]]


@functools.cache
def unpack_group(fmt):
    """Return unpack(w, tile, r, k): lanes r .. r+rows-1 of the tile.

    It writes whole steps, for which the tile has room.
    """
    mode, folded = tile_mode(fmt), folds_scales(fmt)
    header, block_bytes = tile_layout(mode, tile_bias(fmt))
    with_signs = has_signs(mode, tile_bias(fmt))
    halves = scales_per_block(mode)
    rows = fmt.rows

    def put(e, parts, d, to, per, made=lambda builder, x: x):
        """Store scales or minima of 8 blocks, `per` for each."""
        for n, values in enumerate(parts):
            values = values if d is None else e.mul(values, e.repeated(d, 16 // rows))
            for i, x in enumerate(e.split(made(e.b, values), rows)):
                block, half = divmod(16 // rows * n + i, per)
                e.store(x, e.offset(to, block * block_bytes + 64 * half))

    waiting = {}  # one of two groups that lie side by side

    def put_group(e, to, g, x, more):
        """Store column group g of a unit; `more`: what a row is further on where two groups are interleaved."""
        at = g // 8 * block_bytes + header
        if not multiplies_matrices():
            e.store(x, e.offset(to, at + (128 if with_signs else 64) * (g % 8)))
            return
        other = waiting.pop(g ^ 1, None)
        if other is None:
            waiting[g] = x
            return
        pair = (x, other) if g % 2 == 0 else (other, x)
        both = e.b.shuffle_vector(*pair, indices([i + rows * which for i in range(rows) for which in range(2)]))
        e.store(both, e.offset(to, more, at + 64 * (g % 8 & ~1)))

    def put_signed(e, to, order, codes, starts):
        """Store magnitudes and signs of column groups; add the magnitudes of negative codes to `starts`."""
        magnitudes, signs = split_signs(e, codes)
        parts = [e.split(e.b.bitcast(x, llvm_type(i32x16)), rows) for x in (magnitudes, signs)]
        parts.append(e.split(add_negative(e, e.zero(i32x16), magnitudes, signs), rows))
        for g, magnitude, sign, negative in zip(order, *parts, strict=True):
            put_group(e, to, g, magnitude, 0)
            put_group(e, e.offset(to, 64), g, sign, 0)
            of = divmod(g // (8 // halves), halves)
            starts[of] = e.b.add(starts.get(of, e.constants([FIRST_SUM] * rows, 32)), negative)

    @intrinsic
    def unpack(typingctx, w, tile, r, k):
        def codegen(context, builder, sig, args):
            w, tile, r, k = args
            e = GroupEmitter(builder)
            row = fmt.header(e, w)
            lane, made = e.offset(tile, e.times(r, 4)), functools.partial(tile_scale, with_signs=with_signs)
            for i, at_w, _ in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                start = e.offset(lane, e.times(i, 8 * block_bytes))
                if folded:
                    put(e, [e.repeated(fmt.folded_d(e, at_w), 16 // rows)] * (rows // 2), None, start, 1, made)
                else:
                    put(e, fmt.scales(e, at_w, row), fmt.d(e, at_w, row), start, halves, made)
                if mode[0] == "m":
                    to = e.offset(start, 64 * halves)
                    put(e, fmt.minima(e, at_w, row), fmt.dmin(e, at_w, row), to, minima_per_block(mode))
                for u in range(8 // fmt.unit):
                    unit, starts = e.offset(start, fmt.unit * u * block_bytes), {}
                    for v, order in enumerate(fmt.order):
                        codes = (fmt.folded_codes if folded else fmt.codes)(e, at_w, u, v)
                        if mode[0] == "s" and fmt.bias != tile_bias(fmt) and not folded:
                            codes = builder.add(codes, e.const64(tile_bias(fmt) - fmt.bias))
                        if with_signs:
                            put_signed(e, unit, order, codes, starts)
                            continue
                        # A run of four columns is one word of the tile already: plain stores, no transposition.
                        words = builder.bitcast(codes, llvm_type(i32x16))
                        for g, x in zip(order, e.split(words, rows), strict=True):
                            put_group(e, unit, g, x, e.times(r, 4))
                    for (block, half), x in starts.items():
                        e.store(x, e.offset(unit, block * block_bytes + 64 * (halves + half)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return unpack
