"""Row-interleaved grid types: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S (layouts: `quant/interleave.py`).

Vector v of a block covers the groups l = v and v + 2 of eight columns of four rows: eight 64-bit words, l-major ("word
order"), which a fixed shuffle brings into runs of four columns.
"""

from ikcli.backends.cpu.kernels import grid_shuffle as gs
from ikcli.backends.cpu.kernels.groupformat import GroupFormat, ir
from ikcli.backends.cpu.kernels.rowformat import by_name
from ikcli.gguf.constants import GGMLType
from ikcli.native.simd.emit import I32, I64
from ikcli.native.simd.vec import i8x16, i8x64, i32x16, llvm_type
from ikcli.quant.tables import grid

_RUNS = [2 * (4 * a + k) + c for c in range(2) for a in range(2) for k in range(4)]
_I8 = ir.IntType(8)


class _Grid(GroupFormat):
    """Half-float scales of the rows come first."""

    bias = 64  # at least the largest coordinate

    def __init__(self, name, n_bytes, block_columns=256, header_bytes=0):
        self.name, self.block_bytes, self.header_bytes = name, n_bytes, header_bytes
        self.block_columns, self.step_bytes = block_columns, 256 // block_columns * n_bytes

    def d(self, e, w, row):
        return e.halves(w, 4)

    def table(self, e, bits, factor=1):
        """Address of the grid points, one integer per point, first coordinate lowest."""
        name = self.name.removesuffix("_r4")
        rows = (grid(GGMLType[name.upper()]) * factor).astype(int)
        return e.table([sum((int(x) & 255) << 8 * i for i, x in enumerate(row)) for row in rows], bits, name)

    def points(self, e, indices):
        """Points of 8 columns of 8 indices (i32x8 in word order)."""
        table = self.table(e, 64)
        return e.gather64([e.entry(table, e.b.extract_element(indices, e.index(i)), 64) for i in range(8)])

    def small_points(self, e, indices):
        """As points, from the points of 4 columns of 16 indices."""
        table = self.table(e, 32)
        v = ir.Constant(ir.VectorType(I32, 16), ir.Undefined)
        for i in range(16):
            x = e.entry(table, e.b.extract_element(indices, e.index(i)), 32)
            v = e.b.insert_element(v, x, e.index(i))
        return e.b.bitcast(v, ir.VectorType(_I8, 64))

    def shuffled(self, e, w, ib, v, index, signs):
        """Codes from shuffles: `index(part)` are 32 indices (words), `signs` (sign bytes, their lanes, their bits)."""
        key, name = self.name.removesuffix("_r4"), self.name
        rows = grid(GGMLType[key.upper()]).astype(int)
        levels = sorted({int(x) for x in rows.flat})
        eight = rows.shape[1] == 8
        bits, part = (2, ib // 2) if eight else (3, ib)
        if (name, w, part) not in e.memo:
            words, *upper = index(part)
            at = e.opaque_table(gs.packed(rows, levels, bits), 16, f"{key}.packed", w)
            e.memo[name, w, part] = gs.entries(e, at, len(rows), words, upper)
        lanes = [self.word_lane(ib, *run) for run in runs(v)]
        starts = [4 * bits * c if eight else 0 for _, _, c in runs(v)]
        codes = gs.coordinates(e, e.memo[name, w, part], lanes, levels, bits, self.bias, starts)
        return gs.negated(e, codes, self.bias, *signs)

    def word_lane(self, ib, k, g, c):
        """Which of 32 index words a run of row k, group g of eight columns, half c belongs to."""
        return 16 * (ib % 2) + 4 * k + g

    def once(self, e, name, w, make):
        """A value computed once per step."""
        key = (self.name, name, w)
        if key not in e.memo:
            e.memo[key] = make()
        return e.memo[key]

    def sign_bytes(self, e, w, ib, v, at, make=lambda x: x):
        """For `shuffled`: a byte of eight signs per group, numbered 16*block + 4*row + group."""
        signs = self.once(e, ib // 4, w, lambda: make(e.load(i8x64, e.offset(w, at + 64 * (ib // 4)))))
        return signs, [16 * (ib % 4) + 4 * k + g for k, g, _ in runs(v)], [4 * c for _, _, c in runs(v)]

    def in_runs(self, e, codes):
        """From word order to runs of four columns."""
        words = e.b.bitcast(codes, llvm_type(i32x16))
        return e.b.bitcast(e.pick(words, _RUNS), codes.type)

    def signed(self, e, points, minus):
        """bias + points, or bias - points where the mask is set."""
        mid = e.const64(self.bias)
        return e.b.select(minus, e.b.sub(mid, points), e.b.add(mid, points))

    def masked(self, e, points, sign_bytes):
        """Signed by 8 bytes in word order, in runs of four columns."""
        mask = e.mask_of(e.b.bitcast(sign_bytes, I64))
        return self.in_runs(e, self.signed(e, points, mask))


def runs(v):
    """(row, group of eight columns, half of it) of the 16 runs of four columns of vector v."""
    return [(k, 2 * a + v, c) for c in range(2) for a in range(2) for k in range(4)]


def words_of(e, v, x):
    """Lanes of vector v in word order, of 16 lanes numbered 4*row + l."""
    return e.pick(x, [4 * k + v + 2 * a for a in range(2) for k in range(4)])


def narrow(e, v):
    """i32x8 as bytes."""
    return e.b.trunc(v, ir.VectorType(_I8, v.type.count))


class _SignsAndScales(_Grid):
    """d f16[4], then a byte per group of eight columns: seven scrambled signs above one bit of a 4-bit scale."""

    factor = 0.25

    def scales(self, e, w, row):
        parts = []
        for i in range(2):
            v = e.all_and(e.load(i32x16, e.offset(w, 8 + 64 * i)), 0x01010101)
            ls = e.b.or_(e.b.or_(v, e.field(v, 7, 32)), e.b.or_(e.field(v, 14, 32), e.field(v, 21, 32)))
            parts.append(e.affine(e.all_and(ls, 15), self.factor, self.factor / 2))
        return parts

    def unscrambled(self, e, x):
        s = e.all_and(x, 254)
        return e.b.xor(s, e.field(s, 1, 8))

    def signs(self, e, w, ib, v):
        return words_of(e, v, self.unscrambled(e, e.load(i8x16, e.offset(w, 8 + 16 * ib))))

    def codes(self, e, w, ib, v):
        if not gs.usable(e):
            return self.loaded(e, w, ib, v)
        signs = self.sign_bytes(e, w, ib, v, 8, lambda x: self.unscrambled(e, x))
        return self.shuffled(e, w, ib, v, lambda part: [gs.bytes_as_words(e, e.offset(w, 136 + 32 * part))], signs)


class IQ2XXS(_SignsAndScales):
    def loaded(self, e, w, ib, v):
        indices = words_of(e, v, e.load_bytes(e.offset(w, 136 + 16 * ib), 16))
        return self.masked(e, self.points(e, indices), self.signs(e, w, ib, v))


class IQ3XXS(_SignsAndScales):
    factor = 0.5

    def word_lane(self, ib, k, g, c):
        return 8 * k + 2 * g + c

    def loaded(self, e, w, ib, v):
        # Indices are numbered 8*row + (group of four columns).
        bytes_ = e.load_bytes(e.offset(w, 136 + 32 * ib), 32)
        indices = e.pick(bytes_, [8 * k + 2 * (v + 2 * a) + c for a in range(2) for k in range(4) for c in range(2)])
        return self.masked(e, self.small_points(e, indices), self.signs(e, w, ib, v))


class _Scales16(_Grid):
    """Bytes 4*block + row of 4-bit scales, one per 16 columns: (0.5 + s) / 4."""

    scales_at = 0

    def scales(self, e, w, row):
        parts = []
        for pair in range(4):
            v = e.load_bytes(e.offset(w, self.scales_at + 8 * pair), 8)
            twice = e.pick(v, [*range(4), *range(4), *range(4, 8), *range(4, 8)])
            ls = e.all_and(e.lshr(twice, ([0] * 4 + [4] * 4) * 2), 15)
            parts.append(e.affine(ls, 0.25, 0.125))
        return parts


class IQ2XS(_Scales16):
    """d f16[4], words (9-bit index, seven scrambled signs) numbered 4*row + group, scales."""

    scales_at = 264

    def codes(self, e, w, ib, v):
        if not gs.usable(e):
            return self.loaded(e, w, ib, v)
        words = e.b.load(e.vector_pointer(e.offset(w, 8 + 64 * (ib // 2)), 16, 32), align=1)
        s = e.lshr(words, [9] * 32)
        lanes, starts = ([2 * self.word_lane(ib, *run) for run in runs(v)], [4 * c for _, _, c in runs(v)])
        signs = e.b.xor(s, e.b.shl(s, gs.words([1] * 32)))
        return self.shuffled(e, w, ib, v, lambda part: [words], (signs, lanes, starts))

    def loaded(self, e, w, ib, v):
        words = words_of(e, v, e.words_at(e.offset(w, 8 + 32 * ib), 16))
        s = e.field(words, 9, 7)
        signs = narrow(e, e.b.xor(s, e.b.shl(s, e.ints([1] * 8))))
        return self.masked(e, self.points(e, e.all_and(words, 511)), signs)


class IQ2S(_Scales16):
    """d f16[4]; qs, qh (a byte per row and block), signs, scales."""

    scales_at = 296

    def codes(self, e, w, ib, v):
        if not gs.usable(e):
            return self.loaded(e, w, ib, v)
        return self.shuffled(e, w, ib, v, lambda part: [self.indices(e, w, part)], self.sign_bytes(e, w, ib, v, 168))

    def indices(self, e, w, part):
        """The indices of two blocks."""
        low = gs.bytes_as_words(e, e.offset(w, 8 + 32 * part))
        high = e.bytes_at(e.offset(w, 136 + 8 * part), 8)
        high = e.b.zext(e.pick(high, [i // 4 for i in range(32)]), gs.WORDS)
        high = e.all_and(e.b.shl(high, gs.words([8 - 2 * (i % 4) for i in range(32)])), 0x300)
        return e.b.or_(low, high)

    def loaded(self, e, w, ib, v):
        low = words_of(e, v, e.load_bytes(e.offset(w, 8 + 16 * ib), 16))
        high = e.repeated(e.load_bytes(e.offset(w, 136 + 4 * ib), 4), 2)
        high = e.all_and(e.lshr(high, [2 * (v + 2 * a) for a in range(2) for _ in range(4)]), 3)
        signs = words_of(e, v, e.load(i8x16, e.offset(w, 168 + 16 * ib)))
        return self.masked(e, self.points(e, e.both(low, high, 8)), signs)


class IQ3S(_Grid):
    """d f16[4]; qs, qh (bit g: ninth bit of group g of four columns), signs, 4-bit scales."""

    bias = 16

    def scales(self, e, w, row):
        packed = e.bytes_at(e.offset(w, 424), 16)
        return [e.affine(e.field(packed, 4 * i, 4), 2.0, 1.0) for i in range(2)]

    def word_lane(self, ib, k, g, c):
        run = 2 * g + c
        return 8 * (run % 4) + 4 * (run // 4) + k

    def codes(self, e, w, ib, v):
        if not gs.usable(e):
            return self.loaded(e, w, ib, v)
        signs = e.repeated(e.load(i8x16, e.offset(w, 296 + 16 * ib)), 4)
        starts = [4 * (n // 4 % 2) + 2 * v + n // 8 for n in range(16)]
        return self.shuffled(e, w, ib, v, lambda part: self.indices(e, w, part), (signs, None, starts))

    def indices(self, e, w, ib):
        """Low bytes of the indices of a block, and a mask of their ninth bits."""
        low = gs.bytes_as_words(e, e.offset(w, 8 + 32 * ib))
        rows = e.b.zext(e.repeated(e.bytes_at(e.offset(w, 264 + 4 * ib), 4), 8), gs.WORDS)
        bits = gs.words([1 << (n // 8 + 4 * (n // 4 % 2)) for n in range(32)])
        return low, e.b.icmp_unsigned("!=", e.b.and_(rows, bits), gs.words([0] * 32))

    def loaded(self, e, w, ib, v):
        # Group g of a row: byte 8*(g % 4) + 4*(g // 4) + row; this order needs no shuffle afterwards.
        groups = self.order[v]
        low = e.pick(
            e.load_bytes(e.offset(w, 8 + 32 * ib), 32),
            [8 * (g % 4) + 4 * (g // 4) + k for g in groups for k in range(4)],
        )
        high = e.repeated(e.load_bytes(e.offset(w, 264 + 4 * ib), 4), 4)
        high = e.all_and(e.lshr(high, [g for g in groups for _ in range(4)]), 1)
        minus = e.plane_mask(e.offset(w, 296 + 16 * ib), v, 4, 2, 1)
        return self.signed(e, self.small_points(e, e.both(low, high, 8)), minus)


class _Ternary(_Grid):
    """Rows d f16[4]; values (g + delta) with g in -1, 0, 1, delta = +-1/8: codes are 8g +- 1, scales an eighth.

    Per 32 columns: qs[16] numbered 4*group + row, high index bits and signs of delta, scales.
    """

    bias = 16

    def header(self, e, w):
        return e.halves(w, 4)

    def d(self, e, w, row):
        return row

    def table(self, e, bits, factor=8):
        return super().table(e, bits, factor)

    def with_delta(self, e, words, v, negative):
        """Codes from the indices (words numbered 4*group + row); negative: i1 in word order."""
        lanes = [4 * (v + 2 * a) + k for a in range(2) for k in range(4)]
        points = e.entries64(self.table(e, 64), words, lanes)
        t = ir.VectorType(I64, 8)
        plus, minus = (ir.Constant(t, [ir.Constant(I64, x)] * 8) for x in (0x1111111111111111, 0x0F0F0F0F0F0F0F0F))
        return self.in_runs(e, e.b.add(points, e.b.bitcast(e.b.select(negative, minus, plus), points.type)))


def _words16(e, values):
    return e.constants(values, 16)


class IQ1S(_Ternary):
    """qh u16[4]: 3 index bits per group, 3-bit scale, sign of delta."""

    def scales(self, e, w, row):
        qh = [e.words_at(e.offset(w, 24 * ib + 16), 4) for ib in range(8)]
        return e.sixteens(e.affine(e.field(x, 12, 3), 0.25, 0.125) for x in qh)

    def codes(self, e, w, ib, v):
        at = e.offset(w, 24 * ib)
        qh = e.b.load(e.vector_pointer(e.offset(at, 16), 16, 4), align=1)
        words = self.once(e, ib, w, lambda: self.indices(e, at, qh))
        negative = e.b.icmp_signed("<", e.repeated(qh, 2), _words16(e, [0] * 8))
        return self.with_delta(e, words, v, negative)

    def indices(self, e, at, qh):
        low = e.b.zext(e.load(i8x16, at), ir.VectorType(ir.IntType(16), 16))
        high = e.lshr(e.repeated(qh, 4), [3 * (i // 4) for i in range(16)])
        return e.both(low, e.all_and(high, 7), 8)


class IQ1M(_Ternary):
    """qh[8] (per 16 columns and row: nibbles of 3 index bits and the sign of delta), scales[4] of two nibbles."""

    def scales(self, e, w, row):
        out = []
        for ib in range(8):
            v = e.load_bytes(e.offset(w, 28 * ib + 24), 4)
            ls = e.b.shuffle_vector(e.field(v, 0, 4), e.field(v, 4, 4), e.lanes(range(8)))
            out.append(e.affine(ls, 0.125, 0.0))
        return e.sixteens(out)

    def codes(self, e, w, ib, v):
        at = e.offset(w, 28 * ib)
        high = self.upper(e, at)
        words = self.once(e, ib, w, lambda: self.indices(e, at, high))
        signs = e.pick(high, [4 * (v + 2 * a) + k for a in range(2) for k in range(4)])
        return self.with_delta(e, words, v, e.b.icmp_unsigned("!=", e.all_and(signs, 0x800), _words16(e, [0] * 8)))

    def upper(self, e, at):
        """The nibbles of groups l = 2a + v (numbered 4*l + row) at bits 8..11: nibble v of byte 4a + row."""
        bytes_ = e.pick(e.bytes_at(e.offset(at, 16), 8), [4 * (i // 8) + i % 4 for i in range(16)])
        wide = e.b.zext(bytes_, ir.VectorType(ir.IntType(16), 16))
        return e.b.shl(wide, _words16(e, [8 - 4 * (i // 4 % 2) for i in range(16)]))

    def indices(self, e, at, high):
        low = e.b.zext(e.load(i8x16, at), ir.VectorType(ir.IntType(16), 16))
        return e.b.or_(low, e.all_and(high, 0x700))


FORMATS = by_name(
    *(IQ2XXS("iq2_xxs_r4", 264), IQ2XS("iq2_xs_r4", 296), IQ2S("iq2_s_r4", 328)),
    *(IQ3XXS("iq3_xxs_r4", 392), IQ3S("iq3_s_r4", 440)),
    *(IQ1S("iq1_s_r4", 24, 32, 8), IQ1M("iq1_m_r4", 28, 32, 8)),
)
