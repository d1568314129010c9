"""Lane-level intrinsics used by the format kernels: extracting, spreading and scattering."""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.simd.vec import (
    const_vector,
    f32x8,
    f32x16,
    i8x32,
    i32x8,
    i32x16,
    llvm_type,
    pointer,
)

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _indices(values):
    return ir.Constant(ir.VectorType(_I32, len(values)), list(values))


@intrinsic
def first_i32x8(typingctx, ptr):
    """The int32 at ptr in lane 0, zeros elsewhere (one load: a start value for a dot product)."""

    def codegen(context, builder, sig, args):
        x = builder.load(pointer(builder, args[0], _I32), align=1)
        return builder.insert_element(const_vector(i32x8, [0] * 8), x, ir.Constant(_I32, 0))

    return i32x8(types.intp), codegen


@intrinsic
def scatter_dwords(typingctx, ptr, v):
    """The eight dwords of i8x32 to ptr, ptr+64, ... (one row of a 16-row tile)."""

    def codegen(context, builder, sig, args):
        words = builder.bitcast(args[1], llvm_type(i32x8))
        for i in range(8):
            x = builder.extract_element(words, ir.Constant(_I32, i))
            at = builder.add(args[0], ir.Constant(_I64, 64 * i))
            builder.store(x, pointer(builder, at, _I32), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, i8x32), codegen


@intrinsic
def splat_lane(typingctx, v, i):
    """Lane i (0..7) of f32x8 in all lanes."""

    def codegen(context, builder, sig, args):
        x = builder.extract_element(args[0], builder.trunc(args[1], _I32))
        t = llvm_type(f32x8)
        one = builder.insert_element(ir.Constant(t, ir.Undefined), x, ir.Constant(_I32, 0))
        return builder.shuffle_vector(one, one, _indices([0] * 8))

    return f32x8(f32x8, types.int64), codegen


@intrinsic
def lane_scalar(typingctx, v, i):
    """Lane i of f32x16."""

    def codegen(context, builder, sig, args):
        return builder.extract_element(args[0], builder.trunc(args[1], _I32))

    return types.float32(f32x16, types.int64), codegen


@intrinsic
def spread_scales(typingctx, v, g):
    """f32x8: lane 2g of f32x16 in lanes 0..3, lane 2g+1 in lanes 4..7."""

    def codegen(context, builder, sig, args):
        g2 = builder.shl(builder.trunc(args[1], _I32), ir.Constant(_I32, 1))
        lo = builder.extract_element(args[0], g2)
        hi = builder.extract_element(args[0], builder.add(g2, ir.Constant(_I32, 1)))
        t = llvm_type(f32x8)
        v = builder.insert_element(ir.Constant(t, ir.Undefined), lo, ir.Constant(_I32, 0))
        v = builder.insert_element(v, hi, ir.Constant(_I32, 1))
        return builder.shuffle_vector(v, v, _indices([0] * 4 + [1] * 4))

    return f32x8(f32x16, types.int64), codegen


def _make_half(lanes):
    @intrinsic
    def half(typingctx, v):
        def codegen(context, builder, sig, args):
            return builder.shuffle_vector(args[0], args[0], _indices(lanes))

        return f32x8(f32x16), codegen

    return half


low_half_f32x16, high_half_f32x16 = _make_half(range(8)), _make_half(range(8, 16))


def packed_scales_6bit(builder, address):
    """The 12 bytes of q4_K/q5_K scales as i32x16: 8 scales, then 8 minima."""

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


@intrinsic
def bits_i8x32(typingctx, ptr):
    """The 32 bits at ptr as bytes 0 or 1."""

    def codegen(context, builder, sig, args):
        bits = builder.load(pointer(builder, args[0], _I32), align=1)
        return builder.zext(builder.bitcast(bits, ir.VectorType(ir.IntType(1), 32)), llvm_type(i8x32))

    return i8x32(types.intp), codegen
