"""Sums over lanes."""

import llvmlite.ir as ir

_I32 = ir.IntType(32)


def folded(builder, v, count):
    """Add the second half of the lanes to the first until `count` are left (a power of two)."""
    n = v.type.count
    while n > count:
        n //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, n), list(range(at, at + n))) for at in (0, n))
        v = builder.fadd(builder.shuffle_vector(v, v, low), builder.shuffle_vector(v, v, high))
    return v
