"""Vector intrinsics of the trellis encoders: least lane, lowest set bit."""
# mypy: ignore-errors

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native.simd.vec import call_llvm, f32x16

_I1, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)


def _count_zeros(builder, x):
    return call_llvm(builder, "llvm.cttz.i64", _I64, [x, ir.Constant(_I1, 0)])


def _least(builder, value):
    """Return the least of 16 lanes, in all lanes."""
    for step in (8, 4, 2, 1):
        order = ir.Constant(ir.VectorType(_I32, 16), [i ^ step for i in range(16)])
        other = builder.shuffle_vector(value, value, order)
        value = builder.select(builder.fcmp_ordered("<", other, value), other, value)
    return value


@intrinsic
def first_bit(typingctx, x):
    """Return the position of the lowest bit set."""
    return types.int64(types.int64), lambda context, builder, sig, args: _count_zeros(builder, args[0])


@intrinsic
def reduce_least(typingctx, v):
    """Return the least lane of f32x16."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(_least(builder, args[0]), ir.Constant(_I32, 0))

    return types.float32(f32x16), codegen


@intrinsic
def lane_of_least(typingctx, v):
    """Return the number of the first lane that holds the least value of f32x16."""

    def codegen(context, builder, sig, args):
        equal = builder.fcmp_ordered("==", _least(builder, args[0]), args[0])
        zero = ir.Constant(ir.VectorType(_I1, 16), [0] * 16)
        mask = builder.bitcast(builder.icmp_unsigned("!=", equal, zero), ir.IntType(16))
        guarded = builder.or_(builder.zext(mask, _I64), ir.Constant(_I64, 1 << 15))
        return _count_zeros(builder, guarded)

    return types.int64(f32x16), codegen
