"""K-quants and iq4_xs: super-blocks of 256 columns with packed sub-block scales (layouts: ggml-common.h)."""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels.row_codes import (
    bit_plane,
    crossed_three_bits,
    crossed_two_bits,
    raw_paired_nibbles,
    split_nibbles,
    two_bits,
)
from ikcli.backends.cpu.kernels.row_emitter import bit_places, nibble_places, two_bit_places
from ikcli.backends.cpu.kernels.rowformat import RowFormat, biased
from ikcli.native.simd.emit import I32
from ikcli.native.simd.half import half_to_f32
from ikcli.native.simd.vec import f32x16, i8x16, i8x32, i8x64, i32x16, llvm_type
from ikcli.quant.tables import IQ4_NL_VALUES


def both_halves(e, address):
    """Return two adjacent half floats, in turns in eight lanes."""
    both = e.b.bitcast(e.word(address), ir.VectorType(ir.IntType(16), 2))
    return half_to_f32(e.b, e.pick(both, [0, 1] * 4))


def both_units(e, address):
    """Return two adjacent half floats in all lanes of f32x8."""
    both = both_halves(e, address)
    return e.pick(both, [0, 0, 2, 2, 4, 4, 6, 6]), e.pick(both, [1, 1, 3, 3, 5, 5, 7, 7])


def _eights(j):
    """Return the blocks of 16 columns of pairs of columns 64j .. 64j+63."""
    return [4 * j + n // 8 for n in range(32)]


class Q4_K(RowFormat):
    """d, dmin f16, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles."""

    def scales(self, e, w, row):
        return e.pick(self._products(e, w), range(8))

    def minima(self, e, w, row):
        return e.b.fneg(e.pick(self._products(e, w), range(8, 16)))

    def _products(self, e, w):
        """Return d times 8 scales, then dmin times 8 minima."""
        if ("products", w) not in e.memo:
            packed = e.b.zext(e.b.bitcast(self._words(e, w, 1), llvm_type(i8x16)), llvm_type(i32x16))
            both = e.pick(both_halves(e, w), [0] * 8 + [1] * 8)
            e.memo["products", w] = e.mul(e.ints_to_f32(packed), both)
        return e.memo["products", w]

    signed_scales, most_with_minimum = False, 15

    def whole_scales(self, e, w):
        return e.pick(self._packed(e, w), [16 * (n // 16) + n % 16 // 2 for n in range(32)])

    def whole_minima(self, e, w):
        return e.pick(self._packed(e, w), [16 * (n // 16) + 8 + n % 16 // 2 for n in range(32)])

    def units(self, e, w, row):
        return both_units(e, w)

    def _packed(self, e, w):
        """Return bytes of 8 scales and 8 minima, twice."""
        if ("packed", w) not in e.memo:
            e.memo["packed", w] = e.b.bitcast(self._words(e, w, 2), llvm_type(i8x32))
        return e.memo["packed", w]

    def _words(self, e, w, times):
        """Unpack the 12 bytes of 6-bit numbers: 8 scales, then 8 minima, as bytes of 4 i32, once or twice."""

        def lanes(four):
            return [4 * n + i for n in range(times) for i in four]

        words = e.b.bitcast(e.pick(e.load(i8x16, e.offset(w, 4)), [*range(16)] * times), ir.VectorType(I32, 4 * times))
        words = e.hidden(words) if times == 2 else words
        low = e.lshr(e.pick(words, lanes([0, 2, 1, 2])), [0, 0, 0, 4] * times)
        low = e.b.and_(low, e.constants([0x3F3F3F3F, 0x0F0F0F0F] * 2 * times, 32))
        high = e.lshr(e.pick(words, lanes([0, 0, 1, 1])), [2] * 4 * times)
        return e.b.or_(low, e.b.and_(high, e.constants([0, 0x30303030] * 2 * times, 32)))

    def codes(self, e, w, j):
        return split_nibbles(e, e.offset(w, 16), j)

    quarter_shifts = nibble_places(32)[1]

    def quarters(self, e, w):
        return e.quarters_in_place(e.nibble_parts(e.offset(w, 16)), *nibble_places(32), 4)


class Q5_K(Q4_K):
    """Same as q4_K, with 32 bytes of fifth bits before the nibbles."""

    most_with_minimum = 31
    quarter_shifts = None

    def codes(self, e, w, j):
        return e.b.or_(split_nibbles(e, e.offset(w, 48), j), e.shift_left(bit_plane(e, e.offset(w, 16), j), 4))

    def quarters(self, e, w):
        low = e.nibble_parts(e.offset(w, 48)), *nibble_places(32), 4
        return e.joined_quarters(low, ([e.twice(e.offset(w, 16))], *bit_places(), 1))


class Q6_K(RowFormat):
    """ql[128], qh[64], int8 scales[16], d f16."""

    def scales(self, e, w, row):
        m = e.in_scale_order(e.load(i8x16, e.offset(w, 192)))
        return e.mul(e.bytes_to_f32(m), e.splat(e.half(e.offset(w, 208)), f32x16))

    bias = 32
    most_scale = 128

    def whole_scales(self, e, w):
        return e.pick(e.load(i8x16, e.offset(w, 192)), [*range(16)] * 2)

    def units(self, e, w, row):
        return e.half_everywhere(e.offset(w, 208)), None

    def dot_codes(self, e, w, j):
        half, pair = j // 2, j % 2
        low = e.bits(e.load(i8x64, e.offset(w, 64 * half)), [4 * pair] * 4, width=4)
        high = e.bits(e.twice(e.offset(w, 128 + 32 * half)), [4 * pair] * 2 + [4 * pair + 2] * 2, width=2)
        return e.b.or_(low, e.shift_left(high, 4))

    def quarters(self, e, w):
        low = e.nibble_parts(w), *nibble_places(64), 4
        return e.joined_quarters(low, ([e.load(i8x64, e.offset(w, 128))], *two_bit_places(), 2))


class Q2_K(RowFormat):
    """scales[16] (4-bit scale, 4-bit minimum), qs[64], d, dmin f16."""

    def scales(self, e, w, row):
        low = e.all_and(e.in_scale_order(e.load(i8x16, w)), 15)
        return e.mul(e.bytes_to_f32(low, signed=False), e.splat(e.two_halves(e.offset(w, 80))[0], f32x16))

    def minima(self, e, w, row):
        high = e.lshr(e.in_scale_order(e.load(i8x16, w)), [4] * 16)
        return e.b.fneg(e.mul(e.bytes_to_f32(high, signed=False), e.splat(e.two_halves(e.offset(w, 80))[1], f32x16)))

    signed_scales = False
    folded_mode = "m32_16"

    def folded_codes(self, e, w, j):
        return e.times_scales(self.codes(e, w, j), e.all_and(e.load(i8x16, w), 15), _eights(j))

    def folded_scales(self, e, w):
        return e.splat(e.two_halves(e.offset(w, 80))[0])

    whole_units = [1.0, 0.25] * 4
    whole_minima_at = 4

    def most_dot_code(self):
        return 12

    def crossed_codes(self, e, w, h, n):
        return crossed_two_bits(e, e.offset(w, 16), h, n)

    def whole_scales(self, e, w):
        return e.all_and(self._packed(e, w), 15)

    def whole_minima(self, e, w):
        return self._packed(e, w)

    def units(self, e, w, row):
        return both_units(e, e.offset(w, 80))

    def _packed(self, e, w):
        return e.pick(e.load(i8x16, w), [*range(16)] * 2)

    def codes(self, e, w, j):
        return two_bits(e, e.offset(w, 16), j)

    quarter_shifts = two_bit_places()[1]

    def quarters(self, e, w):
        return e.quarters_in_place([e.load(i8x64, e.offset(w, 16))], *two_bit_places(), 2)


class Q3_K(RowFormat):
    """hmask[32], qs[64], 12 bytes of 6-bit scales, d f16."""

    bias = 4

    def scales(self, e, w, row):
        centred = e.in_scale_order(self._centred(e, w))
        return e.mul(e.bytes_to_f32(centred), e.splat(e.half(e.offset(w, 108)), f32x16))

    def _centred(self, e, w):
        if ("centred", w) not in e.memo:
            # Scale n: low nibble n // 8 of byte n % 8, upper bits 2*(n // 4) of byte 8 + n % 4.
            packed = e.b.or_(e.nibbles_at(e.offset(w, 96)), e.two_bits_at(e.offset(w, 104), to=4))
            e.memo["centred", w] = e.b.sub(packed, e.constants([32] * 16, 8))
        return e.memo["centred", w]

    folded_mode = "s32"

    def folded_codes(self, e, w, j):
        return e.minus_scales(self.dot_codes(e, w, j), self._centred(e, w), _eights(j), self.bias)

    def folded_scales(self, e, w):
        return e.splat(e.b.fneg(e.half(e.offset(w, 108))))

    def crossed_codes(self, e, w, h, n):
        return e.all_and(crossed_three_bits(e, e.offset(w, 32), w, h, n), 7)

    def whole_scales(self, e, w):
        # As in `scales`, in both halves.
        low = e.nibbles16_twice(e.offset(w, 96), apart=True)
        return e.b.sub(e.b.or_(low, e.two_bits_twice(e.offset(w, 104))), e.constants([32] * 32, 8))

    def units(self, e, w, row):
        return e.half_everywhere(e.offset(w, 108)), None

    def dot_codes(self, e, w, j):
        return e.b.or_(two_bits(e, e.offset(w, 32), j), e.shift_left(bit_plane(e, w, j), 2))

    def quarters(self, e, w):
        low = [e.load(i8x64, e.offset(w, 32))], *two_bit_places(), 2
        return e.joined_quarters(low, ([e.twice(w)], *bit_places(), 1))


class IQ4_XS(RowFormat):
    """d f16, scales_h u16, scales_l[4], qs[128]: 6-bit scales per 32 columns, values from the iq4_nl table."""

    def scales(self, e, w, row):
        low = e.fields_at(e.offset(w, 4), range(0, 32, 4), 4)
        high = e.fields_at(e.offset(w, 2), range(0, 16, 2), 2, 16)
        both = e.b.or_(low, e.b.shl(high, e.ints([4] * 8)))
        return e.mul(e.ints_to_f32(e.b.sub(both, e.ints([32] * 8))), e.splat(e.half(w)))

    def dot_codes(self, e, w, j):
        return e.low_entry(biased(IQ4_NL_VALUES, self.bias), 4, e.raw_nibble_pair(w, j, 16, 8))

    def paired_codes(self, e, w, n):
        return e.low_entry(biased(IQ4_NL_VALUES, self.bias), 4, raw_paired_nibbles(e, e.offset(w, 8), n))

    def quarters(self, e, w):
        return e.codes_of(e.nibble_quarters(e.offset(w, 8)), 4, biased(IQ4_NL_VALUES, self.bias))
