"""Formats of llama.cpp alone: tq1_0, tq2_0 (ternary), q1_0 (bits) and q2_0 (two bits). Layouts: `decoders.mainline`."""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels.row_codes import two_bits
from ikcli.backends.cpu.kernels.rowformat import RowFormat
from ikcli.backends.cpu.kernels.vector_emitter import indices

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
