# mypy: ignore-errors
"""Vector intrinsics of the grid quants: minimum of two vectors, position of a value."""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native.simd.vec import call_llvm, f32x16

_I64 = ir.IntType(64)


@intrinsic
def lesser(typingctx, a, b):
    """Return a where a < b, else b: one instruction, since NaN does not matter here."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[0], args[1])

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def first_equal(typingctx, a, b):
    """Return the number of the first lane where a == b (16 without one)."""

    def codegen(context, builder, sig, args):
        bits = builder.bitcast(builder.fcmp_ordered("==", args[0], args[1]), ir.IntType(16))
        guarded = builder.or_(builder.zext(bits, _I64), ir.Constant(_I64, 1 << 16))
        return call_llvm(builder, "llvm.cttz.i64", _I64, [guarded, ir.Constant(ir.IntType(1), 1)])

    return types.int64(f32x16, f32x16), codegen
