"""Stage rows of a q8_0 cache as tiles for products of pairs (pair_tiles.py), without going through f32.

A number of a row is code * 2**8 times its block's share of the row's scale: the upper half of one 16-bit product. The
share follows from the norm of the row, for which the squares of the codes are summed. Rows of V are the same integers,
two positions side by side, so that V inside K's rows costs no second conversion.
"""

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.attention_tasks import k_part, part_row, tile_chunk, v_part
from ikcli.backends.cpu.kernels.pair_codes import TINY, lane_scales, rounded
from ikcli.backends.cpu.kernels.pair_tiles import (
    ROWS,
    k_columns,
    k_scales,
    make_both,
    pair_chunk,
    row_space,
    v_columns,
    v_scales,
    v_tops,
)
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW, load_f32x16_at, loop, offset, rows_left, strided, sum_lanes
from ikcli.native.jit import inline, merge
from ikcli.native.simd.dot import emit_dot, emit_upper_products
from ikcli.native.simd.half import load_f16x16
from ikcli.native.simd.vec import (
    bcast_f32x16,
    call_llvm,
    f32x8,
    i16x32,
    i32x8,
    llvm_type,
    load_f32x16,
    magnitude,
    pointer,
    splat_f32x16,
    splat_value,
    store_f32x16,
    store_i32x16,
    vadd,
    vdiv,
    vmin,
    vmul,
    vsqrt,
)

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_BLOCK = 34  # bytes
_SHARE, _MOST_SHARE = np.float32(128), np.float32(32767)  # 2**15 over the 2**8 of a code
_NORM = np.float32(32500)  # of rows: a block with a code of 127 has a share below 2**15 even if it is all there is
_F1 = np.float32(1.0)
_MOST = np.float32(32600)  # number of a row: largest share and code


# --- a row -----------------------------------------------------------------------------------------------------------
@intrinsic
def gather_scales(typingctx, row, n_blocks, dst):
    """Copy the half floats of a row's blocks, one after the other."""

    def codegen(context, builder, sig, args):
        row, n_blocks, dst = args

        def block(state):
            at, to = state
            half = builder.load(pointer(builder, at, _I16), align=1)
            builder.store(half, pointer(builder, to, _I16), align=1)
            return [offset(builder, at, _BLOCK), offset(builder, to, 2)]

        loop(builder, n_blocks, [row, dst], block)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


@intrinsic
def sum_squares(typingctx, row, stride, n_left, n_blocks, squares, squares_stride, dst):
    """Sum the squares of 4 adjacent rows, of which only n_left are read; `squares`: those of their blocks' scales."""

    def codegen(context, builder, sig, args):
        row, stride, n_left, n_blocks, squares, squares_stride, dst = args
        rows = rows_left(builder, row, stride, 4, n_left)
        all_squares = strided(builder, squares, squares_stride, 4)

        def block(state):
            at, four, *accs = state
            out = []
            for row, squares, acc in zip(rows, all_squares, accs, strict=True):
                codes = pointer(builder, offset(builder, builder.add(row, at), 2), ir.VectorType(_I8, 32))
                codes = magnitude(builder, builder.load(codes, align=1))
                total = emit_dot(builder, ir.Constant(llvm_type(i32x8), None), codes, codes, 8)
                square = splat_value(builder, f32x8, load_f32x16_at(builder, builder.add(squares, four), _F32))
                total = builder.sitofp(total, acc.type)
                out.append(call_llvm(builder, "llvm.fma.v8f32", acc.type, [total, square, acc]))
            return [offset(builder, at, _BLOCK), offset(builder, four, 4), *out]

        start = [ir.Constant(_I64, 0)] * 2 + [ir.Constant(llvm_type(f32x8), None)] * 4
        _, _, *accs = loop(builder, n_blocks, start, block)
        sums = sum_lanes(builder, accs)
        builder.store(sums, pointer(builder, dst, sums.type), align=1)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7), codegen


def _scaled_codes(builder, block, share):
    """Return the numbers of a block as i16x32."""
    t = llvm_type(i16x32)
    codes = builder.load(pointer(builder, offset(builder, block, 2), ir.VectorType(_I8, 32)), align=1)
    codes = builder.shl(builder.sext(codes, t), ir.Constant(t, [8] * 32))
    share = splat_value(builder, i16x32, builder.load(pointer(builder, share, _I16), align=1))
    return emit_upper_products(builder, codes, share)


def _make_store_codes(in_k, in_v):
    """Return store_codes(x, y, n_blocks, x_shares, y_shares, k, k_chunk, v, v_chunk).

    It stores blocks >= 1 of two rows as K, V or both. Shares are i32 of which the lower half counts.
    """
    low, high = ([i + 16 * h + 32 * j for i in range(16) for j in range(2)] for h in range(2))

    @intrinsic
    def store_codes(typingctx, x, y, n_blocks, x_shares, y_shares, k, k_chunk, v, v_chunk):
        def codegen(context, builder, sig, args):
            x, y, n_blocks, x_shares, y_shares, k, k_chunk, v, v_chunk = args

            def put(value, at):
                builder.store(value, pointer(builder, at, value.type), align=1)

            def block(state):
                x, y, x_share, y_share, kt, vt = state
                a, b = _scaled_codes(builder, x, x_share), _scaled_codes(builder, y, y_share)
                if in_k:
                    put(a, kt)
                    put(b, offset(builder, kt, CHUNK_ROW))
                    kt = builder.add(kt, k_chunk)
                if in_v:
                    for pick in (low, high):
                        put(builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 32), pick)), vt)
                        vt = builder.add(vt, v_chunk)
                return [offset(builder, x, _BLOCK), offset(builder, y, _BLOCK), offset(builder, x_share, 4),
                        offset(builder, y_share, 4), kt, vt]  # fmt: skip

            loop(builder, n_blocks, [x, y, x_shares, y_shares, k, v], block)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), codegen

    return store_codes


_store_k, _store_v, _store_both = (_make_store_codes(*which) for which in ((True, False), (False, True), (True, True)))


@inline
def find_shares(row, stride, n, n_blocks, halves, squares, shares, scales, tops):
    """Find the shares of the blocks of up to 16 rows, i32, from their scales, half floats.

    The rows' scales go to `scales`.
    """
    wide = (n_blocks + 15) & ~15
    for i in range(n):
        for j in range(0, n_blocks, 16):
            s = load_f16x16(halves + 2 * (wide * i + j))
            store_f32x16(squares + 4 * (wide * i + j), vmul(s, s))
    for i in range(0, n, 4):
        sum_squares(row + i * stride, stride, n - i, n_blocks, squares + 4 * wide * i, 4 * wide, scales + 4 * i)
    norms = load_f32x16(scales)
    factors = vdiv(splat_f32x16(_NORM), vsqrt(vadd(norms, splat_f32x16(TINY))))
    store_f32x16(scales, lane_scales(norms, factors))
    store_f32x16(tops, vmul(load_f32x16(scales), splat_f32x16(_MOST)))
    store_f32x16(squares, vmul(factors, splat_f32x16(_SHARE)))
    for i in range(n):
        factor = bcast_f32x16(squares + 4 * i)
        for j in range(0, n_blocks, 16):
            share = vmin(vmul(load_f16x16(halves + 2 * (wide * i + j)), factor), splat_f32x16(_MOST_SHARE))
            store_i32x16(shares + 4 * (wide * i + j), rounded(share, splat_f32x16(_F1)))


# --- tiles -----------------------------------------------------------------------------------------------------------
@inline
def store_k_rows(params, x, y, n_blocks, x_shares, y_shares, k, v):
    _store_k(x, y, n_blocks, x_shares, y_shares, k, tile_chunk(params), v, 0)


@inline
def store_v_rows(params, x, y, n_blocks, x_shares, y_shares, k, v):
    _store_v(x, y, n_blocks, x_shares, y_shares, k, 0, v, pair_chunk(params))


@inline
def store_both_rows(params, x, y, n_blocks, x_shares, y_shares, k, v):
    """Store two rows as both, where V is the end of K's rows."""
    k_chunk, v_chunk = tile_chunk(params), pair_chunk(params)
    before, inside = params.v_chunk >> 1, params.v_cols >> 5
    _store_k(x, y, before, x_shares, y_shares, k, k_chunk, v, 0)
    at, share, k = _BLOCK * before, 4 * before, k + before * k_chunk
    _store_both(x + at, y + at, inside, x_shares + share, y_shares + share, k, k_chunk, v, v_chunk)


def _make_stage_part(part_of, columns, store_rows, scales_of):
    """Return stage(params, segment, kv_head, k, v, position, n): n rows of a part, `columns(params)` wide."""

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        part = part_of(params)
        n_blocks, stride = columns(params) >> 5, part.row_bytes
        row, element = part_row(params, part, segment, kv_head)
        row += position * stride + (element >> 5) * _BLOCK
        wide = (n_blocks + 15) & ~15
        halves = row_space(params, k)
        squares = halves + 2 * ROWS * wide
        shares = squares + 4 * ROWS * wide
        for first in range(0, n, ROWS):
            here = min(ROWS, n - first)
            for i in range(here):
                gather_scales(row + i * stride, n_blocks, halves + 2 * wide * i)
            scales, tops = scales_of(params, k) + 4 * first, v_tops(params, k) + 4 * first
            find_shares(row, stride, here, n_blocks, halves, squares, shares, scales, tops)
            for i in range(0, here, 2):
                x, x_shares = row + i * stride, shares + 4 * wide * i
                y, y_shares = (x + stride, x_shares + 4 * wide) if i + 1 < here else (x, x_shares)
                at = first + i
                store_rows(params, x, y, n_blocks, x_shares, y_shares, k + CHUNK_ROW * at, v + 32 * at)
            row += here * stride

    return stage


def make_stage_codes(v_type):
    """Return stage(params, segment, kv_head, k, v, position, n): both tiles of n positions.

    It returns the address of V.
    """
    if v_type == "view":
        return make_both(_make_stage_part(k_part, k_columns, store_both_rows, k_scales))
    stage_k = _make_stage_part(k_part, k_columns, store_k_rows, k_scales)
    return make_both(stage_k, _make_stage_part(v_part, v_columns, store_v_rows, v_scales))
