"""Instructions of ARM64 (NEON) that plain LLVM IR does not name, on vectors of any number of 16 bytes.

`signed_dot` takes one instruction per 16 bytes with dotprod, four without. With i8mm, `matrix_product` multiplies twice
as many bytes. Look-ups in up to 64 bytes are one instruction per 16 bytes everywhere.
"""

import llvmlite.ir as ir

from ikcli.native import isa
from ikcli.native.simd.vec import BFloat, call_llvm

_I32 = ir.IntType(32)
BYTES, SHORTS, WORDS = (ir.VectorType(ir.IntType(bits), 128 // bits) for bits in (8, 16, 32))
_FLOATS = ir.VectorType(ir.FloatType(), 4)


def _lanes(values):
    return ir.Constant(ir.VectorType(_I32, len(values)), list(values))


def sixteens(builder, v):
    """Split a vector into parts of 16 bytes."""
    per = 128 // _bits(v.type.element)
    if v.type.count == per:
        return [v]
    return [builder.shuffle_vector(v, v, _lanes(range(i, i + per))) for i in range(0, v.type.count, per)]


def joined(builder, parts):
    """Join equally long vectors, a power of two of them."""
    while len(parts) > 1:
        lanes = _lanes(range(2 * parts[0].type.count))
        parts = [builder.shuffle_vector(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _bits(element):
    return 32 if isinstance(element, ir.FloatType) else element.width


def _by_sixteens(builder, function, *args):
    parts = [sixteens(builder, v) for v in args]
    return joined(builder, [function(*part) for part in zip(*parts, strict=True)])


def signed_dot(builder, acc, w, s):
    """Return acc + the sums of four products of signed bytes; without dotprod, not both are -128."""

    def one(acc, w, s):
        if "dotprod" in isa.current().features:
            return call_llvm(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", WORDS, [acc, w, s])
        half = [builder.shuffle_vector(v, v, _lanes(range(i, i + 8))) for i in (0, 8) for v in (w, s)]
        wide = [builder.sext(v, SHORTS) for v in half]
        products = [builder.mul(*wide[:2]), builder.mul(*wide[2:])]
        pairs = call_llvm(builder, "llvm.aarch64.neon.addp.v8i16", SHORTS, products)
        return builder.add(acc, call_llvm(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", WORDS, [pairs]))

    return _by_sixteens(builder, one, acc, w, s)


def unsigned_dot(builder, acc, u, s):
    """Return acc + the sums of four products of unsigned u and signed s."""

    def one(acc, u, s):
        if "i8mm" in isa.current().features:
            return call_llvm(builder, "llvm.aarch64.neon.usdot.v4i32.v16i8", WORDS, [acc, u, s])
        low, high = (ir.Constant(BYTES, [x] * 16) for x in (127, 1))
        # u = (u & 127) + 64 * upper + 64 * upper: products of signed bytes that stay within 16 bits
        upper = builder.and_(s, builder.ashr(u, ir.Constant(BYTES, [7] * 16)))
        acc = signed_dot(builder, acc, builder.and_(u, low), s)
        sums = signed_dot(builder, ir.Constant(WORDS, None), high, upper)
        return builder.add(acc, builder.shl(sums, ir.Constant(WORDS, [7] * 4)))

    return _by_sixteens(builder, one, acc, u, s)


def matrix_product(builder, acc, x, y):
    """Return acc + the four sums of eight products of two rows of signed bytes by two others; needs i8mm.

    Lanes: row 0 of x by rows 0 and 1 of y, then row 1.
    """
    return call_llvm(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", WORDS, [acc, x, y])


def pair_sums(builder, x, y):
    """Return sums of adjacent lanes (i32x4): two of x, two of y."""
    return call_llvm(builder, "llvm.aarch64.neon.addp.v4i32", WORDS, [x, y])


def bf16_dot(builder, acc, x, y):
    """Return acc (f32) + the sums of two products of bfloat16, given as i32; needs bf16."""

    def one(acc, x, y):
        pairs = [builder.bitcast(v, ir.VectorType(BFloat(), 8)) for v in (x, y)]
        return call_llvm(builder, "llvm.aarch64.neon.bfdot.v4f32.v8bf16", _FLOATS, [acc, *pairs])

    return _by_sixteens(builder, one, acc, x, y)


def lookup(builder, table, codes):
    """Look up bytes in a table of 16, 32 or 64 byte constants; codes beyond it give 0."""
    parts = [ir.Constant(BYTES, [x & 255 for x in table[i : i + 16]]) for i in range(0, len(table), 16)]
    name = f"llvm.aarch64.neon.tbl{len(parts)}.v16i8"
    return _by_sixteens(builder, lambda v: call_llvm(builder, name, BYTES, [*parts, v]), codes)
