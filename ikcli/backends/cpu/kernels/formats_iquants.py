"""Grid types: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S (layouts: ggml-common.h).

A group of 8 (4 for IQ3) columns is a point of a grid, kept as bytes in the kernel's data section, times signs.
"""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels import grid_points
from ikcli.backends.cpu.kernels import grid_shuffle as gs
from ikcli.backends.cpu.kernels.rowformat import RowFormat
from ikcli.native.simd.emit import I32, I64
from ikcli.native.simd.half import half_to_f32
from ikcli.native.simd.vec import f32x16, i8x32, i8x64, i32x8, i32x16, llvm_type

_IN_ORDER = [range(64 * j, 64 * j + 64, 4) for j in range(4)]
# Groups of 8 columns by the place of their sign codes: those of 32 columns are two and two in the halves of 32 bytes,
# which shuffles do not cross.
_SIGN_ORDER = [8 * a + 4 * b + 2 * h + i for a in range(2) for h in range(2) for b in range(2) for i in range(2)]
_QUARTERS = [range(4 * n, 256, 16) for n in range(4)]


class _Grid(RowFormat):
    bias = 64  # at least the largest coordinate


class _Signed(_Grid):
    """Points with a sign per column. Without shuffles, points are read from a table."""

    signs_at = 0  # where a type has bytes of eight signs

    def indices(self, e, w):
        """Return the numbers of all points, for shuffles.

        They are 32 words, or the lower bytes of 64 and masks of their upper bits.
        """
        raise NotImplementedError

    def sign_bytes(self, e, w):
        """Return, for shuffles, bytes of eight signs; columns 8i .. 8i+7 use number sign_byte(i)."""
        raise NotImplementedError

    def sign_byte(self, i):
        return i

    def numbers(self, e, w, j):
        """Return numbers (i32) of the points of columns 64j .. 64j+63."""
        raise NotImplementedError

    def sign_codes(self, e, w, half):
        """Return the 7-bit sign codes of columns 128*half .. 128*half+127 in i32x16, in the order of `_SIGN_ORDER`."""
        raise NotImplementedError

    def dot_codes(self, e, w, j):
        if gs.usable():
            return self.shuffled(e, w, _IN_ORDER, j)
        return e.signed(*self.magnitudes(e, w, j), self.bias)

    def quarters(self, e, w):
        return [self.shuffled(e, w, _QUARTERS, n) for n in range(4)] if gs.usable() else None

    def shuffled(self, e, w, vectors, n):
        """Return bias + values of vector n of four, each given as the first columns of its 16 runs of four columns."""
        _, levels, bits = grid_points.packed(self.name)
        per = 8 if bits == 2 else 4  # columns of a point
        size = per // 2  # vectors of codes that 32 points are enough for
        orders = [sorted({start // per for v in vectors[i : i + size] for start in v}) for i in range(0, 4, size)]
        points, order = self._points(e, w, orders)[n // size], orders[n // size]
        of_points = [(order.index(start // per), bits * (start % per)) for start in vectors[n]]
        of_signs = [(self.sign_byte(start // 8), start % 8) for start in vectors[n]]
        return gs.signed(e, points, of_points, levels, bits, self.bias, self.sign_bytes(e, w), of_signs)

    def _points(self, e, w, orders):
        """Return points as words, once per step: 32 for each of `orders`."""
        if (self.name, w) not in e.memo:
            table, _, _ = grid_points.packed(self.name)
            if len(orders) == 1:
                at = e.opaque_table(table, 16, f"{self.name}.words", w)
                found = [gs.entries(e, at, len(table), self.indices(e, w))]
            else:
                at = e.opaque_table(gs.planes(table), 8, f"{self.name}.planes", w)
                found = gs.entries64(e, at, len(table), *self.indices(e, w), orders)
            e.memo[self.name, w] = found
        return e.memo[self.name, w]

    def points(self, e, w, j):
        """Return 64 magnitudes."""
        numbers = self.numbers(e, w, j)
        return e.blended(grid_points.points(self.name), 512 // len(numbers), self.name, numbers)

    def signs(self, e, w, j):
        """Return 64 bytes, negative where the value is, and not 0."""
        if not self.signs_at:
            of_groups = [_SIGN_ORDER.index(8 * (j % 2) + g) for g in range(8)]
            lanes = [4 * of_groups[i // 8] for i in range(64)]
            return e.signs_of_bits(self._even_signs(e, w, j // 2), lanes, [i % 8 for i in range(64)])
        signs = e.b.load(e.vector_pointer(e.offset(w, self.signs_at + 8 * j), 8, 8), align=1)
        return e.signs_of_bits(signs, [i // 8 for i in range(64)], [i % 8 for i in range(64)])

    def _even_signs(self, e, w, half):
        """Return the `sign_codes`, in lower bytes, with the eighth sign that makes the number of minus signs even."""
        key = self.name, "signs", w, half
        if key not in e.memo:
            codes = self.sign_codes(e, w, half)
            folded = gs.as_bytes(e, e.b.xor(codes, e.lshr(codes, [4] * 16)))
            parity = e.lookup16([bin(n).count("1") % 2 << 7 for n in range(16)], folded)
            e.memo[key] = e.b.or_(gs.as_bytes(e, codes), parity)
        return e.memo[key]

    def most_magnitude(self):
        return grid_points.most_magnitude(self.name)

    def magnitudes(self, e, w, j):
        return self.points(e, w, j), self.signs(e, w, j)


def _affine(e, v, a, b):
    """Return a*v + b as floats, for i32 lanes v."""
    n = v.type.count
    floats = ir.VectorType(ir.FloatType(), n)
    return e.fused(e.ints_to_f32(v), ir.Constant(floats, [a] * n), ir.Constant(floats, [b] * n))


def _seven_bits(e, words):
    """Return the four 7-bit codes of each of four words in the order of `_SIGN_ORDER`."""
    words = e.pick(words, [n // 4 for n in _SIGN_ORDER])
    return e.all_and(e.lshr(words, [7 * (n % 4) for n in _SIGN_ORDER]), 127)


class IQ2_XXS(_Signed):
    """d f16; per 32 columns 4 grid indices, then u32: four 7-bit sign codes and a 4-bit scale."""

    def scales(self, e, w, row):
        ls = e.b.trunc(e.lshr(gs.quads_at(e, e.offset(w, 2)), [60] * 8), ir.VectorType(I32, 8))
        return e.mul(_affine(e, ls, 0.25, 0.125), e.splat(e.half(w)))

    def indices(self, e, w):
        bytes_ = gs.as_bytes(e, gs.quads_at(e, e.offset(w, 2)))
        return e.b.zext(e.pick(bytes_, [self.sign_byte(i) for i in range(32)]), gs.WORDS)

    def sign_bytes(self, e, w):
        return gs.seven_bit_signs(e, gs.quads_at(e, e.offset(w, 2)), 32)

    def sign_byte(self, i):
        return 8 * (i // 4) + i % 4

    def numbers(self, e, w, j):
        return [e.word(e.offset(w, 2 + 8 * b + i), 8) for b in (2 * j, 2 * j + 1) for i in range(4)]

    def sign_codes(self, e, w, half):
        return _seven_bits(e, e.pick(e.load(i32x8, e.offset(w, 2 + 32 * half)), [1, 3, 5, 7]))


class _Scales16(_Signed):
    """Eight bytes of 4-bit scales, one per 16 columns: (0.5 + s) / 4."""

    scales_at = 0

    def scales(self, e, w, row):
        ls = e.b.zext(e.nibbles16(e.offset(w, self.scales_at)), llvm_type(i32x16))
        return e.mul(_affine(e, ls, 0.25, 0.125), e.splat(e.half(w), f32x16))


class IQ2_XS(_Scales16):
    """d f16, 32 words (9-bit index, 7-bit signs), scales[8]."""

    scales_at = 66

    def indices(self, e, w):
        return e.b.load(e.vector_pointer(e.offset(w, 2), 16, 32), align=1)

    def sign_bytes(self, e, w):
        return gs.even_signs(e, e.lshr(self.indices(e, w), [9] * 32))

    def sign_byte(self, i):
        return 2 * i

    def numbers(self, e, w, j):
        words = (e.word(e.offset(w, 2 + 2 * (8 * j + i)), 16) for i in range(8))
        return [e.b.and_(x, e.index(511)) for x in words]

    def sign_codes(self, e, w, half):
        words = e.b.zext(e.b.load(e.vector_pointer(e.offset(w, 2 + 32 * half), 16, 16), align=1), llvm_type(i32x16))
        return e.lshr(e.pick(words, _SIGN_ORDER), [9] * 16)


class IQ2_S(_Scales16):
    """d f16, qs[32], sign bytes[32], qh[8] (two index bits per group), scales[8]."""

    scales_at, signs_at = 74, 34

    def indices(self, e, w):
        high = e.b.load(e.vector_pointer(e.offset(w, 66), 8, 8), align=1)
        high = e.b.zext(e.pick(high, [i // 4 for i in range(32)]), gs.WORDS)
        high = e.all_and(e.b.shl(high, gs.words([8 - 2 * (i % 4) for i in range(32)])), 0x300)
        return e.b.or_(gs.bytes_as_words(e, e.offset(w, 2)), high)

    def sign_bytes(self, e, w):
        return e.load(i8x32, e.offset(w, 34))

    def numbers(self, e, w, j):
        return e.taken(self.indices(e, w))[8 * j : 8 * j + 8]


class IQ3_XXS(_Signed):
    """d f16, 64 grid indices, then per 32 columns u32 as in IQ2_XXS."""

    def scales(self, e, w, row):
        ls = e.lshr(e.load(i32x8, e.offset(w, 66)), [28] * 8)
        return e.mul(_affine(e, ls, 0.5, 0.25), e.splat(e.half(w)))

    def indices(self, e, w):
        return e.load(i8x64, e.offset(w, 2)), []

    def sign_bytes(self, e, w):
        return gs.seven_bit_signs(e, e.b.zext(e.load(i32x8, e.offset(w, 66)), ir.VectorType(I64, 8)), 0)

    def sign_byte(self, i):
        return 8 * (i // 4) + i % 4

    def numbers(self, e, w, j):
        return [e.word(e.offset(w, 2 + 16 * j + i), 8) for i in range(16)]

    def sign_codes(self, e, w, half):
        return _seven_bits(e, e.b.load(e.vector_pointer(e.offset(w, 66 + 16 * half), 32, 4), align=1))


class IQ3_S(_Signed):
    """d f16, qs[64], qh[8] (ninth index bits), sign bytes[32], scales[4]."""

    bias, signs_at = 16, 74

    def scales(self, e, w, row):
        ls = e.fields_at(e.offset(w, 106), range(0, 32, 4), 4)
        return e.mul(_affine(e, ls, 2.0, 1.0), e.splat(e.half(w)))

    def indices(self, e, w):
        ninth = e.mask_of(e.word(e.offset(w, 66), 64))
        return e.load(i8x64, e.offset(w, 2)), [ninth]

    def sign_bytes(self, e, w):
        return e.load(i8x32, e.offset(w, 74))

    def numbers(self, e, w, j):
        words = ir.VectorType(ir.IntType(16), 16)
        low = e.b.zext(e.bytes_at(e.offset(w, 2 + 16 * j), 16), words)
        ninth = e.b.load(e.vector_pointer(e.offset(w, 66 + 2 * j), 16, 1), align=1)
        masks = e.constants([1 << i for i in range(16)], 16)
        is_set = e.b.icmp_unsigned("==", e.b.and_(e.pick(ninth, [0] * 16), masks), masks)
        return e.taken(e.b.or_(low, e.b.select(is_set, e.constants([256] * 16, 16), e.constants([0] * 16, 16))))


class _Ternary(_Grid):
    """Values (g + delta) with g in -1, 0, 1 and delta = 1/8 or -1/8: codes are 8g + 1 or 8g - 1, scales an eighth."""

    bias = 16

    def from_words(self, e, w, j, words, negative):
        """Return codes 64j.. from 32 index words.

        negative: mask of the groups of 8 columns (one per word) with delta -1/8.
        """
        points = e.entries64(grid_points.points(self.name, 8), self.name, words, range(8 * j, 8 * j + 8))
        t = ir.VectorType(I64, 8)
        plus, minus = (ir.Constant(t, [ir.Constant(I64, x)] * 8) for x in (0x1111111111111111, 0x0F0F0F0F0F0F0F0F))
        middle = e.b.select(e.pick(negative, range(8 * j, 8 * j + 8)), minus, plus)
        return e.b.add(points, e.b.bitcast(middle, points.type))


class IQ1_S(_Ternary):
    """d f16, qs[32], qh u16[8]: three index bits per group, 3-bit scale, sign of delta."""

    def qh(self, e, w):
        return e.b.load(e.vector_pointer(e.offset(w, 34), 16, 8), align=1)

    def scales(self, e, w, row):
        ls = e.all_and(e.lshr(e.b.zext(self.qh(e, w), ir.VectorType(I32, 8)), [12] * 8), 7)
        return e.mul(_affine(e, ls, 0.25, 0.125), e.splat(e.half(w)))

    def dot_codes(self, e, w, j):
        qh = e.pick(self.qh(e, w), [i // 4 for i in range(32)])
        high = e.b.shl(e.all_and(e.lshr(qh, [3 * (i % 4) for i in range(32)]), 7), gs.words([8] * 32))
        words = e.b.or_(gs.bytes_as_words(e, e.offset(w, 2)), high)
        return self.from_words(e, w, j, words, e.b.icmp_signed("<", qh, gs.words([0] * 32)))


class IQ1_M(_Ternary):
    """qs[32], qh[16], scales u16[4]: 3-bit scales per 16 columns; the four top nibbles are the half float d."""

    def scales(self, e, w, row):
        words = e.b.load(e.vector_pointer(e.offset(w, 48), 16, 4), align=1)
        parts = e.b.and_(e.lshr(words, [12, 8, 4, 0]), ir.Constant(words.type, [15, 15 << 4, 15 << 8, 15 << 12]))
        pairs = e.b.or_(e.pick(parts, [0, 1]), e.pick(parts, [2, 3]))
        d = e.b.or_(*(e.b.extract_element(pairs, e.index(i)) for i in range(2)))
        scale = e.splat(half_to_f32(e.b, d), f32x16)
        v = e.b.zext(e.pick(words, [n // 4 for n in range(16)]), ir.VectorType(I32, 16))
        ls = e.in_scale_order(e.all_and(e.lshr(v, [3 * (n % 4) for n in range(16)]), 7))
        return e.mul(_affine(e, ls, 0.25, 0.125), scale)

    def dot_codes(self, e, w, j):
        low, high = gs.bytes_as_words(e, w), e.b.load(e.vector_pointer(e.offset(w, 32), 8, 16), align=1)
        high = e.b.zext(e.pick(high, [i // 2 for i in range(32)]), gs.WORDS)
        high = e.b.shl(high, gs.words([8 - 4 * (i % 2) for i in range(32)]))
        negative = e.b.icmp_unsigned("!=", e.all_and(high, 0x800), gs.words([0] * 32))
        return self.from_words(e, w, j, e.b.or_(low, e.all_and(high, 0x700)), negative)
