"""Grid points by shuffles (AVX-512 VBMI): no loads from tables that the index decides, which gathers would need.

A point of a grid is packed into 16 bits, 2 or 3 for the level of each coordinate. 32 indices, as many as 256 columns of
a 2-bit type have, become points by two-register word shuffles of 64 entries each and blends on the upper index bits.
A point then becomes bytes by `vpmultishiftqb` (any 8 bits of a quadword per byte) and a byte shuffle over the levels.
"""

import llvmlite.ir as ir

from ikcli.native.simd.vec import call_llvm, const_vector, i8x64, llvm_type

_I16 = ir.IntType(16)
WORDS = ir.VectorType(_I16, 32)
EVEN_SIGNS = [s | (bin(s).count("1") & 1) << 7 for s in range(128)]  # of 7-bit codes


def usable(e):
    """True if the target has the instructions."""
    return {"avx512vbmi", "avx512bw"} <= e.features()


def packed(points, levels, bits):
    """Points (rows of coordinates) as 16-bit words; coordinate i is the index of its level at bit `bits` * i."""
    index = {v: i for i, v in enumerate(levels)}
    return [sum(index[int(x)] << bits * i for i, x in enumerate(row)) for row in points]


def words(values):
    """A constant vector of 32 words."""
    return ir.Constant(WORDS, [ir.Constant(_I16, v) for v in values])


def entries(e, table, size, index, upper=()):
    """Entry `index` of `size` words at address `table`, for 32 words; `upper`: masks of the highest index bits."""
    parts = [_shuffle64(e, e.offset(table, 2 * i), index) for i in range(0, size, 64)]
    n_tested = (size // 64).bit_length() - 1 - len(upper)
    tests = [e.b.icmp_unsigned("!=", e.all_and(index, 64 << i), words([0] * 32)) for i in range(n_tested)]
    for mask in (*tests, *upper):
        parts = [e.b.select(mask, high, low) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _shuffle64(e, table, index):
    low, high = (e.b.load(e.vector_pointer(e.offset(table, at), 16, 32), align=64) for at in (0, 64))
    return call_llvm(e.b, "llvm.x86.avx512.vpermi2var.hi.512", WORDS, [low, index, high])


def multishift(e, offsets, v):
    """Byte i of v (any 64-byte vector): 8 bits of its quadword from bit offsets[i] on, wrapping round.

    Eight offsets stand for all quadwords.
    """
    control = const_vector(i8x64, (list(offsets) * 8)[:64])
    return call_llvm(e.b, "llvm.x86.avx512.pmultishift.qb.512", llvm_type(i8x64), [control, as_bytes(e, v)])


def as_bytes(e, v):
    return e.b.bitcast(v, llvm_type(i8x64))


def coordinates(e, points, lanes, levels, bits, bias, starts=None):
    """64 bytes, bias + level: the coordinates of points (32 words) of these lanes.

    8 lanes: all 8 coordinates of each; 16 lanes: four coordinates of each, the first of them at bit `starts`.
    """
    if len(lanes) == 8:
        lanes, starts = [x for x in lanes for _ in range(2)], [0, 4 * bits] * 8
    starts = starts or [0] * 16
    spread = e.pick(points, [x for x in lanes for _ in range(2)])
    offsets = [32 * (n % 2) + start + bits * i for n, start in enumerate(starts) for i in range(4)]
    table = [bias + int(x) for x in levels] + [0] * ((1 << bits) - len(levels))
    return e.lookup(table * (64 >> bits), multishift(e, offsets, spread))


def even_signs(e, v):
    """Sign bytes of the low 7 bits of 64 bytes: the eighth sign makes the number of minus signs even."""
    low, high = (const_vector(i8x64, [x & 255 for x in EVEN_SIGNS[i : i + 64]]) for i in (0, 64))
    return call_llvm(e.b, "llvm.x86.avx512.vpermi2var.qi.512", llvm_type(i8x64), [low, as_bytes(e, v), high])


def negated(e, codes, bias, signs, lanes, starts=None):
    """2*bias - code where the bit of the column is set; `lanes`: the sign bytes in `signs` of each 8 of the 64 columns.

    16 lanes: of each 4 columns, the first of them at bit `starts`. No lanes: `signs` has a byte per column.
    """
    starts = starts or [0] * len(lanes)
    per = 64 // len(starts)
    bytes_ = signs if signs.type.element.width == 8 else as_bytes(e, signs)
    spread = e.pick(bytes_, [x for x in lanes for _ in range(per)]) if lanes else bytes_
    step = 1 if lanes else 0
    bit = const_vector(i8x64, [x if x < 128 else -128 for s in starts for x in (1 << s + step * i for i in range(per))])
    minus = e.b.icmp_unsigned("!=", e.b.and_(spread, bit), e.const64(0))
    return e.b.select(minus, e.b.sub(e.const64(2 * bias & 255), codes), codes)


def seven_bit_signs(e, quads, first):
    """Sign bytes (8 quadwords, bytes 0..3 of each) of four 7-bit codes that start at bit `first` of each quadword."""
    return even_signs(e, multishift(e, [first + 7 * i for i in range(4)] + [0] * 4, quads))


def quads_at(e, address):
    """8 quadwords."""
    return e.b.load(e.vector_pointer(address, 64, 8), align=1)


def bytes_as_words(e, address):
    """32 bytes, zero-extended."""
    return e.b.zext(e.b.load(e.vector_pointer(address, 8, 32), align=1), WORDS)
