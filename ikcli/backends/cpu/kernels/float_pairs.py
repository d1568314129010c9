"""Convert rows of f16 to 16-bit integers, for many activation rows: twice the products per instruction of float32.

Each PAIRS_BLOCK columns of a row have a scale. Rounding weights and activations this way costs less than rounding the
activations to f16 would, as long as no activation is very much larger than the rest of its block.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activations import integers_at
from ikcli.backends.cpu.kernels.gemm import load_floats, pair_tile, row_addresses
from ikcli.backends.cpu.kernels.pair_codes import ROUND, lane_factors, lane_scales
from ikcli.backends.cpu.kernels.sgemm import fma_f32x16, fold_lanes
from ikcli.backends.cpu.tile_modes import PAIRS_BLOCK
from ikcli.native.jit import inline, merge
from ikcli.native.simd.emit import Emitter, transpose16
from ikcli.native.simd.half import ld_f16, st_f16
from ikcli.native.simd.vec import (
    const_vector,
    f32x16,
    larger,
    llvm_type,
    load_f32x16,
    store_f32x16,
    vsqrt,
)

_SCRATCH_AT = 48 << 10  # behind 512 columns of 32 rows: factors and squares, then 16 rows that end in their last block
_WORDS = ir.VectorType(ir.IntType(16), 32)


@intrinsic
def _row_norms(typingctx, src, row_bytes, n, dst):
    """Compute sums of squares and largest squares of 16 rows of PAIRS_BLOCK columns: two vectors.

    The last of n rows is repeated.
    """

    def codegen(context, builder, sig, args):
        src, row_bytes, n, dst = args
        e = Emitter(builder)
        sums, tops = [], []
        for at in row_addresses(e, src, row_bytes, n):
            total = top = None
            for c in range(0, PAIRS_BLOCK, 16):
                x = load_floats(e, "f16", e.offset(at, 2 * c))
                square = builder.fmul(x, x)
                top = square if top is None else larger(builder, top, square)
                total = square if total is None else fma_f32x16(builder, x, x, total)
            sums.append(total)
            tops.append(top)
        e.store(fold_lanes(builder, sums, builder.fadd), dst)
        e.store(fold_lanes(builder, tops, functools.partial(larger, builder)), e.offset(dst, 64))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


@intrinsic
def _store_pairs(typingctx, src, row_bytes, n, factors, dst, stride):
    """Store 16 rows (the last of n repeated) of PAIRS_BLOCK columns times their factors: pairs every `stride` bytes."""

    def codegen(context, builder, sig, args):
        src, row_bytes, n, factors, dst, stride = args
        e = Emitter(builder)
        low_words = ir.Constant(ir.VectorType(ir.IntType(32), 32), list(range(0, 64, 2)))
        rounding = const_vector(f32x16, [float(ROUND)] * 16)
        rows = row_addresses(e, src, row_bytes, n)
        with e.loop(e.int(PAIRS_BLOCK // 32)) as i:
            pairs = []
            for r, at in enumerate(rows):
                factor = e.splat_f32(e.offset(factors, 4 * r))
                halves = [load_floats(e, "f16", e.offset(at, e.times(i, 64), 32 * half)) for half in range(2)]
                words = [builder.bitcast(fma_f32x16(builder, x, factor, rounding), _WORDS) for x in halves]
                pairs.append(builder.bitcast(builder.shuffle_vector(*words, low_words), llvm_type(f32x16)))
            at = e.offset(dst, builder.mul(e.times(i, 16), stride))
            for j, column in enumerate(transpose16(builder, pairs)):
                e.store(column, e.offset(at, e.times(stride, j)))
        return context.get_dummy_value()

    return types.void(*[types.intp] * 6), codegen


def make_unpack_pairs(rows):
    """Return unpack_tile(w, row_bytes, n, k0, kc, tile): n <= `rows` rows of f16, columns k0 .. k0+kc-1.

    Missing rows repeat the last one, missing columns of a block are zero.
    """
    stride = 4 * rows
    block_bytes = stride * (PAIRS_BLOCK // 2 + 1)

    @inline
    def put_block(w, row_bytes, n, room, dst):
        _row_norms(w, row_bytes, n, room)
        norms, tops = load_f32x16(room), vsqrt(load_f32x16(room + 64))
        factors = lane_factors(norms, tops)
        store_f32x16(room, factors)
        store_f32x16(dst, lane_scales(norms, factors))
        _store_pairs(w, row_bytes, n, room, dst + stride, stride)

    @inline
    def copy_last(w, row_bytes, n, count, copy):
        """Copy the first `count` columns of n <= 16 rows, with zeros behind."""
        for r in range(n):
            to = copy + 2 * PAIRS_BLOCK * r
            for i in range(count):
                st_f16(to + 2 * i, ld_f16(w + r * row_bytes + 2 * i))
            for i in range(count, PAIRS_BLOCK):
                st_f16(to + 2 * i, 0)

    @merge
    def unpack_tile(w, row_bytes, n, k0, kc, tile):
        room = tile + _SCRATCH_AT
        for r in range(0, rows, 16):
            first, dst = min(r, n - 1), tile + 4 * r
            at, valid = w + first * row_bytes + 2 * k0, min(n - first, 16)
            for i in range(0, kc, PAIRS_BLOCK):
                if i + PAIRS_BLOCK <= kc:
                    put_block(at + 2 * i, row_bytes, valid, room, dst)
                else:
                    copy_last(at + 2 * i, row_bytes, valid, kc - i, room + 128)
                    put_block(room + 128, 2 * PAIRS_BLOCK, valid, room, dst)
                dst += block_bytes

    return unpack_tile


def make_pair_step(rows, nt):
    """Return step(tile, k0, kc, k, a, a_stride, out, out_stride, n): a tile of `rows` times nt activation rows."""
    micro = pair_tile(rows // 16, nt)

    @inline
    def step(tile, k0, kc, k, a, a_stride, out, out_stride, n):
        blocks = (kc + PAIRS_BLOCK - 1) // PAIRS_BLOCK
        micro(tile, blocks, a + integers_at(k, k0), a_stride, out, out_stride, n, k0)

    return step
