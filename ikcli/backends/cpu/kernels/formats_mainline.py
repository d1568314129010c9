"""Formats of llama.cpp alone: tq1_0, tq2_0 (ternary), q1_0 (bits), q2_0 (two bits) and nvfp4 (floats of 4 bits).

Layouts: `decoders.mainline`.
"""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels.row_codes import two_bits
from ikcli.backends.cpu.kernels.rowformat import RowFormat, biased
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.native.simd.vec import f32x16, i8x16, i8x32, i8x64, i32x16, llvm_type
from ikcli.quant.tables import MXFP4_VALUES

_I8, _I16 = ir.IntType(8), ir.IntType(16)


def _wide(values):
    """Return 64 constants of 16 bits."""
    t = ir.VectorType(_I16, 64)
    return ir.Constant(t, [ir.Constant(_I16, v) for v in values])


def _narrow(e, v):
    return e.b.trunc(v, ir.VectorType(_I8, 64))


class TQ2_0(RowFormat):
    """qs[64], d f16."""

    bias = 1

    def scales(self, e, w, row):
        return e.splat(e.half(e.offset(w, 64)))

    def dot_codes(self, e, w, j):
        return two_bits(e, w, j)

    def quarters(self, e, w):
        return e.codes_of(e.two_bit_quarters(w), 2)


class TQ1_0(RowFormat):
    """qs[48], qh[4], d f16: base-3 digits, as fractions."""

    bias = 1

    def scales(self, e, w, row):
        return e.splat(e.half(e.offset(w, 52)))

    def dot_codes(self, e, w, j):
        # Loads stay inside the 54 bytes: 0..31, 32..47 and 38..53.
        first = e.b.load(e.vector_pointer(w, 8, 32), align=1)
        parts = [e.b.load(e.vector_pointer(e.offset(w, at), 8, 16), align=1) for at in (32, 38)]
        last = e.b.shuffle_vector(*parts, indices(range(32)))
        source, factor = [], []
        for c in range(64 * j, 64 * j + 64):
            if c < 160:
                byte, digit = c % 32, c // 32
            elif c < 240:
                byte, digit = 32 + (c - 160) % 16, (c - 160) // 16
            else:
                byte, digit = 58 + (c - 240) % 4, (c - 240) // 4  # byte 48 is the tenth of the last load
            source.append(byte)
            factor.append(3**digit)
        v = e.b.zext(e.b.shuffle_vector(first, last, indices(source)), ir.VectorType(_I16, 64))
        low = e.b.and_(e.b.mul(v, _wide(factor)), _wide([255] * 64))
        return _narrow(e, e.b.lshr(e.b.mul(low, _wide([3] * 64)), _wide([8] * 64)))


class Q1_0_G128(RowFormat):
    """Blocks of 128: d f16, bits; d or -d."""

    bias = 1

    def scales(self, e, w, row):
        both = e.halves_at(w, 18, count=2)
        return e.b.shuffle_vector(both, both, indices([0] * 4 + [1] * 4))

    def dot_codes(self, e, w, j):
        at = e.offset(w, 18 * (j // 2) + 2 + 8 * (j % 2))
        mask = e.bit_mask(e.word(at), e.word(e.offset(at, 4)))
        return e.b.select(mask, e.const64(2), e.const64(0))


class Q2_0(RowFormat):
    """Blocks of 64: d f16, 2 bits of adjacent columns."""

    bias = 1

    def scales(self, e, w, row):
        four = e.halves_at(w, 18, count=4)
        return e.b.shuffle_vector(four, four, indices([0, 0, 1, 1, 2, 2, 3, 3]))

    def dot_codes(self, e, w, j):
        v = e.b.load(e.vector_pointer(e.offset(w, 18 * j + 2), 8, 16), align=1)
        wide = e.b.zext(e.b.shuffle_vector(v, v, indices([c // 4 for c in range(64)])), ir.VectorType(_I16, 64))
        return _narrow(e, e.b.and_(e.b.lshr(wide, _wide([0, 2, 4, 6] * 16)), _wide([3] * 64)))


class NVFP4(RowFormat):
    """Blocks of 64: 4 scales E4M3 of 16 columns, 32 bytes; the table holds doubled values."""

    bias = 16

    def scales(self, e, w, row):
        """Return half the scales. They are made of bits: threads may read denormal numbers as 0."""
        words = e.zero_words()
        for j in range(4):
            words = e.b.insert_element(words, e.word(e.offset(w, 36 * j)), e.index(j))
        wide = llvm_type(i32x16)
        x = e.b.zext(e.in_scale_order(e.b.bitcast(words, llvm_type(i8x16))), wide)
        normal = e.b.add(e.b.shl(e.all_and(x, 127), e.ints([20] * 16, i32x16)), e.ints([119 << 23] * 16, i32x16))
        tiny = e.mul(e.ints_to_f32(e.all_and(x, 7)), ir.Constant(llvm_type(f32x16), [2.0**-10] * 16))
        is_tiny = e.b.icmp_signed("==", e.all_and(x, 120), e.zero(i32x16))
        v = e.b.select(is_tiny, tiny, e.b.bitcast(normal, llvm_type(f32x16)))
        return e.b.select(e.b.icmp_signed("==", x, e.ints([127] * 16, i32x16)), e.zero(f32x16), v)  # NaN counts as 0

    def dot_codes(self, e, w, j):
        v = e.pick(e.load(i8x32, e.offset(w, 36 * j + 4)), [8 * (c // 16) + c % 8 for c in range(64)])
        return e.low_entry(biased(MXFP4_VALUES, self.bias), 4, e.shift_right(v, [0, 0, 4, 4] * 4))

    def quarters(self, e, w):
        parts = [e.load(i8x32, e.offset(w, 36 * j + 4)) for j in range(4)]
        first, second = (e.b.bitcast(e.joined(two), llvm_type(i32x16)) for two in (parts[:2], parts[2:]))
        halves = [e.b.shuffle_vector(first, second, indices(range(start, 32, 2))) for start in (0, 1)]
        low = [e.b.bitcast(v, llvm_type(i8x64)) for v in halves]
        return e.codes_of([*low, *(e.shift_right(v, [4] * 16) for v in low)], 4, biased(MXFP4_VALUES, self.bias))
