"""SIMD vectors for Numba: a type over an LLVM vector, and intrinsics in plain LLVM IR.

Everything here is legal on any LLVM target, because LLVM splits vectors that the machine lacks. `dot.py` holds the few
operations that need a specific instruction, `half.py` 16-bit floats, `control.py` operations besides arithmetic.
Pointers are plain integers (bytes); loads and stores are unaligned. Lane counts: f32x16, i32x16, i16x32, i8x64 fill one
512-bit register; f32x8, i32x8, i8x32 and i8x16 are the halves.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic, models, register_model

from ikcli.native import isa

_ELEMENT = {
    "i8": ir.IntType(8),
    "i16": ir.IntType(16),
    "i32": ir.IntType(32),
    "i64": ir.IntType(64),
    "f16": ir.HalfType(),
    "f32": ir.FloatType(),
    "f64": ir.DoubleType(),
}
_I32 = ir.IntType(32)


class Vec(types.Type):
    """`n` lanes of `elt`."""

    def __init__(self, elt, n):
        self.elt, self.n = elt, n
        super().__init__(name=f"Vec[{elt}x{n}]")


def llvm_type(v):
    return ir.VectorType(_ELEMENT[v.elt], v.n)


@register_model(Vec)
class VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, llvm_type(fe_type))


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash(BFloat)


f32x16, f32x8 = Vec("f32", 16), Vec("f32", 8)
i32x16, i32x8 = Vec("i32", 16), Vec("i32", 8)
i16x32, i16x16 = Vec("i16", 32), Vec("i16", 16)
i8x64, i8x32, i8x16 = Vec("i8", 64), Vec("i8", 32), Vec("i8", 16)


# --- helpers for writing intrinsics ----------------------------------------------------------------------------------
def const_vector(v, values):
    """Return an LLVM constant of vector type v."""
    t = llvm_type(v)
    return ir.Constant(t, [ir.Constant(t.element, x) for x in values])


def pointer(builder, address, pointee):
    return builder.inttoptr(address, pointee.as_pointer())


def call_llvm(builder, name, return_type, args):
    """Call the LLVM intrinsic or external function `name`."""
    fnty = ir.FunctionType(return_type, [a.type for a in args])
    fn = builder.module.globals.get(name)
    if fn is None:
        fn = ir.Function(builder.module, fnty, name)
    return builder.call(fn, args)


def magnitude(builder, v):
    """Return absolute values of integer lanes; the smallest number stays itself, which is right when read unsigned."""
    zero = ir.Constant(v.type, None)
    return builder.select(builder.icmp_signed("<", v, zero), builder.sub(zero, v), v)


def with_sign(builder, v, sign):
    """Return 32 bytes, negated where `sign` is negative, 0 where it is 0. Needs AVX2."""
    return call_llvm(builder, "llvm.x86.avx2.psign.b", v.type, [v, sign])


def larger(builder, a, b):
    """Return the larger of each pair of floats, b where one is NaN: a single instruction."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def splat_value(builder, v, scalar):
    t = llvm_type(v)
    undef = ir.Constant(t, ir.Undefined)
    one = builder.insert_element(undef, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undef, ir.Constant(ir.VectorType(_I32, v.n), [0] * v.n))


# --- memory ----------------------------------------------------------------------------------------------------------
def make_load(value, stored, convert=None):
    """Return load(address), which loads a `stored` (Vec, or name of an element) and applies convert(builder, x)."""
    stored = llvm_type(stored) if isinstance(stored, Vec) else _ELEMENT[stored]

    @intrinsic
    def load(typingctx, ptr):
        def codegen(context, builder, sig, args):
            x = builder.load(pointer(builder, args[0], stored), align=1)
            return convert(builder, x) if convert else x

        return value(types.intp), codegen

    return load


def make_store(value, convert=None):
    """Return store(address, x), which stores a `value` or the result of convert(builder, x)."""

    @intrinsic
    def store(typingctx, ptr, x):
        def codegen(context, builder, sig, args):
            x = convert(builder, args[1]) if convert else args[1]
            builder.store(x, pointer(builder, args[0], x.type), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, value), codegen

    return store


load_f32x16, store_f32x16 = make_load(f32x16, f32x16), make_store(f32x16)
load_i32x16, store_i32x16 = make_load(i32x16, i32x16), make_store(i32x16)
load_i32x8, store_i32x8 = make_load(i32x8, i32x8), make_store(i32x8)
load_i8x64, store_i8x64 = make_load(i8x64, i8x64), make_store(i8x64)
load_i8x32, store_i8x32 = make_load(i8x32, i8x32), make_store(i8x32)
load_i8x16, store_i8x16 = make_load(i8x16, i8x16), make_store(i8x16)

ld_f32, st_f32 = make_load(types.float32, "f32"), make_store(types.float32)
ld_f64, st_f64 = make_load(types.float64, "f64"), make_store(types.float64)
ld_i64, st_i64 = make_load(types.int64, "i64"), make_store(types.int64)
ld_i32 = make_load(types.int64, "i32", lambda b, x: b.sext(x, ir.IntType(64)))
st_i32 = make_store(types.int64, lambda b, x: b.trunc(x, _I32))
ld_u8 = make_load(types.int64, "i8", lambda b, x: b.zext(x, ir.IntType(64)))
ld_i8 = make_load(types.int64, "i8", lambda b, x: b.sext(x, ir.IntType(64)))
st_i8 = make_store(types.int64, lambda b, x: b.trunc(x, ir.IntType(8)))


def emit_store_first(builder, address, value, n):
    """Store the first n lanes of an f32x16; n is an i64."""
    mask = builder.icmp_signed(
        "<", const_vector(i32x16, range(16)), splat_value(builder, i32x16, builder.trunc(n, _I32))
    )
    ptr = pointer(builder, address, value.type)
    masked = [value, ptr, ir.Constant(_I32, 1), mask]
    if not isa.current().is_arm64:
        call_llvm(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), masked)
        return
    # No instruction stores some lanes: LLVM asks for every one.
    with builder.if_else(builder.icmp_signed(">=", n, ir.Constant(n.type, 16))) as (all_lanes, some):
        with all_lanes:
            builder.store(value, ptr, align=1)
        with some:
            call_llvm(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), masked)


@intrinsic
def store_f32_first(typingctx, ptr, value, n):
    """Store the first n lanes (0..16) of an f32x16."""

    def codegen(context, builder, sig, args):
        emit_store_first(builder, *args)
        return context.get_dummy_value()

    return types.void(types.intp, f32x16, types.intp), codegen


# --- splats, zeros, conversions --------------------------------------------------------------------------------------
@intrinsic
def zero_f32x16(typingctx):
    return f32x16(), lambda context, builder, sig, args: const_vector(f32x16, [0.0] * 16)


@intrinsic
def zero_i32x16(typingctx):
    return i32x16(), lambda context, builder, sig, args: const_vector(i32x16, [0] * 16)


def _make_splat(v, nb_type, truncate):
    @intrinsic
    def splat(typingctx, x):
        def codegen(context, builder, sig, args):
            s = builder.trunc(args[0], _ELEMENT[v.elt]) if truncate else args[0]
            return splat_value(builder, v, s)

        return v(nb_type), codegen

    return splat


splat_f32x16 = _make_splat(f32x16, types.float32, False)
splat_i32x16 = _make_splat(i32x16, types.int64, True)
splat_i8x64 = _make_splat(i8x64, types.int64, True)


def _make_splat_load(v, elt):
    @intrinsic
    def splat_load(typingctx, ptr):
        def codegen(context, builder, sig, args):
            return splat_value(builder, v, builder.load(pointer(builder, args[0], _ELEMENT[elt]), align=1))

        return v(types.intp), codegen

    return splat_load


bcast_f32x16 = _make_splat_load(f32x16, "f32")  # one f32 from memory to all lanes


def _make_convert(src, dst, op):
    @intrinsic
    def convert(typingctx, x):
        def codegen(context, builder, sig, args):
            return getattr(builder, op)(args[0], llvm_type(dst))

        return dst(src), codegen

    return convert


cvt_i32x16_f32 = _make_convert(i32x16, f32x16, "sitofp")
cvt_f32x16_i32 = _make_convert(f32x16, i32x16, "fptosi")  # truncates
sext_i8x16_i32 = _make_convert(i8x16, i32x16, "sext")
zext_i8x16_i32 = _make_convert(i8x16, i32x16, "zext")
trunc_i32x16_i8 = _make_convert(i32x16, i8x16, "trunc")
bits_f32x16_i32 = _make_convert(f32x16, i32x16, "bitcast")
bits_i32x16_f32 = _make_convert(i32x16, f32x16, "bitcast")


# --- arithmetic (same function for every vector type) -----------------------------------------------------------------
def _make_binary(op_float, op_int):
    @intrinsic
    def binary(typingctx, a, b):
        if not isinstance(a, Vec) or a != b:
            return None
        op = op_float if a.elt == "f32" else op_int
        if op is None:
            return None
        return a(a, b), lambda context, builder, sig, args: getattr(builder, op)(args[0], args[1])

    return binary


vadd, vsub, vmul = _make_binary("fadd", "add"), _make_binary("fsub", "sub"), _make_binary("fmul", "mul")
vdiv = _make_binary("fdiv", None)
vand, vor, vxor = _make_binary(None, "and_"), _make_binary(None, "or_"), _make_binary(None, "xor")


def _make_shift(op):
    @intrinsic
    def shift(typingctx, a, n):
        if not isinstance(a, Vec) or a.elt not in ("i8", "i16", "i32"):
            return None

        def codegen(context, builder, sig, args):
            amount = builder.trunc(args[1], _ELEMENT[a.elt])
            return getattr(builder, op)(args[0], splat_value(builder, a, amount))

        return a(a, types.int64), codegen

    return shift


vshl, vlshr = _make_shift("shl"), _make_shift("lshr")


@intrinsic
def vfma(typingctx, a, b, c):
    """Return a*b + c, rounded once."""
    if not isinstance(a, Vec) or a.elt != "f32":
        return None

    def codegen(context, builder, sig, args):
        return call_llvm(builder, f"llvm.fma.v{a.n}f32", llvm_type(a), list(args))

    return a(a, a, a), codegen


def _make_float_intrinsic(name, n_args):
    def codegen_for(a):
        def codegen(context, builder, sig, args):
            return call_llvm(builder, f"llvm.{name}.v{a.n}f32", llvm_type(a), list(args))

        return codegen

    if n_args == 1:

        @intrinsic
        def unary(typingctx, a):
            return a(a), codegen_for(a)

        return unary

    @intrinsic
    def binary(typingctx, a, b):
        return a(a, a), codegen_for(a)

    return binary


vmax, vmin = _make_float_intrinsic("maxnum", 2), _make_float_intrinsic("minnum", 2)
vabs, vround_even = _make_float_intrinsic("fabs", 1), _make_float_intrinsic("rint", 1)
vsqrt = _make_float_intrinsic("sqrt", 1)


@intrinsic
def vmax_fast(typingctx, a, b):
    """Return the larger of each pair of lanes, b where one is NaN: a single instruction, unlike `vmax`."""

    def codegen(context, builder, sig, args):
        return larger(builder, *args)

    return a(a, b), codegen


def _make_reduce(name, identity):
    @intrinsic
    def reduce(typingctx, a):
        """Combine all lanes of an f32 vector (tree order)."""

        def codegen(context, builder, sig, args):
            value, n = args[0], a.n
            while n > 1:
                n //= 2
                lo = ir.Constant(ir.VectorType(_I32, n), list(range(n)))
                hi = ir.Constant(ir.VectorType(_I32, n), list(range(n, 2 * n)))
                x, y = builder.shuffle_vector(value, value, lo), builder.shuffle_vector(value, value, hi)
                if name == "fadd":
                    value = builder.fadd(x, y)
                else:
                    value = call_llvm(builder, f"llvm.{name}.v{n}f32", x.type, [x, y])
            return builder.extract_element(value, ir.Constant(_I32, 0))

        return types.float32(a), codegen

    return reduce


reduce_add, reduce_max = _make_reduce("fadd", 0.0), _make_reduce("maxnum", None)


@intrinsic
def select_less_i32(typingctx, a, b, x, y):
    """Return x where a < b (i32x16, signed), else y (f32x16)."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.icmp_signed("<", args[0], args[1]), args[2], args[3])

    return f32x16(i32x16, i32x16, f32x16, f32x16), codegen


@intrinsic
def lane_index(typingctx):
    """Return 0..15 as i32x16."""
    return i32x16(), lambda context, builder, sig, args: const_vector(i32x16, range(16))
