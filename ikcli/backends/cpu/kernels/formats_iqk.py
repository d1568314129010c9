"""Non-linear types of ik_llama.cpp: IQ*_K (fp16 scale per 256 columns), IQ*_KS, IQ4_KSS and IQ2_KL (scale per row).

A value is a table entry; one bit per sub-block selects a table shifted by a constant. Layouts: `ggml-common.h` and
`iqk_quantize.cpp` of ik_llama.cpp.
"""

from ikcli.backends.cpu.kernels.format_api import plain_formats
from ikcli.backends.cpu.kernels.formats_kquants import two_bits
from ikcli.backends.cpu.kernels.rowformat import I32, RowFormat, indices, ir
from ikcli.native.simd.vec import f32x16, i8x16, i8x32, i8x64, i32x16, llvm_type
from ikcli.quant.tables import IQ2_KL_VALUES, IQ2_VALUES, IQ3_VALUES, IQ4_VALUES, IQ5_VALUES, IQ6_VALUES

_NIBBLES8 = [4 * i for i in range(8)]


class _Base(RowFormat):
    def __init__(self, name, n_bytes, header_bytes=0):
        self.name, self.block_bytes, self.step_bytes, self.header_bytes = name, n_bytes, n_bytes, header_bytes

    def header(self, e, w):
        if self.header_bytes == 2:
            return e.half(w)
        return e.single(w) if self.header_bytes == 4 else None

    def shifted(self, e, codes, bits, j, per_chunk, shift):
        """codes + shift where the table bit of the column's sub-block is set; `bits` is an i32 of table bits."""
        lanes = [j * per_chunk + i * per_chunk // 16 for i in range(16)]
        on = e.all_and(e.lshr(e.splat_int(bits, i32x16), lanes), 1)
        add = e.b.mul(on, e.ints([shift * 0x01010101] * 16, i32x16))
        return e.b.add(codes, e.b.bitcast(add, llvm_type(i8x64)))


def biased(table):
    """Table values + 128, padded to 16 entries."""
    values = [int(v) + 128 for v in table]
    return values + [0] * (16 - len(values))


def lookup32(e, table, low, high):
    """Entry of a 32-value table; `high` is the mask of columns with bit 4 set."""
    values = [int(v) + 128 for v in table]
    return e.b.select(high, e.lookup16(values[16:], low), e.lookup16(values[:16], low))


def is_set(e, v):
    """Mask of non-zero bytes."""
    return e.b.icmp_unsigned("!=", v, e.const64(0))


def split_nibbles(e, address, j):
    """Nibbles of 32-byte runs: sub-block 2j low, 2j+1 high."""
    return e.all_and(e.shift_halves(e.twice(e.offset(address, 32 * j)), 0, 4), 15)


def bit_plane(e, address, j):
    """Bytes 0/1: bit b of 32 bytes for sub-blocks b = 2j and 2j+1."""
    return e.all_and(e.shift_halves(e.twice(address), 2 * j, 2 * j + 1), 1)


# --- scale per 256 columns --------------------------------------------------------------------------------------------
def nibbles16(e, address):
    """16 nibbles of 8 bytes, low first, as i32x16."""
    v = e.pick(e.load_bytes(address, 8), [n // 2 for n in range(16)])
    return e.all_and(e.lshr(v, [4 * (n % 2) for n in range(16)]), 15)


class IQ2K(_Base):
    """d f16, extra u16, scales[8], qs[64]."""

    def scales(self, e, w, row):
        m = e.b.sub(nibbles16(e, e.offset(w, 4)), e.ints([8] * 16, i32x16))
        return e.mul(e.ints_to_f32(m), e.splat(e.half(w), f32x16))

    def codes(self, e, w, j):
        codes = e.lookup16(biased(IQ2_VALUES[0]), two_bits(e, e.offset(w, 12), j))
        return self.shifted(e, codes, e.word(e.offset(w, 2), 16), j, 4, 5)


class IQ3K(_Base):
    """d f16, extra u16, scales_h u16 (signs), scales_l[8], qs[64], qh[32]."""

    def scales(self, e, w, row):
        odd = e.b.add(e.b.shl(nibbles16(e, e.offset(w, 6)), e.ints([1] * 16, i32x16)), e.ints([1] * 16, i32x16))
        sign = e.all_and(e.lshr(e.splat_int(e.word(e.offset(w, 4), 16), i32x16), list(range(16))), 1)
        factor = e.b.sub(e.ints([1] * 16, i32x16), e.b.shl(sign, e.ints([1] * 16, i32x16)))
        return e.mul(e.ints_to_f32(e.b.mul(odd, factor)), e.splat(e.half(w), f32x16))

    def codes(self, e, w, j):
        q = e.b.or_(two_bits(e, e.offset(w, 14), j), e.shift_left(bit_plane(e, e.offset(w, 78), j), 2))
        return self.shifted(e, e.lookup16(biased(IQ3_VALUES[0]), q), e.word(e.offset(w, 2), 16), j, 4, 4)


class _SixBitScales(_Base):
    """d f16, extra u16, scales_h[4], scales_l[8]."""

    def scales(self, e, w, row):
        v = e.pick(e.load_bytes(e.offset(w, 4), 4), [n // 4 for n in range(16)])
        high = e.all_and(e.lshr(v, [2 * (n % 4) for n in range(16)]), 3)
        u = e.b.or_(nibbles16(e, e.offset(w, 8)), e.b.shl(high, e.ints([4] * 16, i32x16)))
        return e.mul(e.ints_to_f32(e.b.sub(u, e.ints([32] * 16, i32x16))), e.splat(e.half(w), f32x16))


class IQ4K(_SixBitScales):
    def codes(self, e, w, j):
        codes = e.lookup16(biased(IQ4_VALUES[0]), e.nibble_pair(w, j, 16, 16))
        return self.shifted(e, codes, e.word(e.offset(w, 2), 16), j, 4, 4)


class IQ5K(_SixBitScales):
    def codes(self, e, w, j):
        high = is_set(e, bit_plane(e, e.offset(w, 144), j))
        codes = lookup32(e, IQ5_VALUES[0], split_nibbles(e, e.offset(w, 16), j), high)
        return self.shifted(e, codes, e.word(e.offset(w, 2), 16), j, 4, 2)


class IQ6K(_Base):
    """d f16, extra u16, int8 scales[16], qs[128], qh[64]. Computes with the integer table, as every matmul does."""

    def scales(self, e, w, row):
        return e.mul(e.bytes_to_f32(e.load(i8x16, e.offset(w, 4))), e.splat(e.half(w), f32x16))

    def codes(self, e, w, j):
        low, high = split_nibbles(e, e.offset(w, 20), j), two_bits(e, e.offset(w, 148), j)
        upper = is_set(e, e.all_and(high, 2))
        odd = is_set(e, e.all_and(high, 1))
        codes = e.b.select(upper, lookup32(e, IQ6_VALUES[0][32:], low, odd), lookup32(e, IQ6_VALUES[0][:32], low, odd))
        return self.shifted(e, codes, e.word(e.offset(w, 2), 16), j, 4, 1)


# --- scale per row ----------------------------------------------------------------------------------------------------
class IQ2KS(_Base):
    """extra u16, scales[4], qs[64]."""

    def scales(self, e, w, row):
        low = e.all_and(e.lshr(e.splat_int(e.word(e.offset(w, 2))), _NIBBLES8), 15)
        high = e.all_and(e.lshr(e.splat_int(e.word(w, 16)), [8 + i for i in range(8)]), 1)
        m = e.b.sub(e.b.or_(low, e.b.shl(high, e.ints([4] * 8))), e.ints([16] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def codes(self, e, w, j):
        codes = e.lookup16(biased(IQ2_VALUES[0]), two_bits(e, e.offset(w, 6), j))
        return self.shifted(e, codes, e.word(w, 16), j, 2, 5)


class IQ3KS(_Base):
    """extra u16, scales[4], qs[64], qh[32]; nibble i of 8 is scale (i % 2)*4 + i // 2."""

    def scales(self, e, w, row):
        low = e.all_and(e.lshr(e.splat_int(e.word(e.offset(w, 2))), [8 * (i % 4) + 4 * (i // 4) for i in range(8)]), 15)
        high = e.all_and(e.lshr(e.splat_int(e.word(w, 16)), list(range(8))), 1)
        m = e.b.sub(e.b.or_(low, e.b.shl(high, e.ints([4] * 8))), e.ints([16] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def codes(self, e, w, j):
        q = e.b.or_(two_bits(e, e.offset(w, 6), j), e.shift_left(bit_plane(e, e.offset(w, 70), j), 2))
        bits = e.b.lshr(e.word(w, 16), e.index(8))
        return self.shifted(e, e.lookup16(biased(IQ3_VALUES[0]), q), bits, j, 2, 4)


class _ByteScales(_Base):
    """scales[8]: bit 0 selects the table, the rest is m + 127."""

    def scale_bytes(self, e, w):
        return e.load_bytes(w, 8)

    def scales(self, e, w, row):
        m = e.b.sub(e.all_and(self.scale_bytes(e, w), 254), e.ints([127] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def with_shift(self, e, w, codes, j, shift):
        on = e.all_and(e.pick(self.scale_bytes(e, w), [2 * j + i // 8 for i in range(16)]), 1)
        add = e.b.mul(on, e.ints([shift * 0x01010101] * 16, i32x16))
        return e.b.add(codes, e.b.bitcast(add, llvm_type(i8x64)))


class IQ4KS(_ByteScales):
    def codes(self, e, w, j):
        codes = e.lookup16(biased(IQ4_VALUES[0]), e.nibble_pair(w, j, 16, 8))
        return self.with_shift(e, w, codes, j, 4)


class IQ5KS(_ByteScales):
    def codes(self, e, w, j):
        high = is_set(e, bit_plane(e, e.offset(w, 136), j))
        codes = lookup32(e, IQ5_VALUES[0], split_nibbles(e, e.offset(w, 8), j), high)
        return self.with_shift(e, w, codes, j, 2)


class IQ4KSS(_ByteScales):
    """64 words: bit 0 of the 8 words of a sub-block is its scale byte, the other 15 bits hold four nibbles."""

    def scale_bytes(self, e, w):
        words = e.b.load(e.vector_pointer(w, 16, 64), align=1)
        bits = e.b.trunc(words, ir.VectorType(ir.IntType(1), 64))
        as_bytes = e.b.bitcast(bits, ir.VectorType(ir.IntType(8), 8))
        return e.b.zext(as_bytes, ir.VectorType(I32, 8))

    def codes(self, e, w, j):
        t = ir.VectorType(ir.IntType(16), 16)
        u = e.all_and(e.b.load(e.vector_pointer(e.offset(w, 32 * j), 16, 16), align=1), 0xFFFE)
        v = e.b.xor(u, e.b.lshr(u, ir.Constant(t, [ir.Constant(t.element, 1)] * 16)))
        packed = e.b.bitcast(v, llvm_type(i8x32))
        both = e.b.shuffle_vector(packed, packed, indices([*range(16), *range(16), *range(16, 32), *range(16, 32)]))
        q = e.all_and(e.shift_right(both, [0] * 4 + [4] * 4 + [0] * 4 + [4] * 4), 15)
        return self.with_shift(e, w, e.lookup16(biased(IQ4_VALUES[0]), q), j, 4)


class IQ2KL(_Base):
    """scales_h u16, scales_l[4], qs[64], qh[16]: a 5-bit index per pair of columns."""

    def scales(self, e, w, row):
        low = e.all_and(e.lshr(e.splat_int(e.word(e.offset(w, 2))), [8 * (i % 4) + 4 * (i // 4) for i in range(8)]), 15)
        high = e.all_and(e.lshr(e.splat_int(e.word(w, 16)), [2 * i for i in range(8)]), 3)
        m = e.b.sub(e.b.or_(low, e.b.shl(high, e.ints([4] * 8))), e.ints([32] * 8))
        return e.mul(e.ints_to_f32(m), e.splat(row))

    def codes(self, e, w, j):
        # Bytes: pair p of sub-blocks 2j (low nibbles) and 2j+1 (high nibbles), each index twice.
        q, h = e.load(i8x16, e.offset(w, 6 + 16 * j)), e.load(i8x16, e.offset(w, 70))
        order = [p for _ in range(2) for p in range(16) for _ in range(2)]
        low = e.all_and(e.shift_halves(e.pick(q, order), 0, 4), 15)
        high = is_set(e, e.all_and(e.shift_halves(e.pick(h, order), 2 * j, 2 * j + 1), 1))
        first, second = ([pair[i] for pair in IQ2_KL_VALUES] for i in range(2))
        a, b = lookup32(e, first, low, high), lookup32(e, second, low, high)
        return e.b.shuffle_vector(a, b, indices([i if i % 2 == 0 else 64 + i for i in range(64)]))


FORMATS = plain_formats(
    IQ2K("iq2_k", 76),
    IQ3K("iq3_k", 110),
    IQ4K("iq4_k", 144),
    IQ5K("iq5_k", 176),
    IQ6K("iq6_k", 212),
    IQ2KS("iq2_ks", 70, 2),
    IQ3KS("iq3_ks", 102, 2),
    IQ4KS("iq4_ks", 136, 4),
    IQ5KS("iq5_ks", 168, 4),
    IQ4KSS("iq4_kss", 128, 4),
    IQ2KL("iq2_kl", 86, 2),
)
