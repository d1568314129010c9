"""Kernels that measure the peaks (roofline) of the machine: products from registers, reads from memory."""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import MAX_VECTORS, fma_f32x16, load_f32x16_at, loop, offset
from ikcli.backends.cpu.params_peaks import SCRATCH_BYTES, ProductsParams, ReadParams
from ikcli.native import isa
from ikcli.native.simd.dot import emit_dot, emit_dot_bf16, emit_dot_i16, emit_dots
from ikcli.native.simd.emit import Emitter
from ikcli.native.simd.vec import f32x16, i8x64, i32x16, llvm_type, pointer

_I64 = ir.IntType(64)
CHAINS = 24  # products of an iteration, each 16 lanes wide
_AHEAD = 16384
# kind -> (vector that sums, multiplications and additions of a lane, product)
KINDS = {
    "f32": (f32x16, 2, lambda builder, acc, x: fma_f32x16(builder, acc, x, x)),
    "bf16": (f32x16, 4, lambda builder, acc, x: emit_dot_bf16(builder, acc, x, x)),
    "i16": (i32x16, 4, lambda builder, acc, x: emit_dot_i16(builder, acc, x, x)),
    "i8": (i32x16, 8, lambda builder, acc, x: _dots(builder, acc, x)),
}
ADDENDS = 4  # products of plain AVX2 whose sums still fit 16 bits, those of weights of four bits


def _dots(builder, acc, x):
    """Return acc plus a product of bytes, or plus as many as plain AVX2 adds up in 16 bits."""
    if not isa.current().plain_avx2:
        return emit_dot(builder, acc, x, x, 16)
    vectors = [_unknown(builder, x) for _ in range(ADDENDS)]
    return emit_dots(builder, acc, vectors, vectors, 15)


def _unknown(builder, x):
    """Return bytes that LLVM knows nothing of: it would compute a product that repeats once, before the loop."""
    halves = []
    for first in (0, 8):
        half = builder.shuffle_vector(x, x, _lanes(range(first, first + 8)))
        halves.append(builder.asm(ir.FunctionType(half.type, [half.type]), "", "=x,0", [half], True))
    return builder.bitcast(builder.shuffle_vector(*halves, _lanes(range(16))), llvm_type(i8x64))


def _lanes(lanes):
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))


def _make_registers(kind):
    """Return run(n, at): n times CHAINS products, as independent as registers allow.

    Operands and result are at `at`.
    """
    sum_type, _, multiply = KINDS[kind]
    width = CHAINS if MAX_VECTORS > 1 else CHAINS // 4  # AVX2: two registers each

    @intrinsic
    def run(typingctx, n, at):
        def codegen(context, builder, sig, args):
            n, at = args
            x = load_f32x16_at(builder, at, llvm_type(f32x16 if kind == "f32" else i32x16))
            starts = [load_f32x16_at(builder, offset(builder, at, 4 * i), llvm_type(sum_type)) for i in range(width)]
            addends = ADDENDS if kind == "i8" and isa.current().plain_avx2 else 1
            count = builder.mul(n, ir.Constant(_I64, CHAINS // width // addends))
            total, *rest = loop(builder, count, starts, lambda accs: [multiply(builder, a, x) for a in accs])
            for acc in rest:
                total = builder.fadd(total, acc) if sum_type is f32x16 else builder.add(total, acc)
            builder.store(total, pointer(builder, at, total.type), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return run


def make_products(kind):
    run = _make_registers(kind)

    @kernel(ProductsParams)
    def products(params, ith, nth):
        run(params.n, params.scratch + SCRATCH_BYTES * ith)

    return products


@intrinsic
def _read(typingctx, at, n_lines, out):
    """Read n_lines >= 1 groups of four cache lines; a value that depends on all of them goes to `out`."""

    def codegen(context, builder, sig, args):
        at, n, out = args
        e = Emitter(builder)
        t = llvm_type(i32x16)

        def step(state):
            here, *accs = state
            for i in range(4):
                e.prefetch(e.offset(here, _AHEAD + 64 * i))
                accs[i] = builder.xor(accs[i], load_f32x16_at(builder, offset(builder, here, 64 * i), t))
            return [offset(builder, here, 256), *accs]

        _, *accs = loop(builder, n, [at, *[ir.Constant(t, None)] * 4], step)
        total = builder.xor(builder.xor(accs[0], accs[1]), builder.xor(accs[2], accs[3]))
        builder.store(total, pointer(builder, out, t), align=1)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


def make_read():
    """Return a kernel in which every thread reads its part in order."""

    @kernel(ReadParams)
    def read(params, ith, nth):
        n = params.n_bytes // 256
        first, stop = n * ith // nth, n * (ith + 1) // nth
        if stop > first:
            _read(params.data + 256 * first, stop - first, params.scratch + SCRATCH_BYTES * ith)

    return read
