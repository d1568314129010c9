"""Intrinsics of 32-element quantized blocks and of the Hadamard transform: bits, table look-up, butterflies.

Sixteen codes are an i32x16. Everything is plain LLVM IR but for the 16-entry look-up, which has an instruction on x86
and on ARM64.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native import isa
from ikcli.native.simd import arm64
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    f32x16,
    i8x16,
    i32x16,
    llvm_type,
    magnitude,
    pointer,
    splat_value,
)

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_BYTES16 = llvm_type(i8x16)


def _ints(values):
    return ir.Constant(ir.VectorType(_I32, len(values)), list(values))


def _c(builder, x):
    return const_vector(i32x16, [x] * 16)


@intrinsic
def bits_to_lanes(typingctx, bits, value):
    """Return `value` (a constant) in every lane whose bit of the low 16 bits is set, else 0 (i32x16)."""
    if not isinstance(value, types.IntegerLiteral):
        return None
    x = value.literal_value

    def codegen(context, builder, sig, args):
        if isa.current().is_arm64:  # no mask registers
            places = const_vector(i32x16, [1 << i for i in range(16)])
            on = builder.and_(splat_value(builder, i32x16, builder.trunc(args[0], _I32)), places)
            return builder.select(builder.icmp_signed("!=", on, _c(builder, 0)), _c(builder, x), _c(builder, 0))
        mask = builder.bitcast(builder.trunc(args[0], _I16), ir.VectorType(ir.IntType(1), 16))
        return builder.select(mask, _c(builder, x), _c(builder, 0))

    return i32x16(types.int64, value), codegen


@intrinsic
def lanes_to_bits(typingctx, codes, bit):
    """Return the lanes of an i32x16 that have the bits of `bit` (a constant) set, as the low 16 bits."""
    if not isinstance(bit, types.IntegerLiteral):
        return None
    x = bit.literal_value

    def codegen(context, builder, sig, args):
        on = builder.icmp_signed("!=", builder.and_(args[0], _c(builder, x)), _c(builder, 0))
        return builder.zext(builder.bitcast(on, _I16), _I64)

    return types.int64(i32x16, bit), codegen


@intrinsic
def two_bit_lanes(typingctx, word, shift):
    """Return bits shift..shift+1 of byte i of a 64-bit word in lane i < 8; lane 8 + i: four bits higher (i32x16)."""

    def codegen(context, builder, sig, args):
        word, shift = args
        low = builder.lshr(word, shift)
        high = builder.lshr(word, builder.add(shift, ir.Constant(_I64, 4)))
        v = ir.Constant(ir.VectorType(_I64, 2), ir.Undefined)
        for i, part in enumerate((low, high)):
            v = builder.insert_element(v, part, ir.Constant(_I32, i))
        wide = builder.zext(builder.bitcast(v, _BYTES16), llvm_type(i32x16))
        return builder.and_(wide, _c(builder, 3))

    return i32x16(types.int64, types.int64), codegen


@intrinsic
def store_lane_pairs(typingctx, ptr, codes):
    """Store eight bytes: lane i (four bits) low, lane 8 + i high."""

    def codegen(context, builder, sig, args):
        low = builder.shuffle_vector(args[1], args[1], _ints(range(8)))
        high = builder.shuffle_vector(args[1], args[1], _ints(range(8, 16)))
        four = ir.Constant(low.type, [4] * 8)
        both = builder.trunc(builder.or_(low, builder.shl(high, four)), ir.VectorType(ir.IntType(8), 8))
        builder.store(both, pointer(builder, args[0], both.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, i32x16), codegen


@intrinsic
def store_quarters(typingctx, ptr, a, b):
    """Store bytes 4i..4i+3 of two i8x16 at ptr + 64*i, side by side, for i = 0..3."""

    def codegen(context, builder, sig, args):
        ptr, *pair = args
        first, second = (builder.bitcast(x, ir.VectorType(_I32, 4)) for x in pair)
        for i in range(4):
            both = builder.shuffle_vector(first, second, _ints([i, 4 + i]))
            at = builder.add(ptr, ir.Constant(_I64, 64 * i))
            builder.store(both, pointer(builder, at, both.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, i8x16, i8x16), codegen


@intrinsic
def store_words_apart(typingctx, ptr, stride, v):
    """Store bytes 4i..4i+3 of an i8x16 at ptr + stride*i, for i = 0..3."""

    def codegen(context, builder, sig, args):
        ptr, stride, v = args
        words = builder.bitcast(v, ir.VectorType(_I32, 4))
        for i in range(4):
            at = builder.add(ptr, builder.mul(stride, ir.Constant(_I64, i)))
            builder.store(builder.extract_element(words, ir.Constant(_I32, i)), pointer(builder, at, _I32), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, i8x16), codegen


@intrinsic
def store_magnitudes(typingctx, ptr, a, b):
    """Store the absolute values of two i8x16, one after the other."""

    def codegen(context, builder, sig, args):
        ptr, *pair = args
        for i, x in enumerate(pair):
            at = builder.add(ptr, ir.Constant(_I64, 16 * i))
            builder.store(magnitude(builder, x), pointer(builder, at, x.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, i8x16, i8x16), codegen


def make_lookup16(values):
    """Return lookup(codes): values[code] as f32x16 for codes 0..15; the values are 16 signed bytes."""
    values = [int(v) & 255 for v in values]

    @intrinsic
    def lookup(typingctx, codes):
        def codegen(context, builder, sig, args):
            target = isa.current()
            codes = builder.trunc(args[0], _BYTES16)
            if target.is_arm64:
                found = arm64.lookup(builder, values, codes)
            elif "avx2" in target.features:
                found = call_llvm(builder, "llvm.x86.ssse3.pshuf.b.128", _BYTES16, [const_vector(i8x16, values), codes])
            else:
                found = const_vector(i8x16, [values[0]] * 16)
                for i in range(1, 16):
                    is_i = builder.icmp_unsigned("==", codes, const_vector(i8x16, [i] * 16))
                    found = builder.select(is_i, const_vector(i8x16, [values[i]] * 16), found)
            return builder.sitofp(builder.sext(found, llvm_type(i32x16)), llvm_type(f32x16))

        return f32x16(i32x16), codegen

    return lookup


def make_count_above(limits):
    """Return count(x): how many of the limits are below each lane (i32x16)."""
    limits = [float(t) for t in limits]

    @intrinsic
    def count_above(typingctx, x):
        def codegen(context, builder, sig, args):
            total = _c(builder, 0)
            for t in limits:
                above = builder.fcmp_ordered(">", args[0], const_vector(f32x16, [t] * 16))
                total = builder.select(above, builder.add(total, _c(builder, 1)), total)
            return total

        return i32x16(f32x16), codegen

    return count_above


@intrinsic
def hadamard16(typingctx, x):
    """Apply the Walsh-Hadamard transform to the 16 lanes, not normalised."""

    def codegen(context, builder, sig, args):
        v = args[0]
        for step in (1, 2, 4, 8):
            partner = builder.shuffle_vector(v, v, _ints([i ^ step for i in range(16)]))
            signs = const_vector(f32x16, [-1.0 if i & step else 1.0 for i in range(16)])
            v = call_llvm(builder, "llvm.fma.v16f32", v.type, [v, signs, partner])
        return v

    return f32x16(f32x16), codegen
