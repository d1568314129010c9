"""Lane operations: packed 6-bit scales of q4_K and q5_K, sums."""

import llvmlite.ir as ir

from ikcli.native.simd.vec import i32x16, llvm_type, pointer

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def packed_scales_6bit(builder, address):
    """Unpack the 12 bytes of q4_K/q5_K scales into i32x16: 8 scales, then 8 minima."""

    def word(i):
        at = builder.add(address, ir.Constant(_I64, 4 * i))
        return builder.load(pointer(builder, at, _I32), align=1)

    def c(x):
        return ir.Constant(_I32, x)

    def high(u):  # upper two bits of the last four values, shifted to bits 4..5
        return builder.shl(builder.and_(builder.lshr(u, c(6)), c(0x03030303)), c(4))

    u0, u1, u2 = word(0), word(1), word(2)
    parts = [
        builder.and_(u0, c(0x3F3F3F3F)),
        builder.or_(builder.and_(u2, c(0x0F0F0F0F)), high(u0)),
        builder.and_(u1, c(0x3F3F3F3F)),
        builder.or_(builder.and_(builder.lshr(u2, c(4)), c(0x0F0F0F0F)), high(u1)),
    ]
    v = ir.Constant(ir.VectorType(_I32, 4), ir.Undefined)
    for i, part in enumerate(parts):
        v = builder.insert_element(v, part, c(i))
    return builder.zext(builder.bitcast(v, ir.VectorType(_I8, 16)), llvm_type(i32x16))


def folded(builder, v, count):
    """Add the second half of the lanes to the first until `count` are left (a power of two)."""
    n = v.type.count
    while n > count:
        n //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, n), list(range(at, at + n))) for at in (0, n))
        v = builder.fadd(builder.shuffle_vector(v, v, low), builder.shuffle_vector(v, v, high))
    return v
