"""Formats of 32-column blocks: q8_0 q6_0 q5_0 q5_1 q4_0 q4_1 iq4_nl mxfp4, and q8_KV with one scale per row.

Layouts: ggml-common.h. All but the `_1` types are symmetric; iq4_nl and mxfp4 look up their values.
"""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels.row_codes import raw_paired_nibbles
from ikcli.backends.cpu.kernels.rowformat import RowFormat, biased, exponent_scales
from ikcli.native.simd.emit import I64
from ikcli.native.simd.vec import i8x32, i8x64
from ikcli.quant.tables import IQ4_NL_VALUES, MXFP4_VALUES


class _Blocks32(RowFormat):
    """Blocks of 32 columns that start with a half-float scale."""

    def scales(self, e, w, row):
        return e.halves_at(w, self.block_bytes)

    def fifth_bits(self, e, w, j, at):
        """Return the mask of the columns whose bit 4 is set."""
        return e.bit_mask(*(e.word(e.offset(w, self.block_bytes * b + at)) for b in (2 * j, 2 * j + 1)))


class Q8_0(_Blocks32):
    full_range = True

    def dot_codes(self, e, w, j):
        lo, hi = (e.load(i8x32, e.offset(w, 34 * b + 2)) for b in (2 * j, 2 * j + 1))
        return e.with_bias(e.join(lo, hi), self.bias)


class Q4_0(_Blocks32):
    bias = 8

    def dot_codes(self, e, w, j):
        return e.nibble_pair(w, j, 18, 2)

    def paired_codes(self, e, w, n):
        return e.all_and(raw_paired_nibbles(e, e.offset(w, 2), n, 18), 15)

    def quarters(self, e, w):
        return e.codes_of(e.apart_nibble_quarters(e.offset(w, 2), 18), 4)


class Q5_0(_Blocks32):
    bias = 16

    def dot_codes(self, e, w, j):
        low = e.nibble_pair(w, j, 22, 6)
        return e.b.select(self.fifth_bits(e, w, j, 2), e.b.add(low, e.const64(16)), low)


class Q6_0(_Blocks32):
    bias = 32

    def dot_codes(self, e, w, j):
        low = e.nibble_pair(w, j, 26, 10)
        # Upper bits of column c: byte c % 8, shift 4*((c % 16) // 8) + 2*(c // 16).
        t = ir.VectorType(I64, 8)
        first, second = (e.splat64(e.word(e.offset(w, 26 * b + 2), 64)) for b in (2 * j, 2 * j + 1))
        second_half = ir.Constant(ir.VectorType(ir.IntType(1), 8), [0] * 4 + [1] * 4)
        both = e.lshr(e.b.select(second_half, second, first), [0, 4, 2, 6] * 2)
        upper = e.b.shl(e.all_and(both, 0x0303030303030303), ir.Constant(t, [4] * 8))
        return e.b.or_(low, e.b.bitcast(upper, low.type))


class _WithMin(_Blocks32):
    """Blocks with scale and minimum."""

    def minima(self, e, w, row):
        return e.halves_at(e.offset(w, 2), self.block_bytes)


class Q4_1(_WithMin):
    most_with_minimum = 15

    def codes(self, e, w, j):
        return e.nibble_pair(w, j, 20, 4)

    def paired_codes(self, e, w, n):
        return e.all_and(raw_paired_nibbles(e, e.offset(w, 4), n, 20), 15)

    def quarters(self, e, w):
        return e.codes_of(e.apart_nibble_quarters(e.offset(w, 4), 20), 4)


class Q5_1(_WithMin):
    def codes(self, e, w, j):
        low = e.nibble_pair(w, j, 24, 8)
        return e.b.select(self.fifth_bits(e, w, j, 4), e.b.add(low, e.const64(16)), low)


class IQ4_NL(_Blocks32):
    def dot_codes(self, e, w, j):
        return e.low_entry(biased(IQ4_NL_VALUES, self.bias), 4, e.raw_nibble_pair(w, j, 18, 2))

    def paired_codes(self, e, w, n):
        return e.low_entry(biased(IQ4_NL_VALUES, self.bias), 4, raw_paired_nibbles(e, e.offset(w, 2), n, 18))

    def quarters(self, e, w):
        return e.codes_of(e.apart_nibble_quarters(e.offset(w, 2), 18), 4, biased(IQ4_NL_VALUES, self.bias))


class MXFP4(_Blocks32):
    """Scale 2**(e - 128) from an exponent byte; the table holds doubled values."""

    bias = 16

    def scales(self, e, w, row):
        exponents = [e.word(e.offset(w, 17 * b), 8) for b in range(8)]
        v = e.ints([0] * 8)
        for i, x in enumerate(exponents):
            v = e.b.insert_element(v, x, e.index(i))
        return exponent_scales(e, v)

    def dot_codes(self, e, w, j):
        return e.low_entry(biased(MXFP4_VALUES, self.bias), 4, e.raw_nibble_pair(w, j, 17, 1))

    def paired_codes(self, e, w, n):
        return e.low_entry(biased(MXFP4_VALUES, self.bias), 4, raw_paired_nibbles(e, e.offset(w, 1), n, 17))

    def quarters(self, e, w):
        return e.codes_of(e.apart_nibble_quarters(e.offset(w, 1), 17), 4, biased(MXFP4_VALUES, self.bias))


class Q8_KV(RowFormat):
    """Row header: f32 scale, i32 sum; then int8."""

    full_range = True

    def header(self, e, w):
        return e.single(w)

    def scales(self, e, w, row):
        return e.splat(row)

    def dot_codes(self, e, w, j):
        return e.with_bias(e.load(i8x64, e.offset(w, 64 * j)), self.bias)
