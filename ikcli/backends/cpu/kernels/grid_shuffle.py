"""Look up grid points by shuffles (AVX-512 VBMI), which avoids the loads of gathers.

A point of a grid is packed into 16 bits, 2 or 3 for the level of each coordinate. 32 indices, as many as 256 columns of
a 2-bit type have, become points by two-register word shuffles of 64 entries each and blends on the upper index bits; 64
indices by byte shuffles of 128 entries, for the lower and the upper halves of the points, which takes half as many.
A point and its signs then become bytes by `vpmultishiftqb` (any 8 bits of a quadword per byte) and a byte shuffle over
the levels and their negatives.
"""

import llvmlite.ir as ir

from ikcli.backends.cpu.kernels.vector_emitter import indices
from ikcli.native import isa
from ikcli.native.simd.vec import call_llvm, const_vector, i8x64, llvm_type

_I16 = ir.IntType(16)
WORDS = ir.VectorType(_I16, 32)
EVEN_SIGNS = [s | (bin(s).count("1") & 1) << 7 for s in range(128)]  # of 7-bit codes


def usable():
    """Return True if the target has the instructions."""
    return {"avx512vbmi", "avx512bw"} <= isa.current().features


def packed(points, levels, bits):
    """Return points (rows of coordinates) as 16-bit words; coordinate i is the index of its level at bit `bits` * i."""
    index = {v: i for i, v in enumerate(levels)}
    return [sum(index[int(x)] << bits * i for i, x in enumerate(row)) for row in points]


def words(values):
    """Return a constant vector of 32 words."""
    return ir.Constant(WORDS, [ir.Constant(_I16, v) for v in values])


def entries(e, table, size, index):
    """Return entry `index` of `size` words at address `table`, for 32 words."""
    parts = [_shuffle64(e, e.offset(table, 2 * i), index) for i in range(0, size, 64)]
    n_tested = (size // 64).bit_length() - 1
    tests = [e.b.icmp_unsigned("!=", e.all_and(index, 64 << i), words([0] * 32)) for i in range(n_tested)]
    return _chosen(e, parts, tests)


def _chosen(e, parts, masks):
    """Choose one of 2**n vectors in each lane; `masks`: the bits of its number, from the lowest on."""
    for mask in masks:
        parts = [e.b.select(mask, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    (found,) = parts
    return found


def _shuffle64(e, table, index):
    low, high = (e.b.load(e.vector_pointer(e.offset(table, at), 16, 32), align=64) for at in (0, 64))
    return call_llvm(e.b, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, [low, index, high])


def planes(table):
    """Return words in the form that `entries64` reads: all lower bytes, then all upper ones."""
    return [x >> shift & 255 for shift in (0, 8) for x in table]


def entries64(e, table, size, index, upper, orders):
    """Return `entries` of the `planes` of a table for 64 indices.

    An index is given as its lower 8 bits, and masks of the others from the lowest on. Returns the words that each of
    `orders`, 32 numbers of indices, names.
    """
    masks, halves = [e.b.icmp_signed("<", index, e.const64(0)), *upper], []
    for half in (0, size):
        parts = [_shuffle128(e, e.offset(table, half + i), index) for i in range(0, size, 128)]
        halves.append(_chosen(e, parts, masks))
    lanes = [indices([x for i in order for x in (i, 64 + i)]) for order in orders]
    return [e.b.bitcast(e.b.shuffle_vector(*halves, order), WORDS) for order in lanes]


def _shuffle128(e, table, index):
    low, high = (e.b.load(e.vector_pointer(e.offset(table, at), 8, 64), align=64) for at in (0, 64))
    return call_llvm(e.b, "llvm.x86.avx512.vpermi2var.qi.512", llvm_type(i8x64), [low, index, high])


def multishift(e, offsets, v):
    """Return byte i of v (any 64-byte vector): 8 bits of its quadword from bit offsets[i] on, wrapping round.

    Eight offsets stand for all quadwords.
    """
    control = const_vector(i8x64, (list(offsets) * 8)[:64])
    return call_llvm(e.b, "llvm.x86.avx512.pmultishift.qb.512", llvm_type(i8x64), [control, as_bytes(e, v)])


def as_bytes(e, v):
    return e.b.bitcast(v, llvm_type(i8x64))


def coordinates(e, points, runs, levels, bits, bias):
    """Return 64 bytes, bias + level: coordinates of points (32 words).

    `runs`: 16 of four columns each, (lane, first bit).
    """
    codes = multishift(e, _offsets(runs, bits), e.pick(points, [lane for lane, _ in runs for _ in range(2)]))
    table = [bias + int(x) for x in levels] + [0] * ((1 << bits) - len(levels))
    return e.lookup(table * (64 >> bits), codes)


def signed(e, points, runs, levels, bits, bias, signs, sign_runs):
    """Return `coordinates`, negated where the column's bit of the sign bytes `signs` is set; `sign_runs` as `runs`.

    A quadword has the point and the sign byte of either half, so that level and sign come to lie side by side.
    """
    sign_words = e.b.bitcast(_wide(e, signs), WORDS)
    lanes = [x for (i, _), (byte, _) in zip(runs, sign_runs, strict=True) for x in (i, 32 + byte // 2)]
    quads = e.b.shuffle_vector(points, sign_words, indices(lanes))
    of_signs = [(byte, 16 + byte % 2 * 8 + start - bits) for byte, start in sign_runs]
    level, sign = (multishift(e, offsets, quads) for offsets in (_offsets(runs, bits), _offsets(of_signs, 1)))
    unused = [0] * ((1 << bits) - len(levels))
    table = [bias + sign * int(x) for sign in (1, -1) for x in [*levels, *unused]]
    (codes,) = e.with_upper([level], [sign], bits)
    return e.lookup(table * (32 >> bits), codes)


def _offsets(runs, step):
    """Return the offsets for `multishift`: what the columns of each run need of its half of a quadword."""
    return [(32 * (n % 2) + start + step * i) % 64 for n, (_, start) in enumerate(runs) for i in range(4)]


def _wide(e, v):
    """Return at least 64 bytes of v; further bytes are undefined."""
    return as_bytes(e, v) if v.type.count * v.type.element.width == 512 else e.pick(v, [*range(32), *[0] * 32])


def even_signs(e, v):
    """Return sign bytes of the low 7 bits of 64 bytes: the eighth sign makes the number of minus signs even."""
    low, high = (const_vector(i8x64, [x & 255 for x in EVEN_SIGNS[i : i + 64]]) for i in (0, 64))
    return call_llvm(e.b, "llvm.x86.avx512.vpermi2var.qi.512", llvm_type(i8x64), [low, as_bytes(e, v), high])


def negated(e, codes, bias, signs, starts):
    """Return 2*bias - code where the bit of the column is set: in each four bytes of `signs`, the one of `starts`."""
    minus = e.bits_set(signs, [start for start in starts for _ in range(4)])
    return e.b.select(minus, e.b.sub(e.const64(2 * bias & 255), codes), codes)


def seven_bit_signs(e, quads, first):
    """Return sign bytes (8 quadwords, bytes 0..3 of each) of four 7-bit codes.

    The codes start at bit `first` of each quadword.
    """
    return even_signs(e, multishift(e, [first + 7 * i for i in range(4)] + [0] * 4, quads))


def quads_at(e, address):
    """Load 8 quadwords."""
    return e.b.load(e.vector_pointer(address, 64, 8), align=1)


def bytes_as_words(e, address):
    """Load 32 bytes, zero-extended."""
    return e.b.zext(e.b.load(e.vector_pointer(address, 8, 32), align=1), WORDS)
