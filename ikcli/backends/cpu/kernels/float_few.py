"""Multiply float weights by few activation rows, in blocks of weight rows whose sums are reduced together.

Every element of the result has one accumulator of 16 lanes, one order of additions and one tree over the lanes,
whatever block it is computed in, so the kernel is batch-invariant.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.rowformat import PREFETCH_BYTES, ahead_in_rows
from ikcli.backends.cpu.kernels.sgemm import fma_f32x16, load_f32x16_at, loop, store_block, sum_lanes
from ikcli.backends.cpu.tile_modes import rounds_activations
from ikcli.native import isa
from ikcli.native.jit import inline
from ikcli.native.simd.dot import emit_dot_bf16
from ikcli.native.simd.emit import Emitter
from ikcli.native.simd.half import bf16_to_f32, half_to_f32, ld_bf16, ld_f16
from ikcli.native.simd.vec import const_vector, f32x16, i32x16, ld_f32, llvm_type, st_f32

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_IS_WIDE = isa.current().name == "avx512"
_HAS_PAIRS = rounds_activations()
# kind -> bytes of a weight and of an activation, columns of a cache line, one weight, one activation
KINDS = {
    "f32": (4, 4, 16, ld_f32, ld_f32),
    "f16": (2, 4, 32, ld_f16, ld_f32),
    "bf16": (2, 2, 32, ld_bf16, ld_bf16) if _HAS_PAIRS else (2, 4, 32, ld_bf16, ld_f32),
}


def _load_weights(builder, kind, address):
    if kind == "f32":
        return load_f32x16_at(builder, address)
    if kind == "bf16" and _HAS_PAIRS:
        return load_f32x16_at(builder, address, llvm_type(i32x16))
    bits = load_f32x16_at(builder, address, ir.VectorType(_I16, 16))
    return half_to_f32(builder, bits) if kind == "f16" else bf16_to_f32(builder, bits)


def _addresses(e, first, strides, n):
    """Return the addresses of n rows from one pointer per four of them.

    The pointers are hidden from LLVM, which would keep an address of every row in memory: a load more for each load.
    """
    hidden = [e.opaque(p) for p in first]
    return hidden, [e.b.add(hidden[r // 4], strides[r % 4 - 1]) if r % 4 else hidden[r // 4] for r in range(n)]


def _load_activations(builder, size, address):
    return load_f32x16_at(builder, address, llvm_type(i32x16 if size == 2 else f32x16))


def make_dots(kind, n_rows, n_tokens):
    """Return dots(w, row_bytes, n_steps, a, a_stride, out, out_stride): out[token][row].

    Rows of weights are whole cache lines. n_rows * n_tokens <= 16 is a power of two; n_steps >= 1.
    """
    w_size, a_size, cols, _, _ = KINDS[kind]
    parts = a_size // w_size  # vectors of a line
    multiply = emit_dot_bf16 if a_size == 2 else _multiply
    near = PREFETCH_BYTES // n_rows  # in every row

    @intrinsic
    def dots(typingctx, w, row_bytes, n_steps, a, a_stride, out, out_stride):
        def codegen(context, builder, sig, args):
            w, row_bytes, n_steps, a, a_stride, out, out_stride = args
            e = Emitter(builder)
            w_strides, a_strides = ([e.opaque(e.times(x, i)) for i in (1, 2, 3)] for x in (row_bytes, a_stride))
            groups = [e.offset(w, e.times(row_bytes, r)) for r in range(0, n_rows, 4)]
            n_groups, others = len(groups), e.times(row_bytes, n_rows - 1)

            def step(state):
                at, x_at, accs = state[:n_groups], state[n_groups], state[n_groups + 1 :]
                at, rows = _addresses(e, at, w_strides, n_rows)
                (x_at,), tokens = _addresses(e, [x_at], a_strides, n_tokens)
                if n_rows > 1:
                    ahead = ahead_in_rows(e, builder.sub(at[0], w), e.int(near), row_bytes, others)
                    for row in rows:
                        e.prefetch(e.offset(row, ahead))
                for part in range(parts):
                    w_part, a_part = (part * size * cols // parts for size in (w_size, a_size))
                    x = [_load_activations(builder, a_size, e.offset(t, a_part)) for t in tokens]
                    for r in range(n_rows):
                        y = _load_weights(builder, kind, e.offset(rows[r], w_part))
                        for t in range(n_tokens):
                            i = t * n_rows + r
                            accs[i] = multiply(builder, accs[i], y, x[t])
                at = [e.offset(p, w_size * cols) for p in at]
                return [*at, e.offset(x_at, a_size * cols), *accs]

            zeros = [const_vector(f32x16, [0.0] * 16)] * (n_rows * n_tokens)
            accs = loop(builder, n_steps, [*groups, a, *zeros], step)[n_groups + 1 :]
            sums = sum_lanes(builder, accs)
            store_block(builder, sums, n_tokens, n_rows, out, out_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return dots


def _multiply(builder, acc, x, y):
    return fma_f32x16(builder, x, y, acc)


def make_few(kind):
    """Return few(w, row_bytes, n, k, a, a_stride, m, out, out_stride): n weight rows times m activation rows."""
    w_size, a_size, cols, ld_w, ld_a = KINDS[kind]
    wide = 4 if _IS_WIDE else 1
    block1, one1 = make_dots(kind, 4, 1), make_dots(kind, 1, 1)
    block4, one4 = (make_dots(kind, 4, 4), make_dots(kind, 1, 4)) if _IS_WIDE else (block1, one1)

    @inline
    def rows_of_one(w, row_bytes, n, steps, a, out):
        r = 0
        while r + 4 <= n:
            block1(w + r * row_bytes, row_bytes, steps, a, 0, out + 4 * r, 0)
            r += 4
        while r < n:
            one1(w + r * row_bytes, row_bytes, steps, a, 0, out + 4 * r, 0)
            r += 1

    @inline
    def tokens_of_four(w, row_bytes, n, steps, a, a_stride, m, out, out_stride):
        """Multiply four rows (or one) by all tokens, `wide` of these at a time."""
        r = 0
        while r < n:
            four = r + 4 <= n
            row = w + r * row_bytes
            for t in range(0, m - wide + 1, wide):
                x, y = a + t * a_stride, out + t * out_stride + 4 * r
                if four:
                    block4(row, row_bytes, steps, x, a_stride, y, out_stride)
                else:
                    one4(row, row_bytes, steps, x, a_stride, y, out_stride)
            for t in range(m - m % wide, m):
                x, y = a + t * a_stride, out + t * out_stride + 4 * r
                if four:
                    block1(row, row_bytes, steps, x, a_stride, y, out_stride)
                else:
                    one1(row, row_bytes, steps, x, a_stride, y, out_stride)
            r += 4 if four else 1

    @inline
    def few(w, row_bytes, n, k, a, a_stride, m, out, out_stride):
        steps = k // cols
        if steps == 0:
            for t in range(m):
                for r in range(n):
                    st_f32(out + t * out_stride + 4 * r, 0.0)
        elif m == 1:
            rows_of_one(w, row_bytes, n, steps, a, out)
        else:
            tokens_of_four(w, row_bytes, n, steps, a, a_stride, m, out, out_stride)
        if steps * cols < k:
            for t in range(m):
                for r in range(n):
                    at = out + t * out_stride + 4 * r
                    total = ld_f32(at)
                    for i in range(steps * cols, k):
                        total += ld_w(w + r * row_bytes + w_size * i) * ld_a(a + t * a_stride + a_size * i)
                    st_f32(at, total)

    return few
