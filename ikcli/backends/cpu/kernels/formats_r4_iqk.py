"""Row-interleaved forms of ik_llama.cpp's non-linear types and of IQ2_BN (layouts: `quant/interleave.py`).

A value is a table entry; one bit per sub-block of a row selects a table shifted by a constant.
"""

from ikcli.backends.cpu.kernels.formats_r4 import SuperBlock, six_bit
from ikcli.backends.cpu.kernels.groupformat import GroupFormat
from ikcli.backends.cpu.kernels.rowformat import biased, by_name
from ikcli.quant.tables import IQ2_VALUES, IQ3_VALUES, IQ4_VALUES, IQ5_VALUES


class _Shifted(SuperBlock):
    """Types with a shifted second table."""

    def codes(self, e, w, ib, v):
        return e.added(self.dot_codes(e, w, ib, v), self.selected(e, w, ib), self.shift)


class _Halves(_Shifted):
    """d f16[4], then extra[8]: bit b of byte 4a + row selects the table of half a of block b."""

    def selected(self, e, w, ib):
        """Mask of the 32-bit lanes of a vector of codes that are shifted."""
        return self._tables(e, w, [ib, ib])

    def shifted_lanes(self, e, w, part):
        return self._tables(e, w, [2 * part, 2 * part + 1])

    def _tables(self, e, w, blocks):
        """Mask of the shifted rows and halves of two blocks."""
        extra = e.repeated(e.load_bytes(e.offset(w, 8), 8), 2)
        bits = e.constants([1 << ib for ib in blocks for _ in range(8)], 32)
        return e.b.icmp_unsigned("!=", e.b.and_(extra, bits), e.constants([0] * 16, 32))

    def four_bit(self, e, at):
        """64 nibbles of 32 bytes (low first) in four vectors of 16."""
        low = [e.bytes_at(e.offset(at, 16 * i), 16) for i in range(2)]
        return [e.field(low[f % 2], 4 * (f // 2), 4) for f in range(4)]


class IQ2K(_Halves):
    """scales[32], codes."""

    bias, shift = 32, 5

    def scales(self, e, w, row):
        parts = [e.centred(u, 8) for u in self.four_bit(e, e.offset(w, 16))]
        return self.times_d(e, parts, e.halves(w, 4), 8)

    def dot_codes(self, e, w, ib, v):
        return e.pair_entries(biased(IQ2_VALUES[0], self.bias), e.offset(w, 48 + 32 * ib), v)


class IQ3K(_Halves):
    """scales_h[8] (signs, as extra), scales_l[32], lower two bits, third bits."""

    bias, shift = 64, 4

    def scales(self, e, w, row):
        odd = [e.affine(u, 2.0, 1.0) for u in self.four_bit(e, e.offset(w, 24))]
        plain = self.times_d(e, odd, e.halves(w, 4), 8)
        signs = e.load_bytes(e.offset(w, 16), 8)
        minus = [e.b.icmp_unsigned("!=", e.all_and(signs, 1 << ib), e.ints([0] * 8)) for ib in range(8)]
        return [e.b.select(m, e.b.fneg(s), s) for m, s in zip(minus, plain, strict=True)]

    def dot_codes(self, e, w, ib, v):
        q = e.b.or_(e.pairs(e.offset(w, 56 + 32 * ib), v), e.plane(e.offset(w, 312 + 16 * ib), v, 4, 2, 1, to=2))
        return e.lookup(biased(IQ3_VALUES[0], self.bias), q)


class IQ4K(_Halves):
    """scales_h[16], scales_l[32], codes."""

    shift = 4

    def scales(self, e, w, row):
        parts = [e.centred(u, 32) for u in six_bit(e, e.offset(w, 32), e.offset(w, 16))]
        return self.times_d(e, parts, e.halves(w, 4), 8)

    def dot_codes(self, e, w, ib, v):
        return e.lookup(biased(IQ4_VALUES[0], self.bias), e.nibbles(e.offset(w, 64 + 64 * ib), v))


class IQ5K(IQ4K):
    """As IQ4_K, then fifth bits."""

    shift = 2

    def dot_codes(self, e, w, ib, v):
        high = e.plane(e.offset(w, 576 + 16 * ib), v, 2, 1, 4, to=4)
        q = e.b.or_(e.nibbles(e.offset(w, 64 + 64 * ib), v), high)
        return e.lookup(biased(IQ5_VALUES[0], self.bias), q)


class IQ4KS(_Shifted):
    """Row scales f32; scales[32]: bit 0 selects the table, the rest is m + 127; codes."""

    shift = 4

    def header(self, e, w):
        return e.singles(w, 4)

    def scales(self, e, w, row):
        parts = [e.centred(e.all_and(e.bytes_at(e.offset(w, 16 * i), 16), 254), 127) for i in range(2)]
        return self.times_d(e, parts, row, 4)

    def selected(self, e, w, ib):
        """Mask of the 32-bit lanes of a vector of codes that are shifted."""
        return self._bits(e, e.repeated(e.bytes_at(e.offset(w, 4 * ib), 4), 4))

    def shifted_lanes(self, e, w, part):
        return self._bits(e, e.bytes_at(e.offset(w, 16 * part), 16))

    def _bits(self, e, v):
        return e.b.icmp_unsigned("!=", e.all_and(v, 1), e.constants([0] * 16, 8))

    def dot_codes(self, e, w, ib, v):
        return e.lookup(biased(IQ4_VALUES[0], self.bias), e.nibbles(e.offset(w, 32 + 64 * ib), v))


class IQ5KS(IQ4KS):
    """As IQ4_KS, then fifth bits."""

    shift = 2

    def dot_codes(self, e, w, ib, v):
        high = e.plane(e.offset(w, 544 + 16 * ib), v, 2, 1, 4, to=4)
        q = e.b.or_(e.nibbles(e.offset(w, 32 + 64 * ib), v), high)
        return e.lookup(biased(IQ5_VALUES[0], self.bias), q)


class IQ2BN(GroupFormat):
    """Row scales f32; values code - 1 in blocks of 64 columns."""

    name, bias = "iq2_bn_r4", 1
    step_bytes, block_bytes, block_columns, header_bytes = 256, 64, 64, 16

    def header(self, e, w):
        return e.singles(w, 4)

    def scales(self, e, w, row):
        return [row] * 8

    def codes(self, e, w, ib, v):
        return e.pairs(e.offset(w, 32 * ib), v)


FORMATS = by_name(
    *(IQ2K("iq2_k_r4", 304), IQ3K("iq3_k_r4", 440), IQ4K("iq4_k_r4", 576), IQ5K("iq5_k_r4", 704)),
    *(IQ4KS("iq4_ks_r4", 544, 16), IQ5KS("iq5_ks_r4", 672, 16)),
    IQ2BN(),
)
