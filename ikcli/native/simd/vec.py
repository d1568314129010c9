"""SIMD vectors for Numba: a type over an LLVM vector, and intrinsics in plain LLVM IR.

Everything here is legal on any LLVM target (LLVM splits vectors the machine lacks); `dot.py` holds the few operations
that need an instruction of their own. Pointers are plain integers (bytes); loads and stores are unaligned.
Lane counts: f32x16, i32x16, i16x32, i8x64 fill one 512-bit register; f32x8, i32x8, i8x32 and i8x16 are the halves.
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


f32x16, f32x8 = Vec("f32", 16), Vec("f32", 8)
i32x16, i32x8 = Vec("i32", 16), Vec("i32", 8)
i16x32, i16x16 = Vec("i16", 32), Vec("i16", 16)
i8x64, i8x32, i8x16 = Vec("i8", 64), Vec("i8", 32), Vec("i8", 16)


# --- helpers for writing intrinsics ----------------------------------------------------------------------------------
def const_vector(v, values):
    """LLVM constant of vector type v."""
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


def splat_value(builder, v, scalar):
    t = llvm_type(v)
    undef = ir.Constant(t, ir.Undefined)
    one = builder.insert_element(undef, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undef, ir.Constant(ir.VectorType(_I32, v.n), [0] * v.n))


# --- half floats -----------------------------------------------------------------------------------------------------
def _like(t, element):
    """A scalar or vector type with another element."""
    return ir.VectorType(element, t.count) if isinstance(t, ir.VectorType) else element


def _constant_like(t, x):
    return ir.Constant(t, [ir.Constant(t.element, x)] * t.count) if isinstance(t, ir.VectorType) else ir.Constant(t, x)


def _has_half_instructions():
    target = isa.current()
    return not target.is_x86 or "f16c" in target.features


def half_to_f32(builder, bits):
    """f32 of half floats given as i16 (scalar or vector); by integer arithmetic where the CPU has no instruction."""
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
    """Half floats as i16, rounded to nearest even; NaN stays NaN."""
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


# --- memory ----------------------------------------------------------------------------------------------------------
def _make_load(v):
    @intrinsic
    def load(typingctx, ptr):
        def codegen(context, builder, sig, args):
            return builder.load(pointer(builder, args[0], llvm_type(v)), align=1)

        return v(types.intp), codegen

    return load


def _make_store(v):
    @intrinsic
    def store(typingctx, ptr, value):
        def codegen(context, builder, sig, args):
            builder.store(args[1], pointer(builder, args[0], llvm_type(v)), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, v), codegen

    return store


load_f32x16 = _make_load(f32x16)
load_i32x16, load_i32x8 = _make_load(i32x16), _make_load(i32x8)
load_i8x64, load_i8x32, load_i8x16 = _make_load(i8x64), _make_load(i8x32), _make_load(i8x16)
store_f32x16 = _make_store(f32x16)
store_i32x16, store_i32x8 = _make_store(i32x16), _make_store(i32x8)
store_i8x64, store_i8x32, store_i8x16 = _make_store(i8x64), _make_store(i8x32), _make_store(i8x16)


def _make_scalar_load(nb_type, elt, convert=None):
    @intrinsic
    def load(typingctx, ptr):
        def codegen(context, builder, sig, args):
            x = builder.load(pointer(builder, args[0], _ELEMENT[elt]), align=1)
            return convert(builder, x) if convert else x

        return nb_type(types.intp), codegen

    return load


def _bf16_bits_to_f32(builder, x):
    wide = builder.shl(builder.zext(x, _I32), ir.Constant(_I32, 16))
    return builder.bitcast(wide, ir.FloatType())


def _f32_to_bf16_bits(builder, x):
    """Rounded to nearest even; NaN stays NaN."""
    bits = builder.bitcast(x, _I32)
    top = builder.lshr(bits, ir.Constant(_I32, 16))
    odd = builder.and_(top, ir.Constant(_I32, 1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF))), ir.Constant(_I32, 16))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.trunc(builder.select(is_nan, builder.or_(top, ir.Constant(_I32, 0x40)), rounded), ir.IntType(16))


ld_f32 = _make_scalar_load(types.float32, "f32")
ld_f64 = _make_scalar_load(types.float64, "f64")
ld_f16 = _make_scalar_load(types.float32, "i16", lambda b, x: half_to_f32(b, x))
ld_bf16 = _make_scalar_load(types.float32, "i16", _bf16_bits_to_f32)
ld_i64 = _make_scalar_load(types.int64, "i64")
ld_i32 = _make_scalar_load(types.int64, "i32", lambda b, x: b.sext(x, ir.IntType(64)))
ld_u8 = _make_scalar_load(types.int64, "i8", lambda b, x: b.zext(x, ir.IntType(64)))
ld_i8 = _make_scalar_load(types.int64, "i8", lambda b, x: b.sext(x, ir.IntType(64)))


def _make_scalar_store(nb_type, elt, convert=None):
    @intrinsic
    def store(typingctx, ptr, value):
        def codegen(context, builder, sig, args):
            x = convert(builder, args[1]) if convert else args[1]
            builder.store(x, pointer(builder, args[0], _ELEMENT[elt]), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, nb_type), codegen

    return store


st_f32 = _make_scalar_store(types.float32, "f32")
st_f16 = _make_scalar_store(types.float32, "i16", lambda b, x: f32_to_half(b, x))
st_bf16 = _make_scalar_store(types.float32, "i16", lambda b, x: _f32_to_bf16_bits(b, x))
st_i64 = _make_scalar_store(types.int64, "i64")
st_i32 = _make_scalar_store(types.int64, "i32", lambda b, x: b.trunc(x, _I32))
st_i8 = _make_scalar_store(types.int64, "i8", lambda b, x: b.trunc(x, ir.IntType(8)))


@intrinsic
def load_f16x16(typingctx, ptr):
    """16 half floats as f32x16."""

    def codegen(context, builder, sig, args):
        bits = builder.load(pointer(builder, args[0], ir.VectorType(ir.IntType(16), 16)), align=1)
        return half_to_f32(builder, bits)

    return f32x16(types.intp), codegen


@intrinsic
def bcast_f16x16(typingctx, ptr):
    """One half float from memory to all lanes of f32x16; spread first, as a general register would cost more."""

    def codegen(context, builder, sig, args):
        bits = builder.load(pointer(builder, args[0], ir.IntType(16)), align=1)
        return half_to_f32(builder, splat_value(builder, i16x16, bits))

    return f32x16(types.intp), codegen


@intrinsic
def load_bf16x16(typingctx, ptr):
    """16 bfloat16 as f32x16."""

    def codegen(context, builder, sig, args):
        bits = builder.load(pointer(builder, args[0], ir.VectorType(ir.IntType(16), 16)), align=1)
        wide = builder.zext(bits, llvm_type(i32x16))
        shifted = builder.shl(wide, const_vector(i32x16, [16] * 16))
        return builder.bitcast(shifted, llvm_type(f32x16))

    return f32x16(types.intp), codegen


@intrinsic
def store_f16x16(typingctx, ptr, value):
    """f32x16 rounded to nearest even half floats."""

    def codegen(context, builder, sig, args):
        bits = f32_to_half(builder, args[1])
        builder.store(bits, pointer(builder, args[0], bits.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen


def f32_to_bf16_bits(builder, x):
    """f32x16 as bits of bfloat16, rounded to nearest even; NaN stays NaN."""

    def c(value):
        return const_vector(i32x16, [value] * 16)

    bits = builder.bitcast(x, llvm_type(i32x16))
    odd = builder.and_(builder.lshr(bits, c(16)), c(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, c(0x7FFF))), c(16))
    quiet = builder.or_(builder.lshr(bits, c(16)), c(0x40))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.trunc(builder.select(is_nan, quiet, rounded), ir.VectorType(ir.IntType(16), 16))


@intrinsic
def store_bf16x16(typingctx, ptr, value):
    """f32x16 rounded to nearest even bfloat16; NaN stays NaN."""

    def codegen(context, builder, sig, args):
        half = f32_to_bf16_bits(builder, args[1])
        builder.store(half, pointer(builder, args[0], half.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, f32x16), codegen


@intrinsic
def store_f32_first(typingctx, ptr, value, n):
    """Store the first n lanes (0..16) of an f32x16."""

    def codegen(context, builder, sig, args):
        vt = llvm_type(f32x16)
        lanes = const_vector(i32x16, range(16))
        limit = splat_value(builder, i32x16, builder.trunc(args[2], _I32))
        mask = builder.icmp_signed("<", lanes, limit)
        ptr = pointer(builder, args[0], vt)
        name = "llvm.masked.store.v16f32.p0"
        call_llvm(builder, name, ir.VoidType(), [args[1], ptr, ir.Constant(_I32, 1), mask])
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
    """a*b + c, rounded once."""
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
    """The larger of each pair of lanes, b where one is NaN: a single instruction, unlike `vmax`."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[0], args[1])

    return a(a, b), codegen


def _make_reduce(name, identity):
    @intrinsic
    def reduce(typingctx, a):
        """All lanes of an f32 vector combined (tree order)."""

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
    """x where a < b (i32x16, signed), else y (f32x16)."""

    def codegen(context, builder, sig, args):
        return builder.select(builder.icmp_signed("<", args[0], args[1]), args[2], args[3])

    return f32x16(i32x16, i32x16, f32x16, f32x16), codegen


@intrinsic
def lane_index(typingctx):
    """0..15 as i32x16."""
    return i32x16(), lambda context, builder, sig, args: const_vector(i32x16, range(16))


# --- control ---------------------------------------------------------------------------------------------------------
def _make_prefetch(locality):
    @intrinsic
    def ask(typingctx, ptr):
        def codegen(context, builder, sig, args):
            p = pointer(builder, args[0], ir.IntType(8))
            consts = [ir.Constant(_I32, x) for x in (0, locality, 1)]
            call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), [p, *consts])
            return context.get_dummy_value()

        return types.void(types.intp), codegen

    return ask


def emit_prefetch(builder, at, lines):
    """Ask for cache lines from an address on (second level); returns the address after them."""
    for _ in range(lines):
        args = [pointer(builder, at, ir.IntType(8)), *(ir.Constant(_I32, x) for x in (0, 2, 1))]
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), args)
        at = builder.add(at, ir.Constant(at.type, 64))
    return at


prefetch = _make_prefetch(3)  # ask for the cache line at an address
prefetch_l2 = _make_prefetch(2)  # ... but leave the first level alone


@intrinsic
def atomic_add(typingctx, ptr, value):
    """Fetch-and-add on an int64; returns the old value."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], ir.IntType(64)), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def atomic_load(typingctx, ptr):
    """Acquire load of an int64."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(pointer(builder, args[0], ir.IntType(64)), "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_store(typingctx, ptr, value):
    """Release store of an int64."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], pointer(builder, args[0], ir.IntType(64)), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def atomic_cas(typingctx, ptr, expected, value):
    """Replace `expected` by `value`; 1 if it was there, else 0."""

    def codegen(context, builder, sig, args):
        p = pointer(builder, args[0], ir.IntType(64))
        result = builder.cmpxchg(p, args[1], args[2], "seq_cst", "acquire")
        return builder.zext(builder.extract_value(result, 1), ir.IntType(64))

    return types.int64(types.intp, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the CPU that this is a spin loop (nothing where there is no such hint)."""

    def codegen(context, builder, sig, args):
        if isa.current().is_x86:
            call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call_kernel(typingctx, address, params, ith, nth):
    """Call a compiled kernel by address; returns its status (0 = ok). See `jit.py` for the calling convention."""
    i64, i8p = ir.IntType(64), ir.IntType(8).as_pointer()

    def codegen(context, builder, sig, args):
        fnty = ir.FunctionType(_I32, [i8p.as_pointer(), i8p.as_pointer(), i64, i64, i64])
        fn = builder.inttoptr(args[0], fnty.as_pointer())
        with builder.goto_entry_block():
            ret, exc = builder.alloca(i8p), builder.alloca(i8p)
        status = builder.call(fn, [ret, exc, *args[1:]])
        return builder.sext(status, i64)

    return types.int64(types.intp, types.intp, types.intp, types.intp), codegen


@intrinsic
def libc_call0(typingctx, name):
    """Call a libc function without arguments, e.g. sched_yield."""
    if not isinstance(name, types.StringLiteral):
        return None
    symbol = name.literal_value

    def codegen(context, builder, sig, args):
        call_llvm(builder, symbol, _I32, [])
        return context.get_dummy_value()

    return types.void(name), codegen
