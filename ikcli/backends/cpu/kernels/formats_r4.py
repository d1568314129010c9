"""Row-interleaved forms of the legacy and K quants, and the 8-bit types (layouts: `quant/interleave.py`).

Codes of four-row types: nibbles of 32 columns in 64 bytes, two-bit fields in 32, single bits in 16. Eight-row types
keep the bytes of the plain type in runs of four columns.
"""

from ikcli.backends.cpu.kernels.groupformat import PAIR4, GroupFormat
from ikcli.backends.cpu.kernels.rowformat import biased, exponent_scales
from ikcli.native.simd.vec import i8x64
from ikcli.quant.tables import IQ4_NL_VALUES, MXFP4_VALUES

_NATURAL8 = [[0, 1], [2, 3], [4, 5], [6, 7]]
_STRIDED8 = [[0, 2], [4, 6], [1, 3], [5, 7]]


# --- blocks of 32 columns ---------------------------------------------------------------------------------------------
class _Blocks32(GroupFormat):
    """A half-float scale per row, then codes."""

    def scales(self, e, w, row):
        # Each block has its scales in front of its codes, so they are read as the codes are reached.
        return e.sixteens(self.block_scales(e, e.offset(w, self.block_bytes * ib)) for ib in range(8))

    def block_scales(self, e, w):
        """Return the scales of a block, one per row."""
        return e.halves(w, self.rows)

    def codes(self, e, w, ib, v):
        return self.block_codes(e, e.offset(w, self.block_bytes * ib), v)


class IQ4_NL(_Blocks32):
    def block_codes(self, e, w, v):
        return e.value_of(biased(IQ4_NL_VALUES, self.bias), e.nibble_codes(e.offset(w, 8), v), width=4)


class Q5_0(_Blocks32):
    bias = 16

    def block_codes(self, e, w, v):
        return e.b.or_(e.nibbles(e.offset(w, 24), v), e.bits(*e.plane(e.offset(w, 8), v, a=1, h=4, c=2), width=1, to=4))


class Q6_0(_Blocks32):
    # Smaller than 128, so that plain AVX2 adds more products in 16 bits.
    bias = 32

    def block_codes(self, e, w, v):
        upper = e.bits(e.twice(e.offset(w, 8)), [4 * v] * 2 + [4 * v + 2] * 2, width=2, to=4)
        return e.b.or_(e.nibbles(e.offset(w, 40), v), upper)


class _EightRows(_Blocks32):
    order, codes_at = _NATURAL8, 16

    def nibble_pair(self, e, w, v):
        """Return 64 codes; low nibbles are the first 16 columns."""
        # Nibbles are paired as in the plain type: interleaving moved bytes only.
        return e.field(e.load(i8x64, e.offset(w, self.codes_at + 64 * (v % 2))), 4 * (v // 2), 4)


class Q4_0(_EightRows):
    bias = 8

    def block_codes(self, e, w, v):
        return self.nibble_pair(e, w, v)


class Q8_0(_EightRows):
    def block_codes(self, e, w, v):
        return e.with_bias(e.load(i8x64, e.offset(w, 16 + 64 * v)), self.bias)


class MXFP4(_EightRows):
    """Scale 2**(e - 128) from an exponent byte; the table holds doubled values."""

    codes_at = 8

    def block_scales(self, e, w):
        v = e.load_bytes(w, 8)
        return exponent_scales(e, v)

    def block_codes(self, e, w, v):
        return e.lookup(biased(MXFP4_VALUES, self.bias), self.nibble_pair(e, w, v))


# --- 8 bits -----------------------------------------------------------------------------------------------------------
class Q8_KV(GroupFormat):
    """Scales (f32) of the rows, then int8."""

    order = _NATURAL8

    def header(self, e, w):
        return e.singles(w, 8)

    def scales(self, e, w, row):
        # The row's scale is all there is: it is applied once per step, by `d`.
        return [e.ones()] * 4

    def d(self, e, w, row):
        return row

    def codes(self, e, w, ib, v):
        return e.with_bias(e.load(i8x64, e.offset(w, 256 * ib + 64 * v)), self.bias)


class Q8_K(GroupFormat):
    """Half-float scales per 256 columns, then int8; the form of 16 rows stores code + 128."""

    @property
    def order(self):
        per = 16 // self.rows
        return [list(range(i, i + per)) for i in range(0, 8, per)]

    def scales(self, e, w, row):
        return [e.ones()] * (self.rows // 2)

    def d(self, e, w, row):
        return e.halves(w, self.rows)

    def codes(self, e, w, ib, v):
        stored = e.load(i8x64, e.offset(w, 2 * self.rows + 32 * self.rows * ib + 64 * v))
        # Flipping the upper bit adds 128, or takes off what the file has added already.
        return e.with_bias(stored, self.bias ^ 128 if self.rows == 16 else self.bias)


# --- K quants ---------------------------------------------------------------------------------------------------------
class SuperBlock(GroupFormat):
    """Blocks of 256 columns that start with half-float scales of the rows."""

    def d(self, e, w, row):
        return e.halves(w, self.rows)


def six_bit(e, low_at, high_at, quarters=4):
    """Return 64 unsigned scales in four vectors of 16: 4 bits in 32 bytes (low nibbles first), 2 bits in 16 bytes."""
    # All vectors share one load of the upper bits; only shift and mask differ.
    high = e.bytes_at(high_at, 16)
    low = [e.bytes_at(e.offset(low_at, 16 * i), 16) for i in range(2)]
    return [
        e.both(e.field(low[f % 2], shift=4 * (f // 2), width=4), e.field(high, shift=2 * f, width=2), 4)
        for f in range(quarters)
    ]


class Q4_K(SuperBlock):
    """d, dmin; scales_h[16], scales_l[32] (scale low, minimum high nibble), codes."""

    most_with_minimum = 15

    def _packed(self, e, w, shift):
        """Return the 6-bit scales (shift 0) or minima (1) in two vectors of 16."""
        # Scales and minima share these bytes, so LLVM loads them once for both.
        high, parts = e.bytes_at(e.offset(w, 16), 16), []
        for i in range(2):
            low = e.field(e.bytes_at(e.offset(w, 32 + 16 * i), 16), shift=4 * shift, width=4)
            parts.append(e.centred(e.both(low, e.field(high, shift=4 * i + 2 * shift, width=2), 4), 0))
        return parts

    def scales(self, e, w, row):
        return self._packed(e, w, 0)

    def minima(self, e, w, row):
        return self._packed(e, w, 1)

    def dmin(self, e, w, row):
        # Negated here: sums then add minima as they add scales.
        return e.b.fneg(e.halves(e.offset(w, 8), 4))

    def codes(self, e, w, ib, v):
        return e.nibbles(e.offset(w, 64 + 64 * ib), v)


class Q5_K(Q4_K):
    """Same as Q4_K, with fifth bits before the codes."""

    most_with_minimum = 31

    def codes(self, e, w, ib, v):
        fifth = e.bits(*e.plane(e.offset(w, 64 + 16 * ib), v, a=4, h=1, c=2), width=1, to=4)
        return e.b.or_(e.nibbles(e.offset(w, 192 + 64 * ib), v), fifth)


_TWICE = [n // 2 for n in range(32)]  # lanes of the scales of a unit, for pairs of its codes


class PairBlock(SuperBlock):
    """Four rows, scales per 16 columns."""

    unit, order = 2, PAIR4


class Q6_K(PairBlock):
    """d, int8 scales[64], upper two bits, lower four."""

    bias = 32

    def scales(self, e, w, row):
        return [e.bytes_to_f32(e.bytes_at(e.offset(w, 8 + 16 * i), 16)) for i in range(4)]

    def codes(self, e, w, u, v):
        # Moved to where they belong above the nibbles.
        high = e.pairs(e.offset(w, 72 + 64 * u), v, h=1, c=2, to=4)
        return e.b.or_(e.pair_nibbles(e.offset(w, 328 + 128 * u), v), high)


class Q2_K(PairBlock):
    """d, dmin, scales[64] (scale low, minimum high nibble), codes."""

    def _packed(self, e, w, shift):
        return [e.centred(e.field(e.bytes_at(e.offset(w, 16 + 16 * i), 16), shift=shift, width=4), 0) for i in range(4)]

    def scales(self, e, w, row):
        return self._packed(e, w, 0)

    def minima(self, e, w, row):
        return self._packed(e, w, 4)

    def dmin(self, e, w, row):
        return e.b.fneg(e.halves(e.offset(w, 8), 4))

    folded_mode = "m32_16"

    def folded_codes(self, e, w, u, v):
        scales = e.all_and(e.bytes_at(e.offset(w, 16 + 16 * u), 16), 15)
        return e.times_scales(self.codes(e, w, u, v), scales, _TWICE)

    def folded_d(self, e, w):
        return e.halves(w, 4)

    def codes(self, e, w, u, v):
        return e.pairs(e.offset(w, 80 + 64 * u), v)


class Q3_K(PairBlock):
    """d, scales_h[16], scales_l[32], third bits, lower two."""

    bias = 4

    def scales(self, e, w, row):
        return [e.centred(x, 32) for x in self._packed(e, w)]

    def _packed(self, e, w):
        return six_bit(e, e.offset(w, 24), e.offset(w, 8))

    folded_mode = "s32"

    def folded_codes(self, e, w, u, v):
        scales = e.b.sub(self._packed(e, w)[u], e.constants([32] * 16, 8))
        return e.minus_scales(self.codes(e, w, u, v), scales, _TWICE, self.bias)

    def folded_d(self, e, w):
        return e.b.fneg(e.halves(w, 4))

    def codes(self, e, w, u, v):
        return e.triples(low_at=e.offset(w, 184 + 64 * u), high_at=e.offset(w, 56 + 32 * u), v=v)


class IQ4_XS(SuperBlock):
    """Eight rows: d, scales_h[16], scales_l[32], codes; nibbles are neighbouring column groups."""

    order = _STRIDED8

    def scales(self, e, w, row):
        return [e.centred(x, 32) for x in six_bit(e, e.offset(w, 32), e.offset(w, 16))]

    def codes(self, e, w, ib, v):
        # Two vectors come from the same bytes: one has the low nibbles, the other the high ones.
        packed = e.load(i8x64, e.offset(w, 64 + 128 * ib + 64 * (v % 2)))
        return e.value_of(biased(IQ4_NL_VALUES, self.bias), e.code(packed, 4 * (v // 2), 4), width=4)
