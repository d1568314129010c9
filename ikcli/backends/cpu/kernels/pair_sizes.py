"""Measure the rows of a tile that become integers: sums of squares and largest magnitudes (pair_tiles.py).

Rows of f16 and bf16 are squared by products of pairs of bfloat16, 32 numbers at a time, where the CPU has these.
"""

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.kv import LOAD16
from ikcli.backends.cpu.kernels.sgemm import fold_lanes, loop, offset, rows_left, sum_lanes
from ikcli.native import isa
from ikcli.native.jit import inline
from ikcli.native.simd.dot import emit_dot_bf16
from ikcli.native.simd.vec import (
    f32x16,
    i32x16,
    larger,
    llvm_type,
    pointer,
    reduce_add,
    reduce_max,
    st_f32,
    vabs,
    vadd,
    vfma,
    vmax_fast,
    zero_f32x16,
)

_I16, _I64 = ir.IntType(16), ir.IntType(64)
_I16X32, _I32X16 = ir.VectorType(_I16, 32), llvm_type(i32x16)
_F32X4 = ir.VectorType(ir.FloatType(), 4)
_ROWS = 4
_CUT = 1 + 2.0**-7  # bounds what three lost digits of a half float may add to it


def make_row_size(type_):
    """Return row_size(x, step, chunks): sum of squares and largest magnitude of a row.

    16 numbers lie at every `step`.
    """
    load = LOAD16[type_]

    @inline
    def row_size(x, step, chunks):
        a, b, c, d = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()  # so that no sum waits for the last one
        top, other, i, end = zero_f32x16(), zero_f32x16(), 0, chunks & ~3
        while i < end:
            y, z = load(x, i * step), load(x, (i + 1) * step)
            a, b, top, other = vfma(y, y, a), vfma(z, z, b), vmax_fast(vabs(y), top), vmax_fast(vabs(z), other)
            y, z = load(x, (i + 2) * step), load(x, (i + 3) * step)
            c, d, top, other = vfma(y, y, c), vfma(z, z, d), vmax_fast(vabs(y), top), vmax_fast(vabs(z), other)
            i += 4
        while i < chunks:
            y = load(x, i * step)
            a, top = vfma(y, y, a), vmax_fast(vabs(y), top)
            i += 1
        return reduce_add(vadd(vadd(a, b), vadd(c, d))), reduce_max(vmax_fast(top, other))

    return row_size


def _fill(t, x):
    return ir.Constant(t, [x] * t.count)


def _short_bf16(builder, bits):
    """Return magnitudes of bfloat16."""
    return builder.and_(bits, _fill(_I16X32, 0x7FFF))


def _short_f16(builder, bits):
    """Return magnitudes of half floats as bfloat16, 2**48 times smaller and truncated.

    0 and denormals give 2**-15 or more.
    """
    digits = builder.and_(builder.lshr(bits, _fill(_I16X32, 3)), _fill(_I16X32, 0x0FFF))
    return builder.or_(digits, _fill(_I16X32, 0x2000))


def _finish_bf16(builder, sums, tops):
    return sums, tops


def _finish_f16(builder, sums, tops):
    """Undo _short_f16; NaN for rows with a number that is not finite."""
    finite = builder.fcmp_ordered("<", tops, _fill(_F32X4, 2.0**-32))
    sums = builder.fmul(sums, _fill(_F32X4, 2.0**96 * _CUT**2))
    return builder.select(finite, sums, _fill(_F32X4, float("nan"))), builder.fmul(tops, _fill(_F32X4, 2.0**48 * _CUT))


_SHORT = {"f16": (_short_f16, _finish_f16), "bf16": (_short_bf16, _finish_bf16)}


def _make_four_sizes(type_):
    """Return four_sizes(x, stride, n_left, n, norms, tops) of 32 * n columns of four rows.

    Only n_left >= 1 rows are read.
    """
    short, finish = _SHORT[type_]

    @intrinsic
    def four_sizes(typingctx, x, stride, n_left, n, norms, tops):
        def codegen(context, builder, sig, args):
            x, stride, n_left, n, norms, tops = args
            rows = rows_left(builder, x, stride, _ROWS, n_left)

            def step(state):
                at, *both = state
                out = []
                for row, acc, top in zip(rows, both[:_ROWS], both[_ROWS:], strict=True):
                    bits = builder.load(pointer(builder, builder.add(row, at), _I16X32), align=1)
                    values = short(builder, bits)
                    pairs = builder.bitcast(values, _I32X16)
                    top = builder.select(builder.icmp_unsigned("<", top, values), values, top)
                    out.append((emit_dot_bf16(builder, acc, pairs, pairs), top))
                return [offset(builder, at, 64), *(s for s, _ in out), *(t for _, t in out)]

            zeros = [ir.Constant(llvm_type(f32x16), None)] * _ROWS + [ir.Constant(_I16X32, None)] * _ROWS
            _, *both = loop(builder, n, [ir.Constant(_I64, 0), *zeros], step)
            largest = []
            for top in both[_ROWS:]:
                pairs = builder.bitcast(top, _I32X16)
                low, high = builder.shl(pairs, _fill(_I32X16, 16)), builder.and_(pairs, _fill(_I32X16, 0xFFFF0000))
                largest.append(larger(builder, *(builder.bitcast(p, llvm_type(f32x16)) for p in (low, high))))
            sums = sum_lanes(builder, both[:_ROWS])
            sums, most = finish(builder, sums, fold_lanes(builder, largest, lambda a, b: larger(builder, a, b)))
            for values, to in ((sums, norms), (most, tops)):
                builder.store(values, pointer(builder, to, values.type), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6), codegen

    return four_sizes


def make_row_sizes(type_):
    """Return row_sizes(x, stride, n, chunks, norms, tops), which measures n rows of 16 * chunks numbers.

    It writes sums of squares and largest magnitudes, or a little more; f32, of which up to three more may be written.
    """
    row_size = make_row_size(type_)

    @inline
    def one_by_one(x, stride, n, chunks, norms, tops):
        for i in range(n):
            norm, top = row_size(x + i * stride, 16, chunks)
            st_f32(norms + 4 * i, norm)
            st_f32(tops + 4 * i, top)

    if type_ not in _SHORT or "avx512bf16" not in isa.current().features:
        return one_by_one
    four_sizes = _make_four_sizes(type_)

    @inline
    def row_sizes(x, stride, n, chunks, norms, tops):
        if chunks & 1 == 0:
            for i in range(0, n, _ROWS):
                four_sizes(x + i * stride, stride, n - i, chunks >> 1, norms + 4 * i, tops + 4 * i)
        else:
            one_by_one(x, stride, n, chunks, norms, tops)

    return row_sizes
