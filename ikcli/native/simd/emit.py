"""Emit micro-kernels as LLVM IR: fully unrolled register blocks that would be unreadable as scalar Python.

`Emitter` is a thin wrapper over an llvmlite builder with the few operations that micro-kernels need. Addresses are i64
values; accumulators live in stack slots that LLVM promotes to registers.
"""

import contextlib

import llvmlite.ir as ir

from ikcli.native import isa
from ikcli.native.simd import arm64
from ikcli.native.simd.dot import emit_dot, emit_dots, emit_signed_dot
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    emit_store_first,
    f32x16,
    i8x64,
    i32x16,
    llvm_type,
    pointer,
    splat_value,
)

I64, I32, F32 = ir.IntType(64), ir.IntType(32), ir.FloatType()


class Emitter:
    def __init__(self, builder):
        self.b = builder
        self.memo = {}  # values computed once per step, for formats that would compute them again for every 64 columns

    def features(self):
        """Return the instruction set features of the target."""
        return isa.current().features

    # --- integers -----------------------------------------------------------------------------------------------------
    def int(self, x):
        return ir.Constant(I64, x)

    def offset(self, base, *terms):
        """Return base + the sum of terms (i64 values or Python ints)."""
        for t in terms:
            base = self.b.add(base, self.int(t) if isinstance(t, int) else t)
        return base

    def opaque(self, x):
        """Hide x from the optimiser, which would otherwise chain addresses: row + stride + stride + ..."""
        return self.b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [x], False)

    def in_order(self, v):
        """Return v (floats), computed before any later load: LLVM would mix the parts of a loop until they spill."""
        if isa.current().is_arm64:
            return arm64.joined(self.b, [self._in_order(part, "w") for part in arm64.sixteens(self.b, v)])
        return self._in_order(v, "v") if "avx512f" in self.features() else v

    def _in_order(self, v, register):
        return self.b.asm(ir.FunctionType(v.type, [v.type]), "", f"={register},0,~{{memory}}", [v], True)

    def in_register(self, v):
        """Return v (32 bytes), computed before any later load. Needs AVX2."""
        return self._in_order(v, "x")

    def barrier(self):
        """Keep LLVM from moving loads across this place."""
        self.b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)

    def prefetch(self, address, write=False):
        """Prefetch a cache line into the first level, optionally for writing."""
        consts = [ir.Constant(I32, x) for x in (int(write), 3, 1)]
        call_llvm(self.b, "llvm.prefetch.p0", ir.VoidType(), [pointer(self.b, address, ir.IntType(8)), *consts])

    def times(self, x, n):
        return self.b.mul(x, self.int(n))

    # --- vectors ------------------------------------------------------------------------------------------------------
    def load(self, vec, address):
        return self.b.load(pointer(self.b, address, llvm_type(vec)), align=1)

    def store(self, value, address):
        self.b.store(value, pointer(self.b, address, value.type), align=1)

    def store_first(self, value, address, n):
        """Store the first n (i64) lanes of an f32x16."""
        emit_store_first(self.b, address, value, n)

    def splat_f32(self, address):
        return splat_value(self.b, f32x16, self.b.load(pointer(self.b, address, F32), align=1))

    def splat_i32(self, address):
        return splat_value(self.b, i32x16, self.b.load(pointer(self.b, address, I32), align=1))

    def splat_bytes(self, address):
        """Return four bytes repeated over i8x64."""
        return self.b.bitcast(self.splat_i32(address), llvm_type(i8x64))

    def zero(self, vec):
        return const_vector(vec, [0.0 if vec.elt == "f32" else 0] * vec.n)

    def fma(self, a, b, c):
        return call_llvm(self.b, "llvm.fma.v16f32", a.type, [a, b, c])

    def to_f32(self, v):
        return self.b.sitofp(v, llvm_type(f32x16))

    def dot(self, acc, u, s, most=255):
        return emit_dot(self.b, acc, u, s, 16, most)

    def dots(self, acc, us, ss, most):
        return emit_dots(self.b, acc, us, ss, most)

    def dot_signed(self, acc, w, s):
        return emit_signed_dot(self.b, acc, w, s)

    def without_128(self, u):
        """Subtract 128 from codes, giving signed bytes."""
        return self.b.xor(u, ir.Constant(u.type, [-128] * u.type.count))

    # --- variables and loops ------------------------------------------------------------------------------------------
    def variable(self, value):
        with self.b.goto_entry_block():
            slot = self.b.alloca(value.type)
        self.b.store(value, slot)
        return slot

    def room(self, n_bytes):
        """Return the address of stack memory aligned to a vector."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(ir.IntType(8), n_bytes + 64))
        return self.b.and_(self.offset(self.b.ptrtoint(slot, I64), 63), self.int(-64))

    @contextlib.contextmanager
    def loop(self, count):
        """Emit `for i in range(count)` and yield i (i64)."""
        fn = self.b.function
        head, body, done = (fn.append_basic_block(n) for n in ("head", "body", "done"))
        entry = self.b.block
        self.b.branch(head)
        self.b.position_at_end(head)
        i = self.b.phi(I64)
        i.add_incoming(self.int(0), entry)
        self.b.cbranch(self.b.icmp_signed("<", i, count), body, done)
        self.b.position_at_end(body)
        yield i
        i.add_incoming(self.b.add(i, self.int(1)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(done)


def _lanes(lanes):
    return ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))


def transpose16(builder, rows):
    """Transpose 16 vectors f32x16: four rounds of two-input shuffles."""
    index = ir.VectorType(I32, 16)
    for step in (1, 2, 4, 8):
        lo = [i if not i & step else 16 + i - step for i in range(16)]
        hi = [i + step if not i & step else 16 + i for i in range(16)]
        out = [None] * 16
        for i in range(16):
            if i & step:
                continue
            a, b = rows[i], rows[i | step]
            out[i] = builder.shuffle_vector(a, b, ir.Constant(index, lo))
            out[i | step] = builder.shuffle_vector(a, b, ir.Constant(index, hi))
        rows = out
    return rows
