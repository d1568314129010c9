"""16-bit floats, half and bfloat16: conversions, loads and stores."""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native import isa
from ikcli.native.simd.vec import f32x16, i16x16, make_load, make_store, pointer, splat_value

_I32 = ir.IntType(32)


# --- scalars and vectors as LLVM values -------------------------------------------------------------------------------
def _like(t, element):
    """Return a scalar or vector type with another element."""
    return ir.VectorType(element, t.count) if isinstance(t, ir.VectorType) else element


def _constant_like(t, x):
    return ir.Constant(t, [ir.Constant(t.element, x)] * t.count) if isinstance(t, ir.VectorType) else ir.Constant(t, x)


def _has_half_instructions():
    target = isa.current()
    return not target.is_x86 or "f16c" in target.features


def half_to_f32(builder, bits):
    """Convert half floats given as i16 (scalar or vector) to f32; in integer arithmetic without an instruction."""
    if _has_half_instructions():
        return builder.fpext(builder.bitcast(bits, _like(bits.type, ir.HalfType())), _like(bits.type, ir.FloatType()))
    t, f = _like(bits.type, _I32), _like(bits.type, ir.FloatType())

    def c(x):
        return _constant_like(t, x)

    h = builder.zext(bits, t)
    magnitude = builder.shl(builder.and_(h, c(0x7FFF)), c(13))
    scaled = builder.fmul(builder.bitcast(magnitude, f), builder.bitcast(c(0x77800000), f))  # 2**112: exact
    finite = builder.bitcast(scaled, t)
    special = builder.icmp_unsigned(">=", magnitude, c(0x0F800000))
    value = builder.select(special, builder.or_(magnitude, c(0x7F800000)), finite)
    return builder.bitcast(builder.or_(value, builder.shl(builder.and_(h, c(0x8000)), c(16))), f)


def f32_to_half(builder, x):
    """Convert to half floats as i16, rounded to nearest even; NaN stays NaN."""
    if _has_half_instructions():
        return builder.bitcast(builder.fptrunc(x, _like(x.type, ir.HalfType())), _like(x.type, ir.IntType(16)))
    t = _like(x.type, _I32)

    def c(v):
        return _constant_like(t, v)

    u = builder.bitcast(x, t)
    a = builder.and_(u, c(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(a, c(13)), c(1))
    normal = builder.lshr(builder.add(builder.add(a, c(0xFFF - 0x38000000)), odd), c(13))
    small = builder.fadd(builder.bitcast(a, x.type), builder.bitcast(c(0x3F000000), x.type))
    small = builder.sub(builder.bitcast(small, t), c(0x3F000000))
    nan = builder.or_(builder.and_(builder.lshr(a, c(13)), c(0x3FF)), c(0x7E00))
    h = builder.select(builder.icmp_unsigned("<", a, c(0x38800000)), small, normal)
    h = builder.select(builder.icmp_unsigned(">=", a, c(0x47800000)), c(0x7C00), h)
    h = builder.select(builder.icmp_unsigned(">", a, c(0x7F800000)), nan, h)
    h = builder.or_(h, builder.and_(builder.lshr(u, c(16)), c(0x8000)))
    return builder.trunc(h, _like(x.type, ir.IntType(16)))


def bf16_to_f32(builder, bits):
    """Convert bfloat16 given as i16 (scalar or vector) to f32."""
    t = _like(bits.type, _I32)
    wide = builder.shl(builder.zext(bits, t), _constant_like(t, 16))
    return builder.bitcast(wide, _like(bits.type, ir.FloatType()))


def f32_to_bf16_bits(builder, x):
    """Convert to bfloat16 as i16 (scalar or vector), rounded to nearest even; NaN stays NaN."""
    t = _like(x.type, _I32)

    def c(v):
        return _constant_like(t, v)

    bits = builder.bitcast(x, t)
    top = builder.lshr(bits, c(16))
    odd = builder.and_(top, c(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, c(0x7FFF))), c(16))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.trunc(builder.select(is_nan, builder.or_(top, c(0x40)), rounded), _like(x.type, ir.IntType(16)))


# --- memory ----------------------------------------------------------------------------------------------------------
ld_f16, ld_bf16 = make_load(types.float32, "i16", half_to_f32), make_load(types.float32, "i16", bf16_to_f32)
st_f16, st_bf16 = make_store(types.float32, f32_to_half), make_store(types.float32, f32_to_bf16_bits)
load_f16x16, load_bf16x16 = make_load(f32x16, i16x16, half_to_f32), make_load(f32x16, i16x16, bf16_to_f32)
store_f16x16, store_bf16x16 = make_store(f32x16, f32_to_half), make_store(f32x16, f32_to_bf16_bits)


@intrinsic
def bcast_f16x16(typingctx, ptr):
    """Load one half float into all lanes of f32x16; spread first, as a general register would cost more."""

    def codegen(context, builder, sig, args):
        bits = builder.load(pointer(builder, args[0], ir.IntType(16)), align=1)
        return half_to_f32(builder, splat_value(builder, i16x16, bits))

    return f32x16(types.intp), codegen
