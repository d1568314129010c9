"""Kernel operations besides arithmetic: prefetching, atomic operations, waiting, calls."""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.native import isa
from ikcli.native.simd.vec import call_llvm, pointer

_I32, _I64 = ir.IntType(32), ir.IntType(64)
# Of Linux
_MONOTONIC, _NS = 1, 10**9
_FUTEX_X86, _FUTEX_ARM64, _WAIT, _WAKE, _PRIVATE = 202, 98, 0, 1, 128


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
    """Prefetch cache lines from an address on (second level); return the address after them."""
    for _ in range(lines):
        args = [pointer(builder, at, ir.IntType(8)), *(ir.Constant(_I32, x) for x in (0, 2, 1))]
        call_llvm(builder, "llvm.prefetch.p0", ir.VoidType(), args)
        at = builder.add(at, ir.Constant(at.type, 64))
    return at


prefetch = _make_prefetch(3)  # ask for the cache line at an address
prefetch_l2 = _make_prefetch(2)  # ... but leave the first level alone


@intrinsic
def atomic_add(typingctx, ptr, value):
    """Fetch and add on an int64; return the old value."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", pointer(builder, args[0], ir.IntType(64)), args[1], "seq_cst")

    return types.int64(types.intp, types.int64), codegen


@intrinsic
def atomic_load(typingctx, ptr):
    """Load an int64 with acquire semantics."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(pointer(builder, args[0], ir.IntType(64)), "acquire", 8)

    return types.int64(types.intp), codegen


@intrinsic
def atomic_store(typingctx, ptr, value):
    """Store an int64 with release semantics."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], pointer(builder, args[0], ir.IntType(64)), "release", 8)
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def atomic_cas(typingctx, ptr, expected, value):
    """Replace `expected` by `value`; return 1 if it was there, else 0."""

    def codegen(context, builder, sig, args):
        p = pointer(builder, args[0], ir.IntType(64))
        result = builder.cmpxchg(p, args[1], args[2], "seq_cst", "acquire")
        return builder.zext(builder.extract_value(result, 1), ir.IntType(64))

    return types.int64(types.intp, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the CPU that this is a spin loop; do nothing on CPUs without such a hint."""

    def codegen(context, builder, sig, args):
        if isa.current().is_x86:
            call_llvm(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


_FLUSH_X86, _FLUSH_ARM64 = 0x8040, 1 << 24  # of MXCSR: results and operands; of FPCR: both


@intrinsic
def flush_denormals(typingctx):
    """Let this thread take denormal numbers for 0 from now on; return what `restore_denormals` needs.

    Decays multiply to such numbers, on which a CPU takes a hundred times as long.
    """

    def codegen(context, builder, sig, args):
        i64 = ir.IntType(64)
        if not isa.current().is_x86:
            mode = call_llvm(builder, "llvm.aarch64.get.fpcr", i64, [])
            flushing = builder.or_(mode, ir.Constant(i64, _FLUSH_ARM64))
            call_llvm(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [flushing])
            return mode
        with builder.goto_entry_block():
            at = builder.alloca(_I32)
        place = builder.bitcast(at, ir.IntType(8).as_pointer())
        call_llvm(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [place])
        mode = builder.load(at)
        builder.store(builder.or_(mode, ir.Constant(_I32, _FLUSH_X86)), at)
        call_llvm(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [place])
        return builder.zext(mode, i64)

    return types.int64(), codegen


@intrinsic
def restore_denormals(typingctx, mode):
    """Undo `flush_denormals`, which returned the mode."""

    def codegen(context, builder, sig, args):
        if not isa.current().is_x86:
            call_llvm(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [args[0]])
            return context.get_dummy_value()
        with builder.goto_entry_block():
            at = builder.alloca(_I32)
        builder.store(builder.trunc(args[0], _I32), at)
        place = builder.bitcast(at, ir.IntType(8).as_pointer())
        call_llvm(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [place])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def call_kernel(typingctx, address, params, ith, nth):
    """Call a compiled kernel by address; return its status (0 = ok). See `jit.py` for the calling convention."""
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
def yield_cpu(typingctx):
    """Let another thread run; return the nanoseconds until this one went on, 0 where threads cannot sleep (below)."""

    def codegen(context, builder, sig, args):
        yielding = "SwitchToThread" if isa.system() == "win32" else "sched_yield"
        if isa.system() != "linux":
            call_llvm(builder, yielding, _I32, [])
            return ir.Constant(_I64, 0)
        begin = _emit_clock(builder)
        call_llvm(builder, yielding, _I32, [])
        return builder.sub(_emit_clock(builder), begin)

    return types.int64(), codegen


def _emit_clock(builder):
    """Read the monotonic clock of Linux; nanoseconds."""
    with builder.goto_entry_block():
        at = builder.alloca(ir.ArrayType(_I64, 2))
    call_llvm(builder, "clock_gettime", _I32, [ir.Constant(_I32, _MONOTONIC), at])
    pair = builder.load(at)
    seconds = builder.mul(builder.extract_value(pair, 0), ir.Constant(_I64, _NS))
    return builder.add(seconds, builder.extract_value(pair, 1))


def _emit_futex(builder, address, operation, value, timeout):
    """Call the kernel of Linux for the low word of an int64; `timeout`: the address of seconds and nanoseconds, or 0.

    The C library has no function for it, so the call goes through its `syscall`, which takes registers alone.
    """
    words = [address, ir.Constant(_I64, operation | _PRIVATE), value, timeout]
    number = ir.Constant(_I64, _FUTEX_X86 if isa.current().is_x86 else _FUTEX_ARM64)
    return call_llvm(builder, "syscall", _I64, [number, *words])


@intrinsic
def sleep_while(typingctx, address, value, ns):
    """Sleep until a thread wakes those at this int64 or `ns` (< 1e9) are over; at once if it has another value.

    Other systems than Linux have no such call: nothing happens there.
    """

    def codegen(context, builder, sig, args):
        if isa.system() == "linux":
            with builder.goto_entry_block():
                at = builder.alloca(ir.ArrayType(_I64, 2))
            timeout = builder.insert_value(ir.Constant(ir.ArrayType(_I64, 2), [0, 0]), args[2], 1)
            builder.store(timeout, at)
            _emit_futex(builder, args[0], _WAIT, args[1], builder.ptrtoint(at, _I64))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64, types.int64), codegen


@intrinsic
def wake_all(typingctx, address):
    """Wake the threads that sleep at this int64."""

    def codegen(context, builder, sig, args):
        if isa.system() == "linux":
            _emit_futex(builder, args[0], _WAKE, ir.Constant(_I64, 2**31 - 1), ir.Constant(_I64, 0))
        return context.get_dummy_value()

    return types.void(types.intp), codegen
