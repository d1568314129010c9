"""Non-linear types of ik_llama.cpp: IQ*_K (fp16 scale per 256 columns), IQ*_KS, IQ4_KSS and IQ2_KL (scale per row).

A value is a table entry; one bit per sub-block selects a table shifted by a constant. Layouts: `ggml-common.h` and
`iqk_quantize.cpp` of ik_llama.cpp.
"""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels.row_codes import (
    CROSSED_NIBBLES,
    crossed_three_bits,
    crossed_two_bits,
    five_bit_entry,
    plane_starts,
    raw_paired_nibbles,
    split_nibbles,
    three_bit_entry,
    two_bit_entry,
    two_bits,
)
from ikcli.backends.cpu.kernels.rowformat import RowFormat, biased
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.native.simd.emit import I32, I64
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    f32x16,
    i8x16,
    i8x32,
    i8x64,
    i32x16,
    llvm_type,
    pointer,
    with_sign,
)
from ikcli.quant.tables import IQ2_KL_VALUES, IQ2_VALUES, IQ3_VALUES, IQ4_VALUES, IQ5_VALUES, IQ6_VALUES


class _Base(RowFormat):
    """Base of all types.

    `dot_codes` gives entries of the first table; bit i of `table_bits`: block i uses the shifted one.
    """

    def table_bits(self, e, w):
        """Return 16 bits for blocks of 16 columns, at the start of most types as `extra`."""
        return e.b.load(pointer(e.b, e.offset(w, 2), ir.IntType(16)), align=1)

    def shifted_blocks(self, e, w):
        if self.shift:
            bits = self.table_bits(e, w)
            count = bits.type.width
            if "avx512f" in e.features():
                return e.b.bitcast(bits, ir.VectorType(ir.IntType(1), count))
            return e.bits_set(
                e.pick(e.b.bitcast(e.b.zext(bits, I32), ir.VectorType(I32, 1)), [0] * count),
                e.scale_order if count == 16 else range(count),
            )

    def shifted_words(self, e, w):
        words = ir.VectorType(ir.IntType(16), 16)
        bits = e.pick(e.b.bitcast(self.table_bits(e, w), ir.VectorType(ir.IntType(16), 1)), [0] * 16)
        places = e.constants([1 << n for n in range(16)], 16)
        return e.b.sext(e.b.icmp_unsigned("==", e.b.and_(bits, places), places), words)

    def units(self, e, w, row):
        return e.half_everywhere(w), None

    def codes(self, e, w, j):
        codes = super().codes(e, w, j)
        if not self.shift:
            return codes
        on = self.shifted_blocks(e, w)
        per = on.type.count // 4
        lanes = e.pick(on, [per * j + i * per // 16 for i in range(16)])
        add = e.b.select(lanes, e.ints([self.shift * 0x01010101] * 16, i32x16), e.zero(i32x16))
        return e.b.add(codes, e.b.bitcast(add, llvm_type(i8x64)))

    def header(self, e, w):
        if self.header_bytes == 2:
            return e.half(w)
        return e.single(w) if self.header_bytes == 4 else None


# --- codes, which begin `codes_at` bytes behind the start of a block --------------------------------------------------
class _TwoBits(_Base):
    bias, shift = 32, 5

    def dot_codes(self, e, w, j):
        return two_bit_entry(e, biased(IQ2_VALUES[0], self.bias), e.offset(w, self.codes_at), j)

    def quarters(self, e, w):
        return e.codes_of(e.two_bit_quarters(e.offset(w, self.codes_at)), 2, biased(IQ2_VALUES[0], self.bias))


class _ThreeBits(_Base):
    bias, shift = 64, 4

    def dot_codes(self, e, w, j):
        low, third = e.offset(w, self.codes_at), e.offset(w, self.codes_at + 64)
        return three_bit_entry(e, biased(IQ3_VALUES[0], self.bias), low, third, j)

    def quarters(self, e, w):
        low, third = e.offset(w, self.codes_at), e.offset(w, self.codes_at + 64)
        q = e.with_upper(e.two_bit_quarters(low), e.bit_quarters(third, 2), bits=2)
        return e.codes_of(q, 3, biased(IQ3_VALUES[0], self.bias))


class _FourBits(_Base):
    shift = 4

    def dot_codes(self, e, w, j):
        return e.low_entry(biased(IQ4_VALUES[0], self.bias), 4, e.raw_nibble_pair(w, j, 16, self.codes_at))

    def paired_codes(self, e, w, n):
        nibbles = raw_paired_nibbles(e, e.offset(w, self.codes_at), n)
        return e.low_entry(biased(IQ4_VALUES[0], self.bias), 4, nibbles)

    def quarters(self, e, w):
        return e.codes_of(e.nibble_quarters(e.offset(w, self.codes_at)), 4, biased(IQ4_VALUES[0], self.bias))


class _FiveBits(_Base):
    shift = 2

    def dot_codes(self, e, w, j):
        low, fifth = e.offset(w, self.codes_at), e.offset(w, self.codes_at + 128)
        return five_bit_entry(e, biased(IQ5_VALUES[0], self.bias), low, fifth, j)

    def quarters(self, e, w):
        low, fifth = e.offset(w, self.codes_at), e.offset(w, self.codes_at + 128)
        q = e.with_upper(e.nibble_quarters(low, 32), e.bit_quarters(fifth, 4), bits=4)
        return e.codes_of(q, 5, biased(IQ5_VALUES[0], self.bias))


# --- scale per 256 columns --------------------------------------------------------------------------------------------
class IQ2_K(_TwoBits):
    """d f16, extra u16, scales[8], qs[64]."""

    codes_at = 12

    most_scale = 8

    def scales(self, e, w, row):
        return e.mul(e.bytes_to_f32(self.scale_bytes(e, w)), e.splat(e.half(w), f32x16))

    def crossed_codes(self, e, w, h, n):
        table = biased(IQ2_VALUES[0], self.bias)
        table = const_vector(i8x32, [table[max(n & 3, n >> 2)] for n in range(16)] * 2)
        return call_llvm(e.b, "llvm.x86.avx2.pshuf.b", table.type, [table, crossed_two_bits(e, e.offset(w, 12), h, n)])

    def whole_scales(self, e, w):
        return e.b.sub(e.nibbles16_twice(e.offset(w, 4)), e.constants([8] * 32, 8))

    def scale_bytes(self, e, w):
        return e.b.sub(e.nibbles16(e.offset(w, 4)), e.constants([8] * 16, 8))


class IQ3_K(_ThreeBits):
    """d f16, extra u16, scales_h u16 (signs), scales_l[8], qs[64], qh[32]."""

    codes_at = 14

    def scales(self, e, w, row):
        nibbles = e.nibbles16(e.offset(w, 6))
        odd = e.b.or_(e.b.add(nibbles, nibbles), e.constants([1] * 16, 8))
        signs = e.pick(e.bytes_at(e.offset(w, 4), 2), [n // 8 for n in e.scale_order])
        minus = e.bits_set(signs, [n % 8 for n in e.scale_order])
        signed = e.b.select(minus, e.b.neg(odd), odd)
        return e.mul(e.bytes_to_f32(signed), e.splat(e.half(w), f32x16))

    def crossed_codes(self, e, w, h, n):
        codes = crossed_three_bits(e, e.offset(w, 14), e.offset(w, 78), h, n)
        table = const_vector(i8x32, biased(IQ3_VALUES[0], self.bias) * 4)
        return call_llvm(e.b, "llvm.x86.avx2.pshuf.b", table.type, [table, codes])

    def whole_scales(self, e, w):
        nibbles = e.nibbles16_twice(e.offset(w, 6))
        odd = e.b.or_(e.b.add(nibbles, nibbles), e.constants([1] * 32, 8))
        both = e.hidden(e.pick(e.bytes_at(e.offset(w, 4), 2), [0, 1] * 16))
        bits = [1 << n % 8 for n in range(32)]
        minus = e.b.and_(e.pick(both, [n // 8 % 2 for n in range(32)]), e.constants(bits, 8))
        # negative where the bit is set, and never 0
        minus = e.b.add(minus, e.constants([max(128 - bit, 1) for bit in bits], 8))
        return with_sign(e.b, odd, minus)


class _SixBitScales(_Base):
    """d f16, extra u16, scales_h[4], scales_l[8]."""

    scales_are_bytes = True

    def scales(self, e, w, row):
        return e.mul(e.bytes_to_f32(self.scale_bytes(e, w)), e.splat(e.half(w), f32x16))

    def scale_bytes(self, e, w):
        high = e.in_scale_order(e.pick(e.two_bits_at(e.offset(w, 4), to=4), [4 * (n % 4) + n // 4 for n in range(16)]))
        return e.b.sub(e.b.or_(e.nibbles16(e.offset(w, 8)), high), e.constants([32] * 16, 8))


class IQ4_K(_FourBits, _SixBitScales):
    codes_at = 16

    def whole_scales(self, e, w):
        lanes = [16 * half + 4 * (n % 4) + n // 4 for half in range(2) for n in range(16)]
        high = e.pick(e.two_bits_twice(e.offset(w, 4)), lanes)
        return e.b.sub(e.b.or_(e.nibbles16_twice(e.offset(w, 8)), high), e.constants([32] * 32, 8))


class IQ5_K(_FiveBits, _SixBitScales):
    codes_at = 16


class IQ6_K(_Base):
    """d f16, extra u16, int8 scales[16], qs[128], qh[64]. It uses the integer table, as every matmul does."""

    scales_are_bytes = True
    shift = 1

    def scales(self, e, w, row):
        return e.mul(e.bytes_to_f32(self.scale_bytes(e, w)), e.splat(e.half(w), f32x16))

    def scale_bytes(self, e, w):
        return e.in_scale_order(e.load(i8x16, e.offset(w, 4)))

    def dot_codes(self, e, w, j):
        low, high = split_nibbles(e, e.offset(w, 20), j), two_bits(e, e.offset(w, 148), j)
        return e.lookup(biased(IQ6_VALUES[0], self.bias), e.b.or_(low, e.shift_left(high, 4)))

    def quarters(self, e, w):
        q = e.with_upper(e.nibble_quarters(e.offset(w, 20), 32), e.two_bit_quarters(e.offset(w, 148), 4), bits=4)
        return e.codes_of(q, 6, biased(IQ6_VALUES[0], self.bias))


# --- scale per row ----------------------------------------------------------------------------------------------------
class IQ2_KS(_TwoBits):
    """extra u16, scales[4], qs[64]."""

    codes_at = 6

    def scales(self, e, w, row):
        low = e.fields_at(e.offset(w, 2), range(0, 32, 4), 4)
        high = e.fields_at(w, range(8, 16), 1, 16)
        m = e.b.sub(e.b.or_(low, e.b.shl(high, e.ints([4] * 8))), e.ints([16] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def table_bits(self, e, w):
        return e.b.load(pointer(e.b, w, ir.IntType(8)), align=1)


class IQ3_KS(_ThreeBits):
    """extra u16, scales[4], qs[64], qh[32]; nibble i of 8 is scale (i % 2)*4 + i // 2."""

    codes_at = 6

    def scales(self, e, w, row):
        low = e.fields_at(e.offset(w, 2), CROSSED_NIBBLES, 4)
        high = e.fields_at(w, range(8), 1, 16)
        m = e.b.sub(e.b.or_(low, e.b.shl(high, e.ints([4] * 8))), e.ints([16] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def table_bits(self, e, w):
        return e.b.load(pointer(e.b, e.offset(w, 1), ir.IntType(8)), align=1)


class _ByteScales(_Base):
    """scales[8]: bit 0 selects the table, the rest is m + 127."""

    def scale_bytes(self, e, w):
        return e.load_bytes(w, 8)

    def scales(self, e, w, row):
        m = e.b.sub(e.all_and(self.scale_bytes(e, w), 254), e.ints([127] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def shifted_blocks(self, e, w):
        return e.b.trunc(self.scale_bytes(e, w), ir.VectorType(ir.IntType(1), 8))


class IQ4_KS(_FourBits, _ByteScales):
    codes_at = 8


class IQ5_KS(_FiveBits, _ByteScales):
    codes_at = 8


class IQ4_KSS(_ByteScales):
    """64 words: bit 0 of the 8 words of a sub-block is its scale byte, the other 15 bits hold four nibbles."""

    shift = 4

    def scale_bytes(self, e, w):
        words = e.b.load(e.vector_pointer(w, 16, 64), align=1)
        bits = e.opaque(e.b.bitcast(e.b.trunc(words, ir.VectorType(ir.IntType(1), 64)), I64))
        # through an integer register: LLVM would store the mask and load a wider vector, which stalls
        lanes = e.b.insert_element(ir.Constant(ir.VectorType(I64, 2), ir.Undefined), bits, e.index(0))
        as_bytes = e.pick(e.b.bitcast(lanes, llvm_type(i8x16)), range(8))
        return e.b.zext(as_bytes, ir.VectorType(I32, 8))

    def nibbles(self, e, address, n_words):
        """Return bytes of two nibbles, in the layout of other types."""
        u = e.all_and(e.b.load(e.vector_pointer(address, 16, n_words), align=1), 0xFFFE)
        v = e.b.xor(u, e.lshr(u, [1] * n_words))
        return e.b.bitcast(v, ir.VectorType(ir.IntType(8), 2 * n_words))

    def quarters(self, e, w):
        parts = [self.nibbles(e, e.offset(w, at), 32) for at in (0, 64)]
        return e.codes_of(e.nibble_quarters_of(parts, 16), 4, biased(IQ4_VALUES[0], self.bias))

    def dot_codes(self, e, w, j):
        packed = self.nibbles(e, e.offset(w, 32 * j), 16)
        both = e.b.shuffle_vector(packed, packed, indices([*range(16), *range(16), *range(16, 32), *range(16, 32)]))
        nibbles = e.shift_right(both, [0] * 4 + [4] * 4 + [0] * 4 + [4] * 4)
        return e.low_entry(biased(IQ4_VALUES[0], self.bias), 4, nibbles)

    def paired_codes(self, e, w, n):
        packed = self.nibbles(e, e.offset(w, 32 * n), 16)
        return e.low_entry(biased(IQ4_VALUES[0], self.bias), 4, e.raw_halves(e.join(packed, packed), 0, 4))


class IQ2_KL(_Base):
    """scales_h u16, scales_l[4], qs[64], qh[16]: a 5-bit index per pair of columns."""

    bias = 64

    def scales(self, e, w, row):
        low = e.fields_at(e.offset(w, 2), CROSSED_NIBBLES, 4)
        high = e.fields_at(w, range(0, 16, 2), 2, 16)
        m = e.b.sub(e.b.or_(low, e.b.shl(high, e.ints([4] * 8))), e.ints([32] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def dot_codes(self, e, w, j):
        # Bytes: pair p of sub-blocks 2j (low nibbles) and 2j+1 (high nibbles), each index twice.
        q, h = e.load(i8x16, e.offset(w, 6 + 16 * j)), e.load(i8x16, e.offset(w, 70))
        order = [p for _ in range(2) for p in range(16) for _ in range(2)]
        low = e.bits(e.pick(q, order), [0] * 2 + [4] * 2, width=4)
        fifth = e.pick(h, order), plane_starts(j)
        a, b = (e.entry_with_bit(biased([pair[i] for pair in IQ2_KL_VALUES], self.bias), low, *fifth) for i in range(2))
        return e.b.shuffle_vector(a, b, indices([i if i % 2 == 0 else 64 + i for i in range(64)]))

    def quarters(self, e, w):
        if "avx512vbmi" not in e.features():
            return None
        q, h = e.load(i8x64, e.offset(w, 6)), e.load(i8x16, e.offset(w, 70))
        # 32 entries for the first columns of pairs, 32 for the second ones, which are odd bytes
        table = biased([pair[i] for i in range(2) for pair in IQ2_KL_VALUES], self.bias)
        odd = e.b.bitcast(e.ints([0x20002000] * 16, i32x16), q.type)
        return [e.lookup(table, e.b.or_(e.all_and(self._index(e, q, h, n), 31), odd)) for n in range(4)]

    def _index(self, e, q, h, n):
        """Return the indices of columns 4n .. 4n+3 of every block of 16, in the lower five bits."""
        twice = [2 * n, 2 * n, 2 * n + 1, 2 * n + 1]
        low = e.pick(q, [16 * (b // 4) + 8 * (b % 2) + i for b in range(16) for i in twice])
        fifth = e.b.bitcast(e.pick(h, [8 * (b % 2) + i for b in range(16) for i in twice]), llvm_type(i32x16))
        fifth = e.b.bitcast(e.moved(fifth, [b // 2 - 4 for b in range(16)]), low.type)
        return e.with_upper([e.shift_right(low, [b // 2 % 2 * 4 for b in range(16)])], [fifth], bits=4)[0]
