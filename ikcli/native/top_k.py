"""The k largest of many numbers, best first: a kernel for samplers.

Groups of 64 numbers are compared with the k-th best so far by four instructions; what passes is put in its place.
"""

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.native.simd.vec import f32x16, ld_f32, ld_i64, llvm_type, pointer, splat_value, st_f32, st_i64

_GROUP = 64


@intrinsic
def _any_above(typingctx, address, bound):
    """1 if one of 64 floats is above the bound or NaN."""

    def codegen(context, builder, sig, args):
        address, bound = args
        t = llvm_type(f32x16)
        bounds = splat_value(builder, f32x16, bound)
        found = None
        for i in range(0, 4 * _GROUP, 64):
            at = builder.add(address, ir.Constant(address.type, i))
            x = builder.load(pointer(builder, at, t), align=1)
            above = builder.fcmp_unordered(">", x, bounds)
            found = above if found is None else builder.or_(found, above)
        bits = builder.bitcast(found, ir.IntType(16))
        any_ = builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))
        return builder.zext(any_, ir.IntType(64))

    return types.int64(types.intp, types.float32), codegen


def make_top_k():
    """top_k(numbers f32[n], n, k, ids i64[k], values f32[k]) -> how many were found; -1 if there is a NaN.

    -inf is never found; equal numbers keep their order.
    """

    def top_k(numbers, n, k, ids, values):
        found = np.int64(0)
        bound = np.float32(-np.inf)
        first = np.int64(0)
        while first < n:
            stop = min(first + _GROUP, n)
            if stop - first == _GROUP and _any_above(numbers + 4 * first, bound) == 0:
                first = stop
                continue
            for i in range(first, stop):
                x = ld_f32(numbers + 4 * i)
                if x != x:
                    return np.int64(-1)
                if not x > bound:
                    continue
                at = min(found, k - 1)
                while at > 0 and ld_f32(values + 4 * (at - 1)) < x:
                    st_f32(values + 4 * at, ld_f32(values + 4 * (at - 1)))
                    st_i64(ids + 8 * at, ld_i64(ids + 8 * (at - 1)))
                    at -= 1
                st_f32(values + 4 * at, x)
                st_i64(ids + 8 * at, i)
                found = min(found + 1, k)
                if found == k:
                    bound = ld_f32(values + 4 * (k - 1))
            first = stop
        return found

    return top_k, 5, True
