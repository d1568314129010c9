"""Row-interleaved forms of ik_llama.cpp's non-linear types and of IQ2_BN (layouts: `quant/interleave.py`).

A value is a table entry; one bit per sub-block of a row selects a table shifted by a constant.
"""

from ikcli.backends.cpu.kernels.formats_r4 import PairBlock, SuperBlock, six_bit
from ikcli.backends.cpu.kernels.groupformat import PAIR4, GroupFormat
from ikcli.backends.cpu.kernels.rowformat import biased
from ikcli.quant.tables import IQ2_VALUES, IQ3_VALUES, IQ4_VALUES, IQ5_VALUES


class _Shifted(SuperBlock):
    """Types with a shifted second table."""

    def codes(self, e, w, u, v):
        # Tiles get finished codes. Dot products leave the shift out and make up for it by sums of activations.
        return e.added(self.dot_codes(e, w, u, v), self.selected(e, w, u), self.shift)


class _Halves(_Shifted, PairBlock):
    """d f16[4], then extra[8]: bit b of byte 4a + row selects the table of half a of block b."""

    def shifted_lanes(self, e, w, part):
        return e.bits_set(e.repeated(e.load_bytes(e.offset(w, 8), 8), 2), [2 * part + i // 8 for i in range(16)])

    selected = shifted_lanes  # lanes of codes are those of the scales

    def four_bit(self, e, at):
        """Return 64 nibbles of 32 bytes (low first) in four vectors of 16."""
        low = [e.bytes_at(e.offset(at, 16 * i), 16) for i in range(2)]
        return [e.field(low[f % 2], shift=4 * (f // 2), width=4) for f in range(4)]


class IQ2_K(_Halves):
    """scales[32], codes."""

    bias, shift = 32, 5

    def scales(self, e, w, row):
        return [e.centred(x, 8) for x in self.four_bit(e, e.offset(w, 16))]

    def dot_codes(self, e, w, u, v):
        return e.value_of(biased(IQ2_VALUES[0], self.bias), e.pair_codes(e.offset(w, 48 + 64 * u), v), width=2)


class IQ3_K(_Halves):
    """scales_h[8] (signs, as extra), scales_l[32], lower two bits, third bits."""

    bias, shift = 64, 4

    def scales(self, e, w, row):
        signs = e.repeated(e.bytes_at(e.offset(w, 16), 8), 2)
        for part, x in enumerate(self.four_bit(e, e.offset(w, 24))):
            # Scales are odd numbers, 2 x + 1, with the sign in a plane of bits.
            odd = e.b.or_(e.b.add(x, x), e.constants([1] * 16, 8))
            minus = e.bits_set(signs, [2 * part + i // 8 for i in range(16)])
            yield e.bytes_to_f32(e.b.select(minus, e.b.neg(odd), odd))

    def dot_codes(self, e, w, u, v):
        values = biased(IQ3_VALUES[0], self.bias)
        return e.triple_values(values, low_at=e.offset(w, 56 + 64 * u), high_at=e.offset(w, 312 + 32 * u), v=v)


class IQ4_K(_Halves):
    """scales_h[16], scales_l[32], codes."""

    shift = 4

    def scales(self, e, w, row):
        return [e.centred(x, 32) for x in six_bit(e, e.offset(w, 32), e.offset(w, 16))]

    def dot_codes(self, e, w, u, v):
        return e.value_of(biased(IQ4_VALUES[0], self.bias), e.pair_nibble_codes(e.offset(w, 64 + 128 * u), v), width=4)


class IQ5_K(IQ4_K):
    """Same as IQ4_K, then fifth bits."""

    shift = 2

    def dot_codes(self, e, w, u, v):
        # Masked only where the lookup looks at more than the nibble.
        low = e.pair_nibble_codes(e.offset(w, 64 + 128 * u), v)
        fifth = e.pair_plane(e.offset(w, 576 + 32 * u), v, a=2, h=1, c=4)
        return e.value_of(biased(IQ5_VALUES[0], self.bias), low, width=4, upper=fifth)


class IQ4_KS(_Shifted):
    """Row scales f32; scales[32]: bit 0 selects the table, the rest is m + 127; codes."""

    shift = 4

    def header(self, e, w):
        return e.singles(w, 4)

    def scales(self, e, w, row):
        return [e.centred(e.all_and(e.bytes_at(e.offset(w, 16 * i), 16), 254), 127) for i in range(2)]

    def d(self, e, w, row):
        return row

    def selected(self, e, w, ib):
        """Return the mask of the 32-bit lanes that are shifted in a vector of codes."""
        # Lanes of codes run over the rows four times, those of scales over the blocks.
        return self._bits(e, e.repeated(e.bytes_at(e.offset(w, 4 * ib), 4), 4))

    def shifted_lanes(self, e, w, part):
        return self._bits(e, e.bytes_at(e.offset(w, 16 * part), 16))

    def _bits(self, e, v):
        return e.b.icmp_unsigned("!=", e.all_and(v, 1), e.constants([0] * 16, 8))

    def dot_codes(self, e, w, ib, v):
        return e.value_of(biased(IQ4_VALUES[0], self.bias), e.nibble_codes(e.offset(w, 32 + 64 * ib), v), width=4)


class IQ5_KS(IQ4_KS):
    """Same as IQ4_KS, then fifth bits."""

    shift = 2

    def dot_codes(self, e, w, ib, v):
        low = e.nibble_codes(e.offset(w, 32 + 64 * ib), v)
        fifth = e.plane(e.offset(w, 544 + 16 * ib), v, a=2, h=1, c=4)
        return e.value_of(biased(IQ5_VALUES[0], self.bias), low, width=4, upper=fifth)


class IQ2_BN(GroupFormat):
    """Row scales f32; values code - 1 in blocks of 64 columns."""

    bias, unit, order = 1, 2, PAIR4

    def header(self, e, w):
        return e.singles(w, 4)

    def scales(self, e, w, row):
        return [e.ones()] * 2

    def d(self, e, w, row):
        return row

    def codes(self, e, w, u, v):
        return e.pairs(e.offset(w, 64 * u), v)
