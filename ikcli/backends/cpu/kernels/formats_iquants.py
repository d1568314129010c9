"""Grid types: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S (layouts: ggml-common.h).

A group of 8 (4 for IQ3) columns is a point of a grid, kept as bytes in the kernel's data section, times signs.
"""

from ikcli.backends.cpu.kernels.format_api import plain_formats
from ikcli.backends.cpu.kernels.rowformat import I32, I64, RowFormat, ir
from ikcli.gguf.constants import GGMLType
from ikcli.native.simd.vec import f32x16, half_to_f32, i32x16
from ikcli.quant.tables import grid

_SIGNS = [s | (bin(s).count("1") & 1) << 7 for s in range(128)]


class _Grid(RowFormat):
    def __init__(self, name, n_bytes):
        self.name, self.block_bytes, self.step_bytes = name, n_bytes, n_bytes

    def points(self, factor=1):
        """Grid points as integers of one byte per coordinate, first coordinate lowest."""
        rows = (grid(GGMLType[self.name.upper()]) * factor).astype(int)
        return [sum((int(x) & 255) << 8 * i for i, x in enumerate(row)) for row in rows]

    def grid64(self, e, indices):
        """The points of 8 indices as 64 bytes."""
        table = e.table(self.points(), 64, self.name)
        return e.gather64([e.entry(table, i, 64) for i in indices])

    def grid32(self, e, indices):
        """The 4-column points of 16 indices as 64 bytes."""
        table = e.table(self.points(), 32, self.name)
        v = ir.Constant(ir.VectorType(I32, 16), ir.Undefined)
        for i, x in enumerate(indices):
            v = e.b.insert_element(v, e.entry(table, x, 32), e.index(i))
        return e.b.bitcast(v, ir.VectorType(ir.IntType(8), 64))

    def signed(self, e, points, sign_bytes):
        """128 + points, or 128 - points where the bit of the column is set; sign_bytes: 8 bytes as i32."""
        word = ir.Constant(I64, 0)
        for i, s in enumerate(sign_bytes):
            word = e.b.or_(word, e.b.shl(e.b.zext(s, I64), ir.Constant(I64, 8 * i)))
        mid = e.const64(-128)
        return e.b.select(e.mask_of(word), e.b.sub(mid, points), e.b.add(mid, points))

    def even_signs(self, e, codes):
        """Sign bytes of 7-bit codes: the eighth sign makes the number of minus signs even."""
        table = e.table(_SIGNS, 8, "even_signs")
        return [e.b.zext(e.entry(table, c, 8), I32) for c in codes]


def bits(e, x, shift, width):
    """Bits of an i32."""
    return e.b.and_(e.b.lshr(x, ir.Constant(I32, shift)), ir.Constant(I32, (1 << width) - 1))


def _vector(e, values):
    v = ir.Constant(ir.VectorType(I32, len(values)), ir.Undefined)
    for i, x in enumerate(values):
        v = e.b.insert_element(v, x, e.index(i))
    return v


def _affine(e, v, a, b):
    """a*v + b as floats, for i32 lanes v."""
    n = v.type.count
    floats = ir.VectorType(ir.FloatType(), n)
    return e.fused(e.ints_to_f32(v), ir.Constant(floats, [a] * n), ir.Constant(floats, [b] * n))


class IQ2XXS(_Grid):
    """d f16; per 32 columns 4 grid indices, then u32: four 7-bit sign codes and a 4-bit scale."""

    def scales(self, e, w, row):
        ls = _vector(e, [bits(e, e.word(e.offset(w, 2 + 8 * b + 4)), 28, 4) for b in range(8)])
        return e.mul(_affine(e, ls, 0.25, 0.125), e.splat(e.half(w)))

    def codes(self, e, w, j):
        at = [e.offset(w, 2 + 8 * b) for b in (2 * j, 2 * j + 1)]
        points = self.grid64(e, [e.word(e.offset(p, i), 8) for p in at for i in range(4)])
        words = [e.word(e.offset(p, 4)) for p in at]
        return self.signed(e, points, self.even_signs(e, [bits(e, x, 7 * i, 7) for x in words for i in range(4)]))


class _Scales16(_Grid):
    """Eight bytes of 4-bit scales, one per 16 columns: (0.5 + s) / 4."""

    scales_at = 0

    def scales(self, e, w, row):
        v = e.pick(e.load_bytes(e.offset(w, self.scales_at), 8), [n // 2 for n in range(16)])
        ls = e.all_and(e.lshr(v, [4 * (n % 2) for n in range(16)]), 15)
        return e.mul(_affine(e, ls, 0.25, 0.125), e.splat(e.half(w), f32x16))


class IQ2XS(_Scales16):
    """d f16, 32 words (9-bit index, 7-bit signs), scales[8]."""

    scales_at = 66

    def codes(self, e, w, j):
        words = [e.word(e.offset(w, 2 + 2 * (8 * j + i)), 16) for i in range(8)]
        points = self.grid64(e, [bits(e, x, 0, 9) for x in words])
        return self.signed(e, points, self.even_signs(e, [bits(e, x, 9, 7) for x in words]))


class IQ2S(_Scales16):
    """d f16, qs[32], sign bytes[32], qh[8] (two index bits per group), scales[8]."""

    scales_at = 74

    def codes(self, e, w, j):
        indices = []
        for i in range(8):
            low = e.word(e.offset(w, 2 + 8 * j + i), 8)
            high = bits(e, e.word(e.offset(w, 66 + 2 * j + i // 4), 8), 2 * (i % 4), 2)
            indices.append(e.b.or_(low, e.b.shl(high, ir.Constant(I32, 8))))
        signs = [e.word(e.offset(w, 34 + 8 * j + i), 8) for i in range(8)]
        return self.signed(e, self.grid64(e, indices), signs)


class IQ3XXS(_Grid):
    """d f16, 64 grid indices, then per 32 columns u32 as in IQ2_XXS."""

    def scales(self, e, w, row):
        ls = _vector(e, [bits(e, e.word(e.offset(w, 66 + 4 * b)), 28, 4) for b in range(8)])
        return e.mul(_affine(e, ls, 0.5, 0.25), e.splat(e.half(w)))

    def codes(self, e, w, j):
        points = self.grid32(e, [e.word(e.offset(w, 2 + 16 * j + i), 8) for i in range(16)])
        words = [e.word(e.offset(w, 66 + 4 * b)) for b in (2 * j, 2 * j + 1)]
        return self.signed(e, points, self.even_signs(e, [bits(e, x, 7 * i, 7) for x in words for i in range(4)]))


class IQ3S(_Grid):
    """d f16, qs[64], qh[8] (ninth index bits), sign bytes[32], scales[4]."""

    def scales(self, e, w, row):
        ls = e.all_and(e.lshr(e.splat_int(e.word(e.offset(w, 106))), [4 * i for i in range(8)]), 15)
        return e.mul(_affine(e, ls, 2.0, 1.0), e.splat(e.half(w)))

    def codes(self, e, w, j):
        indices = []
        for i in range(16):
            low = e.word(e.offset(w, 2 + 16 * j + i), 8)
            high = bits(e, e.word(e.offset(w, 66 + 2 * j + i // 8), 8), i % 8, 1)
            indices.append(e.b.or_(low, e.b.shl(high, ir.Constant(I32, 8))))
        signs = [e.word(e.offset(w, 74 + 8 * j + i), 8) for i in range(8)]
        return self.signed(e, self.grid32(e, indices), signs)


class _Ternary(_Grid):
    """Values (g + delta) with g in -1, 0, 1 and delta = 1/8 or -1/8: codes are 8g + 1 or 8g - 1, scales an eighth."""

    def points(self, factor=8):
        return super().points(factor)

    def with_delta(self, e, points, negative):
        """128 + points + 1, or - 1 for the groups of 8 columns whose i1 is set."""
        bytes_ = [e.b.select(n, ir.Constant(I64, 0x7F7F7F7F7F7F7F7F), ir.Constant(I64, -0x7E7E7E7E7E7E7E7F))
                  for n in negative]  # fmt: skip
        return e.b.add(points, e.gather64(bytes_))


class IQ1S(_Ternary):
    """d f16, qs[32], qh u16[8]: three index bits per group, 3-bit scale, sign of delta."""

    def scales(self, e, w, row):
        ls = _vector(e, [bits(e, e.word(e.offset(w, 34 + 2 * b), 16), 12, 3) for b in range(8)])
        return e.mul(_affine(e, ls, 0.25, 0.125), e.splat(e.half(w)))

    def codes(self, e, w, j):
        h = [e.word(e.offset(w, 34 + 2 * b), 16) for b in (2 * j, 2 * j + 1)]
        indices, negative = [], []
        for i in range(8):
            high = bits(e, h[i // 4], 3 * (i % 4), 3)
            indices.append(e.b.or_(e.word(e.offset(w, 2 + 8 * j + i), 8), e.b.shl(high, ir.Constant(I32, 8))))
            negative.append(e.b.trunc(bits(e, h[i // 4], 15, 1), ir.IntType(1)))
        return self.with_delta(e, self.grid64(e, indices), negative)


class IQ1M(_Ternary):
    """qs[32], qh[16], scales u16[4]: 3-bit scales per 16 columns; the four top nibbles are the half float d."""

    def scales(self, e, w, row):
        words = [e.word(e.offset(w, 48 + 2 * i), 16) for i in range(4)]
        d = ir.Constant(I32, 0)
        for i, x in enumerate(words):
            d = e.b.or_(d, e.b.shl(bits(e, x, 12, 4), ir.Constant(I32, 4 * i)))
        scale = e.splat(half_to_f32(e.b, e.b.trunc(d, ir.IntType(16))), f32x16)
        v = e.pick(_vector(e, words), [n // 4 for n in range(16)])
        ls = e.all_and(e.lshr(v, [3 * (n % 4) for n in range(16)]), 7)
        assert ls.type.count == i32x16.n
        return e.mul(_affine(e, ls, 0.25, 0.125), scale)

    def codes(self, e, w, j):
        indices, negative = [], []
        for i in range(8):
            h = e.word(e.offset(w, 32 + 4 * j + i // 2), 8)
            high = bits(e, h, 4 * (i % 2), 3)
            indices.append(e.b.or_(e.word(e.offset(w, 8 * j + i), 8), e.b.shl(high, ir.Constant(I32, 8))))
            negative.append(e.b.trunc(bits(e, h, 4 * (i % 2) + 3, 1), ir.IntType(1)))
        return self.with_delta(e, self.grid64(e, indices), negative)


FORMATS = plain_formats(
    IQ1S("iq1_s", 50),
    IQ1M("iq1_m", 56),
    IQ2XXS("iq2_xxs", 66),
    IQ2XS("iq2_xs", 74),
    IQ2S("iq2_s", 82),
    IQ3XXS("iq3_xxs", 98),
    IQ3S("iq3_s", 110),
)
