"""Trellis types IQ1_KT .. IQ4_KT (row header f32) and ternary types IQ1_BN, IQ2_BN.

A trellis index seeds a multiplicative generator; value n is the sum of the low 6 bits of the four bytes of
(index + offset) * KA^n, minus 126. Powers of KA make all values of an index one vector product. In matrix products the
row scale of IQ2_KT and IQ3_KT counts 1.05 and 1.01 times, which is what files of these types are made for.
Source: https://github.com/ikawrakow/ik_llama.cpp/pull/113; layouts: ggml-common.h there.
"""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels.row_codes import CROSSED_NIBBLES, plane_starts
from ikcli.backends.cpu.kernels.rowformat import RowFormat
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.native.simd.emit import I32
from ikcli.native.simd.vec import call_llvm, i8x16, i8x64, i32x16, llvm_type
from ikcli.quant.tables import IQ4_NL_VALUES, TRELLIS_OFFSET

_KA = 0xCBAC1FED


def powers(n):
    """Return KA^1 .. KA^n as signed 32-bit numbers."""
    out, x = [], 1
    for _ in range(n):
        x = x * _KA & 0xFFFFFFFF
        out.append(x - (1 << 32) if x >> 31 else x)
    return out


class _Trellis(RowFormat):
    def header(self, e, w):
        return e.b.fmul(e.single(w), ir.Constant(ir.FloatType(), self.matmul_scale))

    def generate(self, e, seeds, n):
        """Return values + 128, or 126, of 16 lanes of seeds, each lane i being value i % n + 1 of its index."""
        factors = e.ints((powers(n) * (16 // n))[:16], i32x16)
        masked = e.all_and(e.b.mul(seeds, factors), 0x3F3F3F3F)
        start = e.ints([2 if self.bias else 0] * 16, i32x16)
        return e.dot(start, e.b.bitcast(masked, llvm_type(i8x64)), e.const64(1), most=63)

    def groups8(self, e, indices):
        """Return 64 values plus bias from 8 indices (i32x8 vector), 8 values each."""
        seeds = e.b.add(indices, e.ints([TRELLIS_OFFSET] * 8))
        return self.pack(e, [self.generate(e, e.pick(seeds, [2 * i] * 8 + [2 * i + 1] * 8), 8) for i in range(4)])

    def pack(self, e, parts):
        """Return 64 values plus bias from the four vectors of `generate`."""
        codes = self.low_bytes(e, parts)
        return codes if self.bias else e.b.sub(codes, e.const64(126))

    def low_bytes(self, e, parts):
        """Return the low bytes of four i32x16 vectors of numbers below 256."""
        if "avx512vbmi" in e.features():
            words = parts[0]
            for n, part in enumerate(parts[1:], 1):
                words = e.b.or_(words, e.b.shl(part, e.ints([8 * n] * 16, i32x16)))
            return e.pick(e.b.bitcast(words, llvm_type(i8x64)), [4 * i + n for n in range(4) for i in range(16)])
        a, b, c, d = parts
        return e.join(e.bytes_of_words(a, b), e.bytes_of_words(c, d))

    def four_values(self, e, index, first):
        """Return values first + 1 .. first + 4, plus 126, of 16 indices, as the bytes of 16 lanes."""
        seeds, four = e.b.add(index, e.ints([TRELLIS_OFFSET] * 16, i32x16)), None
        for factor in reversed(powers(first + 4)[first:]):
            masked = e.all_and(e.b.mul(seeds, e.ints([factor] * 16, i32x16)), 0x3F3F3F3F)
            start = e.zero(i32x16) if four is None else e.b.shl(four, e.ints([8] * 16, i32x16))
            four = e.dot(start, e.b.bitcast(masked, llvm_type(i8x64)), e.const64(1), most=63)
        return e.b.bitcast(four, llvm_type(i8x64))

    def eight_values(self, e, indices):
        """Return `quarters` plus 126 from the two indices of every block of 16 columns."""
        return [self.four_values(e, index, first) for index in indices for first in (0, 4)]

    def with_bias_of(self, e, quarters):
        """Return values plus 126 as `dot_codes`."""
        return [e.b.add(v, e.const64(self.bias - 126)) for v in quarters]

    def nonlinear(self, e, nibbles, row):
        """Return row * iq4_nl value of 8 nibbles (i32x8)."""
        wide = e.b.shuffle_vector(nibbles, e.ints([0] * 8), indices(range(16)))
        entries = e.lookup16([int(v) for v in IQ4_NL_VALUES], e.b.bitcast(wide, llvm_type(i8x64)))
        v = e.pick(e.b.bitcast(entries, wide.type), range(8))
        v = e.b.ashr(e.b.shl(v, e.ints([24] * 8)), e.ints([24] * 8))
        return e.mul(e.ints_to_f32(v), e.splat(row))


class IQ1_KT(_Trellis):
    """sh[8] (scale nibble, four 13th index bits), ql[32], qh[16]."""

    def scales(self, e, w, row):
        return self.nonlinear(e, e.all_and(e.load_bytes(w, 8), 15), row)

    def dot_codes(self, e, w, j):
        low = e.load_bytes(e.offset(w, 8 + 8 * j), 8)
        high = e.all_and(e.lshr(e.load_bytes(e.offset(w, 40 + 8 * (j % 2)), 8), [4 * (j // 2)] * 8), 15)
        sh = e.pick(e.load_bytes(w, 8), [2 * j + g // 4 for g in range(8)])
        top = e.all_and(e.lshr(sh, [4 + g % 4 for g in range(8)]), 1)
        index = e.b.or_(low, e.b.or_(e.b.shl(high, e.ints([8] * 8)), e.b.shl(top, e.ints([12] * 8))))
        return self.groups8(e, index)

    def quarters(self, e, w):
        low = e.words_at(e.offset(w, 8), 16)
        high = e.lshr(e.pick(e.words_at(e.offset(w, 40), 8), [*range(8)] * 2), [0] * 8 + [4] * 8)
        top = e.lshr(e.pick(e.load_bytes(w, 8), [b // 2 for b in range(16)]), [4, 6] * 8)
        index = [_index(e, (low, 8 * n, 8), (high, 8 * n, 4), (top, n, 1)) for n in range(2)]
        return self.with_bias_of(e, self.eight_values(e, index))


def _index(e, *fields):
    """Return 16 lanes, of fields (lanes, first bit, width) from bit 0 upwards."""
    index, to = None, 0
    for v, start, width in fields:
        field = e.all_and(e.moved(v, [start - to] * 16), (1 << width) - 1 << to)
        index, to = field if index is None else e.b.or_(index, field), to + width
    return index


def indices16(e, address):
    """Return 8 u16 indices as i32x8."""
    return e.b.zext(e.b.load(e.vector_pointer(address, 16, 8), align=1), ir.VectorType(I32, 8))


def pairs16(e, address):
    """Return 32 u16 indices: the even ones, and the odd ones, as i32x16."""
    both = e.load(i32x16, address)
    return e.all_and(both, 0xFFFF), e.lshr(both, [16] * 16)


class IQ2_KT(_Trellis):
    """scales[4], ql u16[32]."""

    def scales(self, e, w, row):
        return self.nonlinear(e, e.fields_at(w, CROSSED_NIBBLES, 4), row)

    def dot_codes(self, e, w, j):
        return self.groups8(e, indices16(e, e.offset(w, 4 + 16 * j)))

    def quarters(self, e, w):
        return self.with_bias_of(e, self.eight_values(e, pairs16(e, e.offset(w, 4))))


class IQ3_KT(_Trellis):
    """scales[4], ql u16[32], qh[32]: magnitudes from the trellis, sign bits in qh."""

    def scales(self, e, w, row):
        return e.mul(e.ints_to_f32(e.fields_at(w, CROSSED_NIBBLES, 4)), e.splat(row))

    def dot_codes(self, e, w, j):
        values = e.with_bias(self.groups8(e, indices16(e, e.offset(w, 4 + 16 * j))), self.bias)  # or without it again
        return self.signed(e, values, e.bits(e.twice(e.offset(w, 68)), plane_starts(j), width=1, to=7))

    def quarters(self, e, w):
        values = [e.b.sub(v, e.const64(126)) for v in self.eight_values(e, pairs16(e, e.offset(w, 4)))]
        return [self.signed(e, v, s) for v, s in zip(values, e.bit_quarters(e.offset(w, 68), 7), strict=True)]

    def signed(self, e, values, signs):
        """Return these magnitudes, negated where `signs` is negative, as `dot_codes`."""
        points = call_llvm(e.b, "llvm.abs.v64i8", values.type, [values, ir.Constant(ir.IntType(1), 0)])
        return e.signed(points, signs, -self.bias)  # 128 and -128 are the same byte


class IQ4_KT(_Trellis):
    """shb u32[8] (table bit, 7-bit scale, eight 3-bit index parts), ql[64], qh[32]; 4 values per index."""

    def words(self, e, w):
        return e.b.load(e.vector_pointer(w, 32, 8), align=1)

    def scales(self, e, w, row):
        m = e.b.sub(e.lshr(e.all_and(self.words(e, w), 255), [1] * 8), e.ints([64] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def dot_codes(self, e, w, j):
        low = e.load_bytes(e.offset(w, 32 + 16 * j), 16)
        high = e.all_and(e.lshr(e.load_bytes(e.offset(w, 96 + 16 * (j % 2)), 16), [4 * (j // 2)] * 16), 15)
        shb = e.pick(self.words(e, w), [2 * j + g // 8 for g in range(16)])
        top = e.all_and(e.lshr(shb, [8 + 3 * (g % 8) for g in range(16)]), 7)
        table = e.b.shl(e.all_and(shb, 1), e.ints([15] * 16, i32x16))
        index = e.b.or_(low, e.b.or_(e.b.shl(high, e.ints([8] * 16, i32x16)), e.b.shl(top, e.ints([12] * 16, i32x16))))
        seeds = e.b.add(index, e.b.add(table, e.ints([TRELLIS_OFFSET] * 16, i32x16)))
        return self.pack(e, [self.generate(e, e.pick(seeds, [4 * p + i // 4 for i in range(16)]), 4) for p in range(4)])

    def quarters(self, e, w):
        low = e.load(i32x16, e.offset(w, 32))
        high = e.b.load(e.vector_pointer(e.offset(w, 96), 32, 8), align=1)
        high = e.lshr(e.pick(high, [*range(8)] * 2), [0] * 8 + [4] * 8)
        shb = e.pick(self.words(e, w), [b // 2 for b in range(16)])
        top = e.lshr(shb, [8, 20] * 8)
        index = [_index(e, (low, 8 * n, 8), (high, 8 * n, 4), (top, 3 * n, 3), (shb, 0, 1)) for n in range(4)]
        return self.with_bias_of(e, [self.four_values(e, x, 0) for x in index])


class IQ2_BN(RowFormat):
    """Row header f32; 16 bytes per 64 columns, column 16g + i at bits 2g of byte i; values code - 1."""

    bias = 1

    def header(self, e, w):
        return e.single(w)

    def scales(self, e, w, row):
        return e.splat(row)

    def dot_codes(self, e, w, j):
        v = e.pick(e.load(i8x16, e.offset(w, 16 * j)), list(range(16)) * 4)
        return e.all_and(e.shift_right(v, [2 * (i // 4) for i in range(16)]), 3)


class IQ1_BN(RowFormat):
    """Row header f16; 13 bytes per 64 columns: base-3 digits, five per byte, the last byte for every 16th column."""

    bias = 1

    def header(self, e, w):
        return e.half(w)

    def scales(self, e, w, row):
        return e.splat(row)

    def dot_codes(self, e, w, j):
        at = e.offset(w, 13 * j)
        # Two overlapping loads stay inside the 13 bytes.
        first, last = (
            e.b.load(e.vector_pointer(at, 8, 8), align=1),
            e.b.load(e.vector_pointer(e.offset(at, 5), 8, 8), align=1),
        )
        source, factor = [], []
        for c in range(4):
            for p in range(16):
                byte, digit = (3 * c + p // 5, p % 5) if p < 15 else (12, c)
                source.append(byte if byte < 8 else 8 + byte - 5)
                factor.append(3 ** (4 - digit))
        wide = ir.VectorType(ir.IntType(16), 64)

        def const(values):
            return ir.Constant(wide, [ir.Constant(wide.element, v) for v in values])

        v = e.b.zext(e.b.shuffle_vector(first, last, indices(source)), wide)
        low = e.b.and_(e.b.mul(v, const(factor)), const([255] * 64))
        digits = e.b.lshr(e.b.mul(low, const([3] * 64)), const([8] * 64))
        return e.b.trunc(digits, ir.VectorType(ir.IntType(8), 64))
