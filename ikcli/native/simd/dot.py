"""Integer dot products: the one operation whose best instruction differs between machines.

`dot_u8_i8(acc, u, s)`: every i32 lane gains the sum of four products u8*i8. AVX-512 VNNI and AVX-VNNI have it as one
instruction, AVX2 needs a few. ARM64 multiplies signed bytes (`arm64.py`). Elsewhere it is spelled in plain IR (exact
16-bit products, pairwise sums), which LLVM maps to the available instructions. An instruction that the target lacks
would abort the process, so the choice is made from `isa.current()` at compile time.
"""

import functools

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native import isa
from ikcli.native.simd import arm64
from ikcli.native.simd.vec import (
    BFloat,
    call_llvm,
    f32x16,
    i8x64,
    i32x8,
    i32x16,
    llvm_type,
    magnitude,
    pointer,
    with_sign,
)

_I16, _I32 = ir.IntType(16), ir.IntType(32)
SUMS_OF_TWO = ir.VectorType(_I16, 16)


def emit_products(builder, u, s):
    """Return the sums of each two products of unsigned and signed bytes (32), in SUMS_OF_TWO, with AVX2."""
    return call_llvm(builder, "llvm.x86.avx2.pmadd.ub.sw", SUMS_OF_TWO, [u, s])


def emit_sums_of_two(builder, v, factors=None):
    """Return i32x8: sums of each two lanes of 16 bits, times factors, with AVX2."""
    factors = factors or ir.Constant(SUMS_OF_TWO, [1] * 16)
    return call_llvm(builder, "llvm.x86.avx2.pmadd.wd", llvm_type(i32x8), [v, factors])


def emit_upper_products(builder, x, y):
    """Return i16x32: the rounded upper halves of twice the products of 16-bit integers, with AVX2 or AVX-512."""
    if "avx512bw" in isa.current().features:
        return call_llvm(builder, "llvm.x86.avx512.pmul.hr.sw.512", x.type, [x, y])
    return _in_halves(builder, lambda *parts: call_llvm(builder, "llvm.x86.avx2.pmul.hr.sw", SUMS_OF_TWO, parts), x, y)


def _portable(builder, acc, u, s, n):
    """Multiply exactly on any target: extend to i16 (products fit: 255*128 < 2^15), add groups of four in i32."""
    wide = ir.VectorType(_I32, 4 * n)
    prod = builder.mul(builder.zext(u, ir.VectorType(_I16, 4 * n)), builder.sext(s, ir.VectorType(_I16, 4 * n)))
    prod = builder.sext(prod, wide)
    total = acc
    for k in range(4):
        pick = ir.Constant(ir.VectorType(_I32, n), [4 * i + k for i in range(n)])
        total = builder.add(total, builder.shuffle_vector(prod, prod, pick))
    return total


def _even_and_odd(builder, acc, u, s):
    """Multiply 8 lanes on AVX2: exact 16-bit sums of two products, separately of even and of odd bytes."""
    pairs = ir.VectorType(_I16, 16)
    eight, low = (ir.Constant(pairs, [c] * 16) for c in (8, 255))
    u, s = builder.bitcast(u, pairs), builder.bitcast(s, pairs)
    even = builder.and_(u, low), builder.ashr(builder.shl(s, eight), eight)
    odd = builder.lshr(u, eight), builder.ashr(s, eight)
    for x, y in (even, odd):
        acc = builder.add(acc, emit_sums_of_two(builder, x, y))
    return acc


def _saturating(builder, acc, us, ss):
    """Multiply 8 lanes on AVX2 where no sum of two products of these pairs, nor the sum of those, leaves 16 bits."""
    sums = [emit_products(builder, u, s) for u, s in zip(us, ss, strict=True)]
    return builder.add(acc, emit_sums_of_two(builder, functools.reduce(builder.add, sums)))


def emit_dot(builder, acc, u, s, n, most=255):
    """Return acc + dot products of groups of four, n lanes; `most`: the largest u."""
    features = isa.current().features
    t = acc.type
    if isa.current().is_arm64:
        return arm64.unsigned_dot(builder, acc, u, s) if most > 127 else arm64.signed_dot(builder, acc, u, s)
    if n == 16 and "avx512vnni" in features:
        args = [acc, builder.bitcast(u, t), builder.bitcast(s, t)]
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", t, args)
    if n == 8 and ("avxvnni" in features or {"avx512vnni", "avx512vl"} <= features):
        args = [acc, builder.bitcast(u, t), builder.bitcast(s, t)]
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.256", t, args)
    if n == 16 and "avx2" in features:
        return _in_halves(builder, lambda *parts: emit_dot(builder, *parts, 8, most), acc, u, s)
    if n == 8 and "avx2" in features:
        return _saturating(builder, acc, [u], [s]) if most < 128 else _even_and_odd(builder, acc, u, s)
    return _portable(builder, acc, u, s, n)


def most_addends(most):
    """Return how many vectors `emit_dots` takes at once: several where their sums of two products still fit 16 bits."""
    return max(1, 32767 // (2 * 127 * most)) if isa.current().plain_avx2 else 1


def emit_dots(builder, acc, us, ss, most):
    """Return acc (i32x16) + dot products of i8x64 with up to `most_addends` vectors of bytes; no s is -128."""
    if len(us) == 1:
        return emit_dot(builder, acc, us[0], ss[0], 16, most)

    def half(acc, *vectors):
        return _saturating(builder, acc, vectors[: len(us)], vectors[len(us) :])

    return _in_halves(builder, half, acc, *us, *ss)


def emit_signed_dot(builder, acc, w, s):
    """Return acc + dot products of i8x64 on plain AVX2 or ARM64; s is not -128."""
    if isa.current().is_arm64:
        return arm64.signed_dot(builder, acc, w, s)

    def half(acc, w, s):
        return _saturating(builder, acc, [magnitude(builder, w)], [with_sign(builder, s, w)])

    return _in_halves(builder, half, acc, w, s)


def emit_halves_added(builder, acc, us, ss, most):
    """Return acc (i32x8) + dot products of the lower and of the upper halves of vectors of bytes, on plain AVX2.

    `most`: the largest u; 128 or more: u is signed. No s is -128. On ARM64 acc is i32x8, or i32x4 for quarters.
    """
    if isa.current().is_arm64:
        width = 4 * acc.type.count
        for both in zip(us, ss, strict=True):
            for first in range(0, 64, width):
                lanes = ir.Constant(ir.VectorType(_I32, width), list(range(first, first + width)))
                acc = arm64.signed_dot(builder, acc, *(builder.shuffle_vector(x, x, lanes) for x in both))
        return acc
    halves = [[_half(builder, v, upper) for v in both] for both in zip(us, ss, strict=True) for upper in (0, 1)]
    if most >= 128:
        halves = [[magnitude(builder, u), with_sign(builder, s, u)] for u, s in halves]
    n = most_addends(most)
    for first in range(0, len(halves), n):
        acc = _saturating(builder, acc, *zip(*halves[first : first + n], strict=True))
    return acc


def _half(builder, v, upper):
    count = v.type.count // 2
    pick = range(upper * count, (upper + 1) * count)
    return builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(_I32, count), list(pick)))


def _in_halves(builder, function, *args):
    """Apply a function to the lower and to the upper halves of vectors."""
    low, high = (function(*(_half(builder, v, upper) for v in args)) for upper in (0, 1))
    count = 2 * low.type.count
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, count), list(range(count))))


def _dot_pairs(builder, acc, x, y):
    """Return acc (i32x8) + products of pairs of 16-bit integers with AVX2."""
    if "avxvnni" in isa.current().features:
        return call_llvm(builder, "llvm.x86.avx512.vpdpwssd.256", acc.type, [acc, x, y])
    return builder.add(acc, emit_sums_of_two(builder, *(builder.bitcast(v, SUMS_OF_TWO) for v in (x, y))))


def emit_dot_bf16(builder, acc, x, y):
    """Return acc (f32x16) + products of pairs of bfloat16 (i32x16: even column in the lower half).

    Needs avx512bf16, which flushes denormal numbers to zero, or bf16 of ARM64, which rounds the sum of two products
    before it adds it.
    """
    if isa.current().is_arm64:
        return arm64.bf16_dot(builder, acc, x, y)
    pairs = ir.VectorType(BFloat(), 2 * x.type.count) if llvm.llvm_version_info[0] >= 16 else x.type
    args = [acc, builder.bitcast(x, pairs), builder.bitcast(y, pairs)]
    return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", acc.type, args)


def emit_dot_i16(builder, acc, x, y):
    """Return acc (i32x16) + products of pairs of 16-bit integers (i32x16: even column in the lower half)."""
    if "avx512vnni" in isa.current().features:
        return call_llvm(builder, "llvm.x86.avx512.vpdpwssd.512", acc.type, [acc, x, y])
    if "avx2" in isa.current().features:
        return _in_halves(builder, lambda *parts: _dot_pairs(builder, *parts), acc, x, y)
    shift = ir.Constant(x.type, [16] * x.type.count)
    for part in (lambda v: builder.ashr(builder.shl(v, shift), shift), lambda v: builder.ashr(v, shift)):
        acc = builder.add(acc, builder.mul(part(x), part(y)))
    return acc


@intrinsic
def dot_bf16(typingctx, acc, x, y):
    """Return acc + products of 16 pairs of bfloat16."""

    def codegen(context, builder, sig, args):
        return emit_dot_bf16(builder, *args)

    return f32x16(f32x16, i32x16, i32x16), codegen


@intrinsic
def store_i16x32(typingctx, ptr, low, high):
    """Store 32 integers as 16 bits each, truncated."""

    def codegen(context, builder, sig, args):
        ptr, *parts = args
        half = ir.VectorType(_I16, 16)
        low, high = (builder.trunc(x, half) for x in parts)
        x = builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 32), list(range(32))))
        builder.store(x, pointer(builder, ptr, x.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, i32x16, i32x16), codegen


@intrinsic
def dot_u8_i8(typingctx, acc, u, s):
    """Return acc + the sum of four products u8*i8 per lane; see the module."""

    def codegen(context, builder, sig, args):
        return emit_dot(builder, *args, 16)

    return i32x16(i32x16, i8x64, i8x64), codegen


__all__ = [
    "SUMS_OF_TWO",
    "dot_bf16",
    "dot_u8_i8",
    "emit_dot",
    "emit_dot_bf16",
    "emit_dot_i16",
    "emit_dots",
    "emit_products",
    "emit_signed_dot",
    "emit_sums_of_two",
    "emit_upper_products",
    "most_addends",
    "store_i16x32",
]
