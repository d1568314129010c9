"""Integer dot products: the one operation whose best instruction differs between machines.

`dot_u8_i8(acc, u, s)`: every i32 lane gains the sum of four products u8*i8. AVX-512 VNNI and AVX-VNNI have it as one
instruction; elsewhere it is spelled in plain IR (exact 16-bit products, pairwise sums), which LLVM maps to what there
is. An instruction the target lacks would abort the process, so the choice is made from `isa.current()` at compile time.
"""

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native import isa
from ikcli.native.simd.vec import call_llvm, f32x16, i8x32, i8x64, i32x8, i32x16, llvm_type, pointer

_I16, _I32 = ir.IntType(16), ir.IntType(32)


def _portable(builder, acc, u, s, n):
    """Exact in any target: zero/sign extend to i16 (products fit: 255*128 < 2^15), add groups of four in i32."""
    wide = ir.VectorType(_I32, 4 * n)
    prod = builder.mul(builder.zext(u, ir.VectorType(_I16, 4 * n)), builder.sext(s, ir.VectorType(_I16, 4 * n)))
    prod = builder.sext(prod, wide)
    total = acc
    for k in range(4):
        pick = ir.Constant(ir.VectorType(_I32, n), [4 * i + k for i in range(n)])
        total = builder.add(total, builder.shuffle_vector(prod, prod, pick))
    return total


def emit_dot(builder, acc, u, s, n):
    """acc + groups-of-four dot products, n lanes."""
    features = isa.current().features
    t = acc.type
    if n == 16 and "avx512vnni" in features:
        args = [acc, builder.bitcast(u, t), builder.bitcast(s, t)]
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", t, args)
    if n == 8 and ("avxvnni" in features or {"avx512vnni", "avx512vl"} <= features):
        args = [acc, builder.bitcast(u, t), builder.bitcast(s, t)]
        return call_llvm(builder, "llvm.x86.avx512.vpdpbusd.256", t, args)
    if n == 16 and "avxvnni" in features:
        return _in_halves(builder, acc, u, s)
    return _portable(builder, acc, u, s, n)


def _in_halves(builder, acc, u, s):
    """16 lanes as two times 8."""

    def half(v, first):
        count = v.type.count // 2
        return builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(_I32, count), list(range(first, first + count))))

    low = emit_dot(builder, half(acc, 0), half(u, 0), half(s, 0), 8)
    high = emit_dot(builder, half(acc, 8), half(u, 32), half(s, 32), 8)
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 16), list(range(16))))


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat)

    def __hash__(self):
        return hash(_BFloat)


def emit_dot_bf16(builder, acc, x, y):
    """acc (f32x16) + products of pairs of bfloat16 (i32x16: even column in the lower half).

    The instruction (avx512bf16) takes denormal numbers as zero.
    """
    if "avx512bf16" in isa.current().features:
        pairs = ir.VectorType(_BFloat(), 2 * x.type.count) if llvm.llvm_version_info[0] >= 16 else x.type
        args = [acc, builder.bitcast(x, pairs), builder.bitcast(y, pairs)]
        return call_llvm(builder, "llvm.x86.avx512bf16.dpbf16ps.512", acc.type, args)
    upper, shift = (ir.Constant(x.type, [c] * x.type.count) for c in (-65536, 16))
    for part in (lambda v: builder.shl(v, shift), lambda v: builder.and_(v, upper)):
        a, b = (builder.bitcast(part(v), acc.type) for v in (x, y))
        acc = call_llvm(builder, f"llvm.fma.v{acc.type.count}f32", acc.type, [a, b, acc])
    return acc


@intrinsic
def dot_bf16(typingctx, acc, x, y):
    """acc + products of 16 pairs of bfloat16."""

    def codegen(context, builder, sig, args):
        return emit_dot_bf16(builder, *args)

    return f32x16(f32x16, i32x16, i32x16), codegen


@intrinsic
def bf16_pairs(typingctx, x, y):
    """32 f32 as bfloat16, rounded to nearest even: those of x, then those of y. Needs avx512bf16."""

    def codegen(context, builder, sig, args):
        t = ir.VectorType(_BFloat() if llvm.llvm_version_info[0] >= 16 else _I16, 32)
        halves = call_llvm(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", t, [args[1], args[0]])
        return builder.bitcast(halves, llvm_type(i32x16))

    return i32x16(f32x16, f32x16), codegen


def _make_dot(acc_type, byte_type):
    @intrinsic
    def dot(typingctx, acc, u, s):
        def codegen(context, builder, sig, args):
            return emit_dot(builder, *args, acc_type.n)

        return acc_type(acc_type, byte_type, byte_type), codegen

    return dot


dot_u8_i8 = _make_dot(i32x16, i8x64)
dot_u8_i8_half = _make_dot(i32x8, i8x32)


@intrinsic
def dot_u8_bcast(typingctx, acc, u, ptr):
    """dot_u8_i8 with the four signed bytes at ptr repeated in every lane (one instruction with VNNI)."""

    def codegen(context, builder, sig, args):
        word = builder.load(pointer(builder, args[2], _I32), align=1)
        vt = llvm_type(i32x16)
        undef = ir.Constant(vt, ir.Undefined)
        v = builder.insert_element(undef, word, ir.Constant(_I32, 0))
        v = builder.shuffle_vector(v, undef, ir.Constant(ir.VectorType(_I32, 16), [0] * 16))
        return emit_dot(builder, args[0], args[1], builder.bitcast(v, llvm_type(i8x64)), 16)

    return i32x16(i32x16, i8x64, types.intp), codegen


__all__ = ["bf16_pairs", "dot_bf16", "dot_u8_bcast", "dot_u8_i8", "dot_u8_i8_half", "emit_dot", "emit_dot_bf16"]
