"""Read codes of columns 64j .. 64j+63 as K-quants and IQ*_K types store them, in fields and bit planes of 32 bytes."""

from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.native.simd.vec import call_llvm, const_vector, i8x16, i8x32, i32x8, llvm_type

CROSSED_NIBBLES = [8 * (i % 4) + 4 * (i // 4) for i in range(8)]  # of a word: lower ones of its bytes, upper ones


def raw_two_bits(e, address, j):
    """Return 2-bit codes of columns 64j.., to be masked with 3: 32 bytes per 128 columns, column group g at bits 2g."""
    g = 2 * (j % 2)
    return e.raw_halves(e.twice(e.offset(address, 32 * (j // 2))), 2 * g, 2 * g + 2)


def two_bits(e, address, j):
    """Return `raw_two_bits`, masked."""
    return e.all_and(raw_two_bits(e, address, j), 3)


def raw_paired_nibbles(e, address, n, block_bytes=16):
    """Return nibbles of blocks 2n and 2n + 1 of 16 bytes: the lower ones of both, then the upper ones.

    See `RowFormat.paired_codes`. They are to be masked with 15.
    """
    first, second = (e.load(i8x16, e.offset(address, block_bytes * b)) for b in (2 * n, 2 * n + 1))
    both = e.joined([first, second]) if block_bytes > 16 else e.load(i8x32, e.offset(address, 32 * n))
    return e.raw_halves(e.join(both, both), 0, 4)


def split_nibbles(e, address, j):
    """Return nibbles of 32-byte runs: sub-block 2j low, 2j+1 high."""
    return e.bits(e.twice(e.offset(address, 32 * j)), [0] * 2 + [4] * 2, width=4)


def bit_plane(e, address, j):
    """Return bytes 0/1: bit b of 32 bytes for sub-blocks b = 2j and 2j+1."""
    return e.bits(e.twice(address), plane_starts(j), width=1)


def plane_starts(j):
    """Return where `bit_plane` finds its bits in each 16 bytes."""
    return [2 * j] * 2 + [2 * j + 1] * 2


def five_bit_entry(e, table, low_at, high_at, j):
    """Look up a table of 32 byte constants: four bits as `split_nibbles`, the fifth as `bit_plane`."""
    return e.entry_with_bit(table, split_nibbles(e, low_at, j), e.twice(high_at), plane_starts(j))


def two_bit_entry(e, table, address, j):
    """Look up a table of 4 byte constants for `two_bits`."""
    if e.moves_bits():
        return e.low_entry(table, 2, raw_two_bits(e, address, j))
    nibbles = e.bits(
        e.twice(e.offset(address, 32 * (j // 2))), [4 * (j % 2)] * 4, width=4
    )  # two codes: each half takes one
    return e.lookup16([table[n & 3] for n in range(16)] * 2 + [table[n >> 2] for n in range(16)] * 2, nibbles)


def three_bit_entry(e, table, low_at, high_at, j):
    """Look up a table of 8 byte constants: two bits as `raw_two_bits`, the third as `bit_plane`."""
    if e.moves_bits():
        q = e.b.or_(two_bits(e, low_at, j), e.shift_left(bit_plane(e, high_at, j), 2))
        return e.lookup(table, q)
    # the codes of 64 columns in lower nibbles, those of the next 64 in upper ones; lookups see no more than bit 7, a 0
    low = e.all_and(e.raw_halves(e.twice(e.offset(low_at, 32 * (j // 2))), 0, 2), 0x33)
    thirds = e.bits(e.twice(high_at), [4 * (j // 2)] * 4, width=4)
    both = e.b.or_(low, e.third_bits(thirds, 0, 1))
    return e.lookup16(table + [0] * 8, e.shift_right(both, [4] * 16) if j % 2 else both)


def crossed_two_bits(e, address, h, n):
    """Return codes as `RowFormat.crossed_codes` wants them, those of every other 32 columns at bit 2. For AVX2.

    All of them take one shift per 32 bytes then.
    """
    words = e.b.bitcast(e.load(i8x32, e.offset(address, 32 * h)), llvm_type(i32x8))
    lanes = [half + n + upper for half in (0, 4) for upper in (0, 8) for _ in range(2)]
    words = e.b.shuffle_vector(words, e.lshr(words, [4] * 8), indices(lanes))
    return e.b.and_(e.b.bitcast(words, llvm_type(i8x32)), const_vector(i8x32, ([3] * 4 + [12] * 4) * 4))


def crossed_three_bits(e, low_at, high_at, h, n):
    """Return codes as `RowFormat.crossed_codes` wants them, of fields as in `three_bit_entry`.

    They are to be masked with 7; bit 7 is 0.
    """
    low = e.load(i8x32, e.offset(low_at, 32 * h))
    first, second = (e.all_and(e.lshr(e.b.bitcast(low, llvm_type(i32x8)), [by] * 8), 0x33333333) for by in (0, 2))
    # Their third bits, two at a time: of blocks of 32 columns 4h and 4h + 2, or 4h + 1 and 4h + 3.
    nibbles = e.lshr(e.b.bitcast(e.load(i8x32, high_at), llvm_type(i32x8)), [4 * h] * 8)
    nibbles = e.b.bitcast(e.all_and(nibbles, 0x0F0F0F0F), low.type)
    halves = []
    for c, codes in enumerate((first, second)):
        bits = const_vector(i8x32, [(i >> c & 1) << 2 | (i >> c + 2 & 1) << 6 for i in range(16)] * 2)
        bits = call_llvm(e.b, "llvm.x86.avx2.pshuf.b", low.type, [bits, nibbles])
        halves.append(e.b.or_(codes, e.b.bitcast(bits, codes.type)))
    # Dwords of both side by side, then those of columns 4n .. with the same from upper nibbles.
    at = n // 2 * 2
    both = e.b.shuffle_vector(*halves, indices([at, 8 + at, at + 1, 9 + at, 4 + at, 12 + at, 5 + at, 13 + at]))
    at = n % 2 * 2
    lanes = [at, at + 1, 8 + at, 9 + at]
    words = e.b.shuffle_vector(both, e.lshr(both, [4] * 8), indices([*lanes, *(4 + m for m in lanes)]))
    return e.b.bitcast(words, low.type)
