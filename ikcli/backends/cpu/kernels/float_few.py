"""Float weights times few activation rows: blocks of weight rows whose sums are reduced together.

Every element of the result has one accumulator of 16 lanes, one order of additions and one tree over the lanes,
whatever block it is computed in, so what a token gets does not depend on how many tokens there are.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.sgemm import fma_f32x16, load_f32x16_at, loop, offset, sum_lanes
from ikcli.native import isa
from ikcli.native.jit import inline
from ikcli.native.simd.dot import emit_dot_bf16
from ikcli.native.simd.emit import Emitter
from ikcli.native.simd.vec import (
    const_vector,
    f32x16,
    half_to_f32,
    i32x16,
    ld_bf16,
    ld_f16,
    ld_f32,
    llvm_type,
    pointer,
    st_f32,
)

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_TALL = 16 if isa.current().name == "avx512" else 4  # weight rows of a block for one activation row
_LONG = 2048  # columns from which rows are read four at a time, as long streams
# kind -> bytes of a weight and of an activation, columns of a vector, one weight, one activation
KINDS = {"f32": (4, 4, 16, ld_f32, ld_f32), "f16": (2, 4, 16, ld_f16, ld_f32), "bf16": (2, 2, 32, ld_bf16, ld_bf16)}


def _load_weights(builder, kind, address):
    if kind == "f32":
        return load_f32x16_at(builder, address)
    if kind == "f16":
        return half_to_f32(builder, load_f32x16_at(builder, address, ir.VectorType(_I16, 16)))
    return load_f32x16_at(builder, address, llvm_type(i32x16))


def _row_pointers(builder, groups, strides, n):
    """Addresses of n rows: one pointer per four of them, to which a processor adds a stride while loading."""
    return [builder.add(groups[r // 4], strides[r % 4]) if r % 4 else groups[r // 4] for r in range(n)]


def make_dots(kind, n_rows, n_tokens):
    """dots(w, row_bytes, n_steps, a, a_stride, out, out_stride): out[token][row] of whole vectors of columns.

    n_rows * n_tokens <= 16 is a power of two; n_steps >= 1.
    """
    w_size, a_size, cols, _, _ = KINDS[kind]

    @intrinsic
    def dots(typingctx, w, row_bytes, n_steps, a, a_stride, out, out_stride):
        def codegen(context, builder, sig, args):
            w, row_bytes, n_steps, a, a_stride, out, out_stride = args
            n_groups = -(-n_rows // 4)
            strides = [None, row_bytes, builder.shl(row_bytes, ir.Constant(row_bytes.type, 1))]
            strides.append(builder.add(strides[2], row_bytes))
            four, sixteen = (builder.mul(row_bytes, ir.Constant(row_bytes.type, n)) for n in (4, 16))
            groups = [w]
            for _ in range(1, n_groups):
                groups.append(builder.add(groups[-1], four))
            tokens = [a]
            for _ in range(1, n_tokens):
                tokens.append(builder.add(tokens[-1], a_stride))

            def step(state):
                at, xs, accs = state[:n_groups], state[n_groups : n_groups + n_tokens], state[n_groups + n_tokens :]
                x = [load_f32x16_at(builder, t, llvm_type(i32x16 if kind == "bf16" else f32x16)) for t in xs]
                out = [None] * (n_rows * n_tokens)
                for r, address in enumerate(_row_pointers(builder, at, strides, n_rows)):
                    y = _load_weights(builder, kind, address)
                    if n_rows == 16:  # rows are short: ask for the same place of the next block
                        Emitter(builder).prefetch(builder.add(address, sixteen))
                    for t in range(n_tokens):
                        i = t * n_rows + r
                        multiply = emit_dot_bf16 if kind == "bf16" else _multiply
                        out[i] = multiply(builder, accs[i], y, x[t])
                at = [offset(builder, p, w_size * cols) for p in at]
                return [*at, *(offset(builder, p, a_size * cols) for p in xs), *out]

            zeros = [const_vector(f32x16, [0.0] * 16)] * (n_rows * n_tokens)
            accs = loop(builder, n_steps, [*groups, *tokens, *zeros], step)[n_groups + n_tokens :]
            sums = sum_lanes(builder, accs)
            for t in range(n_tokens):
                pick = ir.Constant(ir.VectorType(_I32, n_rows), [t * n_rows + r for r in range(n_rows)])
                row = builder.shuffle_vector(sums, sums, pick)
                builder.store(row, pointer(builder, out, row.type), align=1)
                out = builder.add(out, out_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return dots


def _multiply(builder, acc, x, y):
    return fma_f32x16(builder, x, y, acc)


def make_few(kind):
    """few(w, row_bytes, n, k, a, a_stride, m, out, out_stride): n weight rows times m activation rows."""
    w_size, a_size, cols, ld_w, ld_a = KINDS[kind]
    tall, wide = make_dots(kind, _TALL, 1), _TALL // 4
    block1, one1 = make_dots(kind, 4, 1), make_dots(kind, 1, 1)
    block4, one4 = (make_dots(kind, 4, 4), make_dots(kind, 1, 4)) if wide == 4 else (block1, one1)

    @inline
    def rows_of_one(w, row_bytes, n, steps, a, out):
        r = 0
        if steps * cols < _LONG:
            while r + _TALL <= n:
                tall(w + r * row_bytes, row_bytes, steps, a, 0, out + 4 * r, 0)
                r += _TALL
        while r + 4 <= n:
            block1(w + r * row_bytes, row_bytes, steps, a, 0, out + 4 * r, 0)
            r += 4
        while r < n:
            one1(w + r * row_bytes, row_bytes, steps, a, 0, out + 4 * r, 0)
            r += 1

    @inline
    def tokens_of_four(w, row_bytes, n, steps, a, a_stride, m, out, out_stride):
        """Four rows (or one) times all tokens, `wide` of these at a time."""
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
