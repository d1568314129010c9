"""Row-interleaved grid types: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S (layouts: `quant/interleave.py`).

Vector v of a block covers the groups l = v and v + 2 of eight columns of four rows: eight 64-bit words, l-major ("word
order"), which a fixed shuffle brings into runs of four columns. Where shuffles find the points, any order is as good:
vectors of products have columns 4v .. 4v+3 of four blocks of 16 of each row, so that activations need none.
"""

from ikcli.backends.cpu.kernels import grid_points
from ikcli.backends.cpu.kernels import grid_shuffle as gs
from ikcli.backends.cpu.kernels.groupformat import ORDER4, GroupFormat, ir
from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.native.simd.emit import I64
from ikcli.native.simd.vec import i8x16, i8x32, i8x64, i32x16, llvm_type

_RUNS = [2 * (4 * a + k) + c for c in range(2) for a in range(2) for k in range(4)]
_I8 = ir.IntType(8)


class _Grid(GroupFormat):
    """Grid types, which start with the half-float scales of the rows."""

    bias = 64  # at least the largest coordinate

    def d(self, e, w, row):
        return e.halves(w, 4)

    def once(self, e, name, w, make):
        """Return a value computed once per step."""
        key = (self.name, name, w)
        if key not in e.memo:
            e.memo[key] = make()
        return e.memo[key]

    def in_runs(self, e, codes):
        """Reorder from word order to runs of four columns."""
        words = e.b.bitcast(codes, llvm_type(i32x16))
        return e.b.bitcast(e.pick(words, _RUNS), codes.type)


class _Signed(_Grid):
    """Points with a sign per column; those of `columns` 8 are gathered in word order.

    Without shuffles, a table is read point by point.
    """

    columns = 8

    # --- by shuffles: runs of four columns are (number of the run in 64 columns, row) ---------------------------------
    @property
    def in_quarters(self):
        return gs.usable()

    @property
    def unit(self):
        return 2 if self.in_quarters else 1

    @property
    def order(self):
        return [[4 * b + n for b in range(4)] for n in range(4)] if self.in_quarters else ORDER4

    def by_shuffles(self, e, w, u, runs):
        """Return codes of these runs of unit u."""
        return gs.signed(e, *self.packed_points(e, w, u, runs), *self.sign_runs(e, w, u, runs))

    def packed_points(self, e, w, u, runs):
        """Return (32 points as words, the runs among them, levels, their bits, bias)."""
        key = self.name.removesuffix("_r4")
        table, levels, bits = grid_points.packed(key)
        if bits == 2:
            part, which, orders = u // 2, u % 2, [range(32), range(32, 64)]
        else:
            part, which = u, runs[0][0] % 4 // 2
            orders = [[self.point(g, k) for g in range(16) if g % 4 // 2 == h for k in range(4)] for h in range(2)]

        def make():
            entries = e.opaque_table(gs.planes(table), 8, f"{key}.planes", w)
            return gs.entries64(e, entries, len(table), *self.indices(e, w, part), orders)

        points = self.once(e, ("points", part), w, make)[which]
        first = orders[which][0] if bits == 2 else 0
        lanes = [orders[which].index(first + self.point(g, k)) for g, k in runs]
        starts = [4 * bits * (g % 2) if bits == 2 else 0 for g, _ in runs]
        return points, list(zip(lanes, starts, strict=True)), levels, bits, self.bias

    def point(self, g, k):
        """Return which index of 64 columns a run belongs to."""
        return 16 * (g // 8) + 4 * k + g % 8 // 2

    def indices(self, e, w, part):
        """Return 64 indices: lower bytes, then masks of upper bits from the lowest on."""
        raise NotImplementedError

    def sign_runs(self, e, w, u, runs):
        """Return bytes of eight signs, which of them belong to these runs, and their first bit."""
        signs = self.once(e, ("sign bytes", u // 2), w, lambda: self.sign_bytes(e, w, u // 2))
        return signs, [(32 * (u % 2) + 16 * (g // 8) + 4 * k + g % 8 // 2, 4 * (g % 2)) for g, k in runs]

    def sign_bytes(self, e, w, part):
        """Return the sign bytes of four blocks, one per group of eight columns: number 16*block + 4*row + group."""
        raise NotImplementedError

    # --- point by point -----------------------------------------------------------------------------------------------
    def number(self, e, w, ib, k, g):
        """Return the number (i32) of the point of row k, group g of `columns`."""
        raise NotImplementedError

    def sign_bytes16(self, e, w, ib):
        """Return one byte of eight signs per group of eight columns, numbered 4*row + group."""
        raise NotImplementedError

    # --- either way ---------------------------------------------------------------------------------------------------
    def codes(self, e, w, ib, v):
        if self.in_quarters:
            return self.by_shuffles(e, w, ib, super().dot_lanes()[v])
        codes = e.signed(self.points(e, w, ib, v), self.signs(e, w, ib, v), self.bias)
        return codes if self.columns == 4 else self.in_runs(e, codes)

    def most_magnitude(self):
        return grid_points.most_magnitude(self.name)

    def dot_codes(self, e, w, ib, v):
        if self.in_quarters:
            return self.by_shuffles(e, w, ib, self.dot_lanes()[v])
        if not self.most_magnitude():
            return self.codes(e, w, ib, v)
        return self.points(e, w, ib, v), self.signs(e, w, ib, v)

    def dot_lanes(self):
        if self.in_quarters:
            return [[(g, k) for k in range(4) for g in order] for order in self.order]
        if self.columns == 4 or not self.most_magnitude():
            return super().dot_lanes()
        return [[(2 * g + c, k) for g, k in _words(v) for c in range(2)] for v in range(2)]

    def _places(self, v):
        """Return (group of `columns`, row) of the points of vector v."""
        return _words(v) if self.columns == 8 else super().dot_lanes()[v]

    def points(self, e, w, ib, v):
        """Return 64 magnitudes."""
        numbers = [self.number(e, w, ib, k, g) for g, k in self._places(v)]
        return e.blended(grid_points.points(self.name), 8 * self.columns, self.name, numbers)

    def signs(self, e, w, ib, v):
        """Return 64 bytes, negative where the value is, and not 0."""
        per = 8 // self.columns
        places = [
            (4 * k + g // per, g % per * self.columns + i) for g, k in self._places(v) for i in range(self.columns)
        ]
        return e.signs_of_bits(self.sign_bytes16(e, w, ib), *zip(*places, strict=True))

    def taken(self, e, w, ib, make, i):
        """Return word i of the words that make() gives."""
        return self.once(e, ("taken", ib), w, lambda: e.taken(make()))[i]


def _words(v):
    """Return (group of eight columns, row) of the words of vector v in word order."""
    return [(v + 2 * a, k) for a in range(2) for k in range(4)]


class _SignsAndScales(_Signed):
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
        return e.b.xor(s, e.field(s, shift=1, width=8))

    def sign_bytes16(self, e, w, ib):
        two = self.once(
            e, ("signs", ib // 2), w, lambda: self.unscrambled(e, e.bytes_at(e.offset(w, 8 + 32 * (ib // 2)), 32))
        )
        return e.split(two, 16)[ib % 2]

    def indices(self, e, w, part):
        return e.load(i8x64, e.offset(w, 136 + 64 * part)), []

    def sign_bytes(self, e, w, part):
        return self.unscrambled(e, e.load(i8x64, e.offset(w, 8 + 64 * part)))


class IQ2_XXS(_SignsAndScales):
    def number(self, e, w, ib, k, g):
        return e.word(e.offset(w, 136 + 16 * ib + 4 * k + g), 8)


class IQ3_XXS(_SignsAndScales):
    factor, columns = 0.5, 4

    def point(self, g, k):
        return 32 * (g // 8) + 8 * k + g % 8

    def number(self, e, w, ib, k, g):
        at = e.offset(w, 136 + 32 * ib + 8 * k + g // 2 * 2)
        two = self.once(e, (ib, k, g // 2), w, lambda: e.word(at, 16))
        return e.b.lshr(two, e.index(8)) if g % 2 else e.b.and_(two, e.index(255))


class _Scales16(_Signed):
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


class IQ2_XS(_Scales16):
    """d f16[4], words (9-bit index, seven scrambled signs) numbered 4*row + group, scales."""

    scales_at = 264

    def sign_runs(self, e, w, u, runs):
        s = e.lshr(self.words(e, w, u), [9] * 32)
        return e.b.xor(s, e.b.shl(s, gs.words([1] * 32))), [(2 * self.point(g, k), 4 * (g % 2)) for g, k in runs]

    def words(self, e, w, pair):
        return e.b.load(e.vector_pointer(e.offset(w, 8 + 64 * pair), 16, 32), align=1)

    def indices(self, e, w, part):
        words = [gs.as_bytes(e, self.words(e, w, 2 * part + i)) for i in range(2)]
        low, high = (e.b.shuffle_vector(*words, indices(range(i, 128, 2))) for i in range(2))
        return low, [e.bits_set(high, [0] * 64)]

    def number(self, e, w, ib, k, g):
        return e.b.and_(e.word(e.offset(w, 8 + 32 * ib + 2 * (4 * k + g)), 16), e.index(511))

    def sign_bytes16(self, e, w, ib):
        s = e.field(e.b.load(e.vector_pointer(e.offset(w, 8 + 32 * ib), 16, 16), align=1), 9, 7)
        return e.b.trunc(e.b.xor(s, e.b.shl(s, _words16(e, [1] * 16))), llvm_type(i8x16))


class IQ2_S(_Scales16):
    """d f16[4]; qs, qh (a byte per row and block), signs, scales."""

    scales_at = 296

    def sign_bytes(self, e, w, part):
        return e.load(i8x64, e.offset(w, 168 + 64 * part))

    def indices(self, e, w, part):
        high = e.pick(e.bytes_at(e.offset(w, 136 + 16 * part), 16), [i // 4 for i in range(64)])
        masks = [e.bits_set(high, [2 * (i % 4) + bit for i in range(64)]) for bit in range(2)]
        return e.load(i8x64, e.offset(w, 8 + 64 * part)), masks

    def index_words(self, e, w, ib):
        """Return 16 indices of a block."""
        words = ir.VectorType(ir.IntType(16), 16)
        low = e.b.zext(e.bytes_at(e.offset(w, 8 + 16 * ib), 16), words)
        high = e.b.zext(e.pick(e.bytes_at(e.offset(w, 136 + 4 * ib), 4), [i // 4 for i in range(16)]), words)
        high = e.b.shl(high, e.constants([8 - 2 * (i % 4) for i in range(16)], 16))
        return e.b.or_(low, e.all_and(high, 0x300))

    def number(self, e, w, ib, k, g):
        return self.taken(e, w, ib, lambda: self.index_words(e, w, ib), 4 * k + g)

    def sign_bytes16(self, e, w, ib):
        return e.load(i8x16, e.offset(w, 168 + 16 * ib))


class IQ3_S(_Signed):
    """d f16[4]; qs, qh (bit g: ninth bit of group g of four columns), signs, 4-bit scales."""

    bias, columns = 16, 4

    def scales(self, e, w, row):
        packed = e.bytes_at(e.offset(w, 424), 16)
        return [e.affine(e.field(packed, shift=4 * i, width=4), 2.0, 1.0) for i in range(2)]

    def point(self, g, k):
        return 32 * (g // 8) + 8 * (g % 4) + 4 * (g % 8 // 4) + k

    def by_shuffles(self, e, w, u, runs):
        signs = e.pick(
            e.load(i8x32, e.offset(w, 296 + 32 * u)), [16 * (g // 8) + 4 * k + i for g, k in runs for i in range(4)]
        )
        codes = gs.coordinates(e, *self.packed_points(e, w, u, runs))
        return gs.negated(e, codes, self.bias, signs, [g % 8 for g, _ in runs])

    def indices(self, e, w, part):
        high = e.pick(e.bytes_at(e.offset(w, 264 + 8 * part), 8), [4 * (i // 32) + i % 4 for i in range(64)])
        ninth = e.bits_set(high, [i % 32 // 8 + 4 * (i // 4 % 2) for i in range(64)])
        return e.load(i8x64, e.offset(w, 8 + 64 * part)), [ninth]

    def index_words(self, e, w, ib):
        """Return 32 indices of a block."""
        low = gs.bytes_as_words(e, e.offset(w, 8 + 32 * ib))
        rows = e.b.zext(e.repeated(e.bytes_at(e.offset(w, 264 + 4 * ib), 4), 8), gs.WORDS)
        bits = gs.words([1 << (n // 8 + 4 * (n // 4 % 2)) for n in range(32)])
        upper = e.b.icmp_unsigned("==", e.b.and_(rows, bits), bits)
        return e.b.or_(low, e.b.select(upper, gs.words([256] * 32), gs.words([0] * 32)))

    def number(self, e, w, ib, k, g):
        return self.taken(e, w, ib, lambda: self.index_words(e, w, ib), 8 * (g % 4) + 4 * (g // 4) + k)

    def signs(self, e, w, ib, v):
        return e.plane_signs(e.offset(w, 296 + 16 * ib), v, a=4, h=2, c=1)


class _Ternary(_Grid):
    """Rows d f16[4]; values (g + delta) with g in -1, 0, 1, delta = +-1/8: codes are 8g +- 1, scales an eighth.

    Per 32 columns: qs[16] numbered 4*group + row, high index bits and signs of delta, scales.
    """

    bias = 16

    def header(self, e, w):
        return e.halves(w, 4)

    def d(self, e, w, row):
        return row

    def with_delta(self, e, words, v, negative):
        """Return codes from the indices (words numbered 4*group + row); negative: i1 in word order."""
        lanes = [4 * (v + 2 * a) + k for a in range(2) for k in range(4)]
        points = e.entries64(grid_points.points(self.name, 8), self.name, words, lanes)
        t = ir.VectorType(I64, 8)
        plus, minus = (ir.Constant(t, [ir.Constant(I64, x)] * 8) for x in (0x1111111111111111, 0x0F0F0F0F0F0F0F0F))
        return self.in_runs(e, e.b.add(points, e.b.bitcast(e.b.select(negative, minus, plus), points.type)))


def _words16(e, values):
    return e.constants(values, 16)


class IQ1_S(_Ternary):
    """qh u16[4]: 3 index bits per group, 3-bit scale, sign of delta."""

    def scales(self, e, w, row):
        qh = [e.words_at(e.offset(w, 24 * ib + 16), 4) for ib in range(8)]
        return e.sixteens(e.affine(e.field(x, shift=12, width=3), 0.25, 0.125) for x in qh)

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


class IQ1_M(_Ternary):
    """qh[8] (per 16 columns and row: nibbles of 3 index bits and the sign of delta), scales[4] of two nibbles."""

    def scales(self, e, w, row):
        out = []
        for ib in range(8):
            v = e.load_bytes(e.offset(w, 28 * ib + 24), 4)
            ls = e.b.shuffle_vector(e.field(v, shift=0, width=4), e.field(v, shift=4, width=4), indices(range(8)))
            out.append(e.affine(ls, 0.125, 0.0))
        return e.sixteens(out)

    def codes(self, e, w, ib, v):
        at = e.offset(w, 28 * ib)
        high = self.upper(e, at)
        words = self.once(e, ib, w, lambda: self.indices(e, at, high))
        signs = e.pick(high, [4 * (v + 2 * a) + k for a in range(2) for k in range(4)])
        return self.with_delta(e, words, v, e.b.icmp_unsigned("!=", e.all_and(signs, 0x800), _words16(e, [0] * 8)))

    def upper(self, e, at):
        """Return the nibbles of groups l = 2a + v (numbered 4*l + row) at bits 8..11: nibble v of byte 4a + row."""
        bytes_ = e.pick(e.bytes_at(e.offset(at, 16), 8), [4 * (i // 8) + i % 4 for i in range(16)])
        wide = e.b.zext(bytes_, ir.VectorType(ir.IntType(16), 16))
        return e.b.shl(wide, _words16(e, [8 - 4 * (i // 4 % 2) for i in range(16)]))

    def indices(self, e, at, high):
        low = e.b.zext(e.load(i8x16, at), ir.VectorType(ir.IntType(16), 16))
        return e.b.or_(low, e.all_and(high, 0x700))
