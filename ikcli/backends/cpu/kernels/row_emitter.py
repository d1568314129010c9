"""Emit operations on 64 codes as LLVM IR, from which weight formats are described."""

import llvmlite.ir as ir
import numpy as np

from ikcli.backends.cpu.kernels.vector_emitter import VectorEmitter, indices
from ikcli.native import isa
from ikcli.native.simd import arm64
from ikcli.native.simd.emit import I32, I64
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    i8x16,
    i8x32,
    i8x64,
    i32x16,
    llvm_type,
    pointer,
    with_sign,
)

_I8 = ir.IntType(8)


def nibble_places(run):
    """Return (16 bytes, bit) where each block of 16 columns is, in `run` bytes per 2*run columns; low nibbles first."""
    per = run // 16
    return [b // (2 * per) * per + b % per for b in range(16)], [4 * (b // per % 2) for b in range(16)]


def two_bit_places():
    """Return the same for 32 bytes per 128 columns, of which columns 32g .. 32g+31 are at bits 2g."""
    return [b // 8 * 2 + b % 2 for b in range(16)], [b % 8 // 2 * 2 for b in range(16)]


def bit_places():
    """Return the same for 32 bytes, of which bit n of byte i belongs to column 32n + i."""
    return [b % 2 for b in range(16)], [b // 2 for b in range(16)]


class RowEmitter(VectorEmitter):
    """Codes are bytes, in i8x64."""

    # --- 64 codes -----------------------------------------------------------------------------------------------------
    def const64(self, x):
        return const_vector(i8x64, [x] * 64)

    def join(self, lo, hi):
        """Join two 32-byte vectors into one of 64."""
        return self.b.shuffle_vector(lo, hi, indices(range(64)))

    def twice(self, address):
        """Load the same 32 bytes into both halves."""
        return self.pick(self.load(i8x32, address), [*range(32), *range(32)])

    def shift_right(self, v, amounts):
        """Shift 64 bytes, as 16 i32 lanes, right by 16 constants; bits leak between bytes, so mask afterwards."""
        if isa.current().is_arm64:
            return self._moved_bytes(v, [n for n in amounts for _ in range(4)])
        words = self.b.bitcast(v, llvm_type(i32x16))
        return self.b.bitcast(self.b.lshr(words, const_vector(i32x16, amounts)), llvm_type(i8x64))

    def _moved_bytes(self, v, right):
        """Move bits inside of bytes; ARM64 has shifts of bytes, which often leave nothing to mask."""
        v = self.lshr(v, [max(n, 0) for n in right])
        return self.b.shl(v, const_vector(i8x64, [max(-n, 0) for n in right]))

    def shift_left(self, v, n):
        if isa.current().is_arm64:
            return self._moved_bytes(v, [-n] * 64)
        words = self.b.bitcast(v, llvm_type(i32x16))
        return self.b.bitcast(self.b.shl(words, const_vector(i32x16, [n] * 16)), llvm_type(i8x64))

    def gather64(self, words):
        """Return 64 bytes from 8 i64 values."""
        v = ir.Constant(ir.VectorType(I64, 8), ir.Undefined)
        for i, x in enumerate(words):
            v = self.b.insert_element(v, x, self.index(i))
        return self.b.bitcast(v, llvm_type(i8x64))

    def splat64(self, x):
        """Return an i64 in 8 lanes."""
        one = self.b.insert_element(ir.Constant(ir.VectorType(I64, 8), ir.Undefined), x, self.index(0))
        return self.pick(one, [0] * 8)

    def with_sign(self, v, sign):
        """Negate 64 bytes where `sign` is negative; it is never 0. Needs AVX2."""

        def half(at):
            return with_sign(self.b, *(self.pick(x, range(at, at + 32)) for x in (v, sign)))

        return self.join(half(0), half(32))

    def bits(self, v, starts, width, to=0):
        """Move `width` bits of each of 64 bytes to bit `to`, others 0.

        In 16-byte chunk c they begin at bit starts[c].
        """
        mask = ((1 << width) - 1) << to
        mask = self.const64(mask - 256 if mask > 127 else mask)
        if set(starts) == {to}:
            return self.b.and_(v, mask)
        if isa.current().is_arm64:
            return self.b.and_(self._moved_bytes(v, [s - to for s in starts for _ in range(16)]), mask)
        if not self.moves_bits():
            if self._found_in_nibbles(starts, width):
                nibbles = self.all_and(self.shift_right(v, [s & 4 for s in starts for _ in range(4)]), 15)
                field = (1 << width) - 1
                return self.lookup16([(n >> (s & 3) & field) << to for s in starts for n in range(16)], nibbles)
            right = [s - to for s in starts for _ in range(4)]
            words = self.moved(self.b.bitcast(v, llvm_type(i32x16)), right)
            return self.b.and_(self.b.bitcast(words, v.type), mask)
        return self.affine_bits(v, [[*[None] * to, *range(start, start + width)] for start in starts])

    def _found_in_nibbles(self, starts, width):
        """Return whether fields at other places in each 16 bytes are best looked up.

        AVX2 moves all lanes by one distance only.
        """
        if "avx512f" in self.features() or "avx2" not in self.features():
            return False
        return (starts[0], starts[2]) != (starts[1], starts[3]) and all((s & 3) + width <= 4 for s in starts)

    def moves_bits(self):
        """Return whether `affine_bits` is an instruction."""
        return {"gfni", "avx512f"} <= self.features()

    def affine_bits(self, v, sources):
        """Return 64 bytes whose bit i is bit sources[c][i] of v, or 0 (None, or beyond).

        There are sources for each 8 bytes c, or for each 16 or more. Needs gfni.
        """
        n = len(sources)
        matrix = np.zeros((n, 8 // n, 8), np.uint8)  # of each 8 bytes; row 7 - i: which bits make bit i
        for chunk, places in enumerate(sources):
            for i, place in enumerate(places):
                if place is not None:
                    matrix[chunk, :, 7 - i] = 1 << place
        matrix = const_vector(i8x64, matrix.view(np.int8).ravel().tolist())
        return call_llvm(self.b, "llvm.x86.vgf2p8affineqb.512", v.type, [v, matrix, ir.Constant(_I8, 0)])

    def moved(self, words, right):
        """Move lanes right, or left where the distance is negative; bits that leave a lane may come back."""
        if min(right) >= 0:
            return self.lshr(words, right)
        if "avx512f" in self.features():
            by = const_vector(i32x16, [n % 32 for n in right])
            return call_llvm(self.b, "llvm.fshr.v16i32", words.type, [words, words, by])
        return self.b.shl(
            self.lshr(words, [max(n, 0) for n in right]), const_vector(i32x16, [max(-n, 0) for n in right])
        )

    def raw_halves(self, v, lo, hi):
        """Move the bits from `lo` on, in the last 32 bytes from `hi` on, to bit 0; higher bits are undefined."""
        return self.shift_right(v, [lo] * 8 + [hi] * 8)

    # --- codes by quarters: see `RowFormat.quarters` ------------------------------------------------------------------
    # Fields come with the bits around them; `codes_of` masks these or looks entries up.
    def quarters(self, parts, chunks, shifts, at):
        """Return blocks b: the 16 bytes chunks[b], moved so that bit shifts[b] comes to bit `at`."""
        for words in self._quarter_words(parts, chunks):
            yield self.b.bitcast(self.moved(words, [s - at for s in shifts]), llvm_type(i8x64))

    def _quarter_words(self, parts, chunks):
        low, high = (self.b.bitcast(v, llvm_type(i32x16)) for v in (parts[0], parts[-1]))
        for n in range(4):
            yield self.b.shuffle_vector(low, high, indices([4 * c + n for c in chunks]))

    def quarters_in_place(self, parts, chunks, shifts, bits):
        """Return blocks b: the 16 bytes chunks[b], of which `bits` bits from shifts[b] on are left where they are.

        They are codes times 2**shifts[b] (`RowFormat.quarter_shifts`), which saves moving them.
        """
        masks = self.constants([(1 << bits) - 1 << s for s in shifts for _ in range(4)], 8)
        return [self.b.and_(self.b.bitcast(v, masks.type), masks) for v in self._quarter_words(parts, chunks)]

    def joined_quarters(self, low, high):
        """Return codes whose lower bits and upper bits are fields: (parts, chunks, shifts, bits) each."""
        (*low_at, n_low), (*high_at, n_high) = low, high
        if not self.moves_bits():
            return self.codes_of(self.with_upper(self.quarters(*low_at, 0), self.quarters(*high_at, n_low), n_low),
                                 n_low + n_high)  # fmt: skip

        def fields(parts, chunks, shifts, bits, at):
            assert shifts[::2] == shifts[1::2]
            sources = [[*[None] * at, *range(s, s + bits)] for s in shifts[::2]]
            for words in self._quarter_words(parts, chunks):
                yield self.affine_bits(self.b.bitcast(words, llvm_type(i8x64)), sources)

        both = zip(fields(*low, 0), fields(*high, n_low), strict=True)
        return [self.b.or_(x, y) for x, y in both]

    def bit_quarters(self, address, at):
        """Return bits that are where `bit_places` says."""
        return self.quarters([self.twice(address)], *bit_places(), at)

    def two_bit_quarters(self, address, at=0):
        """Return codes that are where `two_bit_places` says."""
        return self.quarters([self.load(i8x64, address)], *two_bit_places(), at)

    def nibble_quarters(self, address, run=16):
        """Return codes that are where `nibble_places` says."""
        return self.nibble_quarters_of(self.nibble_parts(address), run)

    def nibble_parts(self, address):
        """Load the nibbles of 256 columns that follow each other."""
        return [self.load(i8x64, self.offset(address, at)) for at in (0, 64)]

    def apart_nibble_quarters(self, address, stride):
        """Return codes of 16 bytes per 32 columns, the first half of these low, `stride` bytes apart."""
        blocks = [self.load(i8x16, self.offset(address, stride * b)) for b in range(8)]
        return self.nibble_quarters_of([self.joined(blocks[:4]), self.joined(blocks[4:])], 16)

    def nibble_quarters_of(self, parts, run):
        """Return `nibble_quarters` from two vectors."""
        return self.quarters(parts, *nibble_places(run), 0)

    def with_upper(self, low, high, bits):
        """Take the lowest `bits` of each byte from one list, the others from another."""
        mask, others = self.const64((1 << bits) - 1), self.const64(-(1 << bits))

        def merged(x, y):
            if "avx512f" not in self.features():
                return self.b.or_(self.b.and_(x, mask), self.b.and_(y, others))
            # one instruction, for which LLVM would take two
            words = [self.b.bitcast(v, llvm_type(i32x16)) for v in (mask, x, y)]
            v = call_llvm(self.b, "llvm.x86.avx512.pternlog.d.512", words[0].type, [*words, ir.Constant(I32, 0xCA)])
            return self.b.bitcast(v, x.type)

        return [merged(x, y) for x, y in zip(low, high, strict=True)]

    def codes_of(self, quarters, bits, table=None):
        """Return the lowest `bits` of each byte, or their entries in a table of byte constants."""
        return [self.low_entry(table, bits, v) if table else self.all_and(v, (1 << bits) - 1) for v in quarters]

    # --- codes in the order of columns --------------------------------------------------------------------------------
    def raw_nibble_pair(self, w, j, block_bytes, at):
        """Return codes of blocks 2j, 2j+1 of 32 columns stored as 16 bytes each (low nibbles = first 16 columns).

        They are to be masked with 15.
        """
        first, second = (self.load(i8x16, self.offset(w, block_bytes * b + at)) for b in (2 * j, 2 * j + 1))
        order = [*range(16), *range(16), *range(16, 32), *range(16, 32)]
        both = self.b.shuffle_vector(first, second, indices(order))
        return self.shift_right(both, [0] * 4 + [4] * 4 + [0] * 4 + [4] * 4)

    def nibble_pair(self, w, j, block_bytes, at):
        """Return `raw_nibble_pair`, masked."""
        return self.all_and(self.raw_nibble_pair(w, j, block_bytes, at), 15)

    def bit_mask(self, lo, hi):
        """Return <64 x i1> from two i32 words."""
        return self.mask_of(self.b.or_(self.b.zext(lo, I64), self.b.shl(self.b.zext(hi, I64), ir.Constant(I64, 32))))

    def mask_of(self, bits):
        """Return <64 x i1> from an i64."""
        if not isa.current().is_arm64:
            return self.b.bitcast(bits, ir.VectorType(ir.IntType(1), 64))
        # There are no mask registers, and LLVM would move bits one by one.
        spread = self.pick(self.b.bitcast(bits, ir.VectorType(_I8, 8)), [i // 8 for i in range(64)])
        return self.bits_set(spread, [i % 8 for i in range(64)])

    def signs_of_bits(self, bytes_, lanes, positions):
        """Return 64 bytes, none of them 0, that are negative where a bit of a byte each is set."""
        bit = const_vector(i8x64, [1 << p if p < 7 else -128 for p in positions])
        others = const_vector(i8x64, [128 - (1 << p) if p < 7 else 1 for p in positions])  # just short of a sign
        return self.b.add(self.b.and_(self.pick(bytes_, lanes), bit), others)

    def signed(self, magnitudes, signs, bias):
        """Negate 64 magnitudes where `signs` is negative, and add a bias."""
        minus = self.b.icmp_signed("<", signs, self.const64(0))
        middle = self.const64(bias)
        return self.b.select(minus, self.b.sub(middle, magnitudes), self.b.add(middle, magnitudes))

    def lookup16(self, table, codes):
        """Look up the low four bits of 64 codes below 128, in 16 byte constants or in 16 for each 16 bytes."""
        table = [x & 255 for x in table] * (64 // len(table))
        if "avx512bw" in self.features():
            return call_llvm(self.b, "llvm.x86.avx512.pshuf.b.512", codes.type, [const_vector(i8x64, table), codes])
        if "avx2" in self.features():
            halves = []
            for half in (range(32), range(32, 64)):
                t = const_vector(i8x32, [table[i] for i in half])
                halves.append(call_llvm(self.b, "llvm.x86.avx2.pshuf.b", t.type, [t, self.pick(codes, half)]))
            return self.join(*halves)
        if isa.current().is_arm64:
            parts = arm64.sixteens(self.b, self.all_and(codes, 15))
            parts = [arm64.lookup(self.b, table[16 * i : 16 * i + 16], v) for i, v in enumerate(parts)]
            return arm64.joined(self.b, parts)
        entries = [const_vector(i8x64, [table[i // 16 * 16 + n] for i in range(64)]) for n in range(16)]
        out, codes = entries[0], self.all_and(codes, 15)
        for i in range(1, 16):
            out = self.b.select(self.b.icmp_unsigned("==", codes, self.const64(i)), entries[i], out)
        return out

    def third_bits(self, nibbles, c, upper=None):
        """Move bits c and c + 2 of 64 nibbles to bits 2 and 6; `upper`: another c for the upper 32."""
        first, second = (
            [(n >> c & 1) << 2 | (n >> c + 2 & 1) << 6 for n in range(16)] for c in (c, c if upper is None else upper)
        )
        return self.lookup16(first * 2 + second * 2, nibbles)

    def lookup(self, table, codes):
        """Look up 64 codes below 128 in a table of at most 64 byte constants."""
        table = [x & 255 for x in table]
        size = next(n for n in (16, 32, 64) if len(table) <= n)
        table += [0] * (size - len(table))
        if "avx512vbmi" in self.features():
            args = [const_vector(i8x64, table * (64 // size)), codes]
            return call_llvm(self.b, "llvm.x86.avx512.permvar.qi.512", codes.type, args)
        if size == 16:
            return self.lookup16(table, codes)
        if isa.current().is_arm64:
            return arm64.lookup(self.b, table, self.all_and(codes, size - 1))
        upper = self.b.icmp_signed("<", self.shift_left(codes, 8 - (size - 1).bit_length()), self.const64(0))
        return self.b.select(upper, self.lookup(table[size // 2 :], codes), self.lookup(table[: size // 2], codes))

    def entry_with_bit(self, table, nibbles, v, starts):
        """Look up 32 byte constants by 64 nibbles and, above these, a bit of v: starts[c] in 16-byte chunk c."""
        if "avx512vbmi" in self.features() or isa.current().is_arm64:
            return self.lookup(table, self.b.or_(nibbles, self.bits(v, starts, 1, to=4)))
        words = self.moved(self.b.bitcast(v, llvm_type(i32x16)), [start - 7 for start in starts for _ in range(4)])
        upper = self.b.icmp_signed("<", self.b.bitcast(words, v.type), self.const64(0))
        return self.b.select(upper, self.lookup16(table[16:], nibbles), self.lookup16(table[:16], nibbles))

    def low_entry(self, table, bits, v):
        """Look up byte constants by the low `bits` <= 6 bits of 64 bytes."""
        table = [int(x) & 255 for x in table[: 1 << bits]]
        if "avx512vbmi" in self.features():  # looks at the low 6 bits only
            return self.lookup(table * (64 >> bits), v)
        return self.lookup(table * max(1, 16 >> bits), self.all_and(v, (1 << bits) - 1))

    def with_bias(self, v, bias):
        """Add a bias of 128, or of 0, to signed bytes."""
        return self.b.xor(v, self.const64(-128)) if bias else v

    # --- codes times whole scales -------------------------------------------------------------------------------------
    def times_scales(self, codes, scales, lanes):
        """Multiply 64 codes by some of 16 bytes, lanes[i] for codes 2i and 2i + 1; the products are unsigned bytes."""
        pairs = self._pairs(codes)
        return self.b.bitcast(self.b.mul(pairs, self._factors(scales, lanes)), codes.type)

    def minus_scales(self, codes, scales, lanes, bias):
        """Return 128 - (code - bias) * scale, an unsigned byte, for 64 codes and signed scales as in `times_scales`.

        Subtracted, because -4 times -32 does not fit a signed byte.
        """
        pairs, factors = self._pairs(codes), self._factors(scales, lanes)
        low, high = (self.b.mul(self.all_and(pairs, mask), factors) for mask in (0x00FF, 0xFF00))
        products = self.b.bitcast(self.b.or_(self.all_and(low, 0x00FF), high), codes.type)
        firsts = self.b.add(self.b.mul(scales, self.constants([bias] * 16, 8)), self.constants([128] * 16, 8))
        return self.b.sub(self.pick(firsts, [n for n in lanes for _ in range(2)]), products)

    def _pairs(self, codes):
        return self.b.bitcast(codes, ir.VectorType(ir.IntType(16), 32))

    def _factors(self, scales, lanes):
        return self.pick(self.b.sext(scales, ir.VectorType(ir.IntType(16), 16)), lanes)

    # --- points of grids ----------------------------------------------------------------------------------------------
    def taken(self, words):
        """Return the lanes (u16) of a vector as i32.

        They leave the register four at a time: one at a time, or through memory, would be slower.
        """
        fours, numbers = self.b.bitcast(words, ir.VectorType(I64, words.type.count // 4)), []
        for q in range(fours.type.count):
            four = self.opaque(self.b.extract_element(fours, self.index(q)))
            words = (self.b.lshr(four, self.int(shift)) for shift in range(0, 64, 16))
            numbers += [self.b.trunc(self.b.and_(x, self.int(0xFFFF)), I32) for x in words]
        return numbers

    def entries64(self, entries, name, words, lanes):
        """Return 64 bytes: these entries (i64) by number (u16 lanes of `words`), kept as a `table`."""
        numbers = self.taken(words)
        numbers = [numbers[i] for i in lanes]
        if isa.current().short_vectors:
            return self.blended(entries, 64, name, numbers)
        table, values = self.table(entries, 64, name), []
        for number in numbers:
            at = self.b.add(table, self.times(self.b.zext(number, I64), 8))
            values.append(self.b.load(pointer(self.b, at, I64), align=8))
        return self.gather64(values)

    def blended(self, entries, bits, name, numbers):
        """Return 64 bytes: these entries (integers of `bits`, 32 or 64) by number (i32), kept as a `table`.

        A load takes 16 bytes of the table at which the entry is in its place among them: one instruction loads and
        blends. Entries of 32 bits are there twice, so that such loads start at 8 bytes and fewer cross a cache line.
        """
        per, twice = 128 // bits, 64 // bits
        entries = [x for x in entries for _ in range(twice)]
        edge = [0] * twice  # so much is read around an entry
        name = f"{name}.{bits}.edged"
        if name not in self.memo:
            with self.b.goto_entry_block():  # a register: LLVM would take the address for each place from the code
                self.memo[name] = self.opaque(self.table([*edge, *entries, *edge], bits, name))
        table, parts = self.memo[name], []
        for i, number in enumerate(numbers):
            at = self.offset(table, self.times(self.b.zext(number, I64), 8), 8 - i % per // twice * 8)
            found = self.b.load(self.vector_pointer(at, bits, per), align=8)
            lanes = [per + n if n == i % per else n for n in range(per)]
            if i % per == 0:
                parts.append(found)
            else:
                parts[-1] = self.b.shuffle_vector(parts[-1], found, indices(lanes))
        return self.b.bitcast(self.joined(parts), llvm_type(i8x64))
