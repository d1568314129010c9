# mypy: ignore-errors
"""Vector intrinsics of the IQ*_K encoders: counts by comparison and lookups in short tables.

Tables lie in memory, one 32-bit entry each. AVX-512 looks up 32 of them in one instruction, AVX2 eight; elsewhere every
lane is loaded separately.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native import isa
from ikcli.native.simd.vec import call_llvm, const_vector, f32x16, i32x8, i32x16, llvm_type, pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def count_reached(typingctx, k, v, limit):
    """Return k + 1 where v >= limit, else k."""

    def codegen(context, builder, sig, args):
        reached = builder.zext(builder.fcmp_ordered(">=", args[1], args[2]), llvm_type(i32x16))
        return builder.add(args[0], reached)

    return i32x16(i32x16, f32x16, f32x16), codegen


@intrinsic
def vfloor(typingctx, a):
    def codegen(context, builder, sig, args):
        return call_llvm(builder, "llvm.floor.v16f32", llvm_type(f32x16), list(args))

    return f32x16(f32x16), codegen


def _permute(builder, address, index, n):
    """Return entry `index` of n = 16 or 32, by AVX-512."""
    v = llvm_type(f32x16)
    low = builder.load(pointer(builder, address, v), align=1)
    if n == 16:
        return call_llvm(builder, "llvm.x86.avx512.permvar.sf.512", v, [low, index])
    at = builder.add(address, ir.Constant(_I64, 64))
    high = builder.load(pointer(builder, at, v), align=1)
    return call_llvm(builder, "llvm.x86.avx512.vpermi2var.ps.512", v, [low, index, high])


def _lookup(builder, address, index, n):
    if n <= 32:
        return _permute(builder, address, index, n)
    low = _lookup(builder, address, index, n // 2)
    high = _lookup(builder, builder.add(address, ir.Constant(_I64, 2 * n)), index, n // 2)
    in_low = builder.icmp_signed("<", builder.and_(index, const_vector(i32x16, [n - 1] * 16)),
                                 const_vector(i32x16, [n // 2] * 16))  # fmt: skip
    return builder.select(in_low, low, high)


def _lane_loads(builder, address, index):
    out = ir.Constant(llvm_type(f32x16), ir.Undefined)
    for i in range(16):
        lane = ir.Constant(_I32, i)
        offset = builder.shl(builder.zext(builder.extract_element(index, lane), _I64), ir.Constant(_I64, 2))
        x = builder.load(pointer(builder, builder.add(address, offset), ir.FloatType()), align=4)
        out = builder.insert_element(out, x, lane)
    return out


def _half(builder, v, first):
    return builder.shuffle_vector(v, v, ir.Constant(ir.VectorType(_I32, 8), list(range(first, first + 8))))


def _lookup_avx2(builder, address, index, n):
    """Look up eight lanes: permutations of eight entries each, joined by the upper bits of the index."""
    v = ir.VectorType(ir.FloatType(), 8)
    if n == 8:
        return call_llvm(
            builder, "llvm.x86.avx2.permps", v, [builder.load(pointer(builder, address, v), align=1), index]
        )
    low = _lookup_avx2(builder, address, index, n // 2)
    high = _lookup_avx2(builder, builder.add(address, ir.Constant(_I64, 2 * n)), index, n // 2)
    bit = builder.and_(index, const_vector(i32x8, [n // 2] * 8))
    return builder.select(builder.icmp_signed("==", bit, const_vector(i32x8, [0] * 8)), low, high)


def _find(builder, address, index, n):
    features = isa.current().features
    if "avx512f" in features:
        return _lookup(builder, address, index, n)
    if "avx2" in features and n <= 64:
        low = _lookup_avx2(builder, address, _half(builder, index, 0), n)
        high = _lookup_avx2(builder, address, _half(builder, index, 8), n)
        return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, 16), list(range(16))))
    return _lane_loads(builder, address, index)


def _make_lookup(n, result):
    @intrinsic
    def lookup(typingctx, address, index):
        def codegen(context, builder, sig, args):
            return builder.bitcast(_find(builder, *args, n), llvm_type(result))

        return result(types.intp, i32x16), codegen

    return lookup


lookup_f32 = {n: _make_lookup(n, f32x16) for n in (16, 32, 64, 128)}
lookup_i32 = {n: _make_lookup(n, i32x16) for n in (16, 32, 64, 128)}


def make_nearest_pair(pairs):
    """Return an intrinsic (v0, w0, v1, w1) -> index of the pair with the least w0 (v0 - a)^2 + w1 (v1 - b)^2.

    There are up to 32 pairs. The index replaces the lowest five bits of the error, so that one minimum finds both.
    """

    @intrinsic
    def nearest_pair(typingctx, v0, w0, v1, w1):
        def codegen(context, builder, sig, args):
            def errors(v, w, values):
                found = {}
                for value in values:
                    r = builder.fsub(v, const_vector(f32x16, [value] * 16))
                    found[value] = builder.fmul(builder.fmul(r, r), w)
                return found

            first = errors(args[0], args[1], sorted({a for a, _ in pairs}))
            second = errors(args[2], args[3], sorted({b for _, b in pairs}))
            best = None
            for k, (a, b) in enumerate(pairs):
                bits = builder.bitcast(builder.fadd(first[a], second[b]), llvm_type(i32x16))
                bits = builder.or_(builder.and_(bits, const_vector(i32x16, [-32] * 16)), const_vector(i32x16, [k] * 16))
                if best is None:
                    best = bits
                else:
                    best = builder.select(builder.icmp_signed("<", bits, best), bits, best)
            return builder.and_(best, const_vector(i32x16, [31] * 16))

        return i32x16(f32x16, f32x16, f32x16, f32x16), codegen

    return nearest_pair
