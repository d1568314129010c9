"""Rows of f16 as 16-bit integers, for many activation rows: twice the products per instruction of float32.

Each 64 columns of a row have a scale. Rounding weights and activations so costs less than rounding the activations to
f16 would, as long as no activation is very much larger than the rest of its block.
"""

from ikcli.backends.cpu.kernels.activations import integers_at
from ikcli.backends.cpu.kernels.gemm import pair_tile, unpack_float16
from ikcli.backends.cpu.kernels.pair_codes import lane_factors, lane_scales, pairs_of, rounded
from ikcli.backends.cpu.tile_modes import PAIRS_BLOCK
from ikcli.native.jit import inline, merge
from ikcli.native.simd.half import ld_f16
from ikcli.native.simd.vec import (
    load_f32x16,
    st_f32,
    store_f32x16,
    store_i32x16,
    vadd,
    vmax_fast,
    vmul,
    zero_f32x16,
)

_SCRATCH_AT = 48 << 10  # behind 512 columns of 32 rows


@inline
def _store_block(columns, dst, stride):
    """16 rows of 64 columns, f32 [column][row]: scales go to dst, pairs of columns to every `stride` bytes behind."""
    a, b, top = zero_f32x16(), zero_f32x16(), zero_f32x16()
    for c in range(0, PAIRS_BLOCK, 2):
        x, y = load_f32x16(columns + 64 * c), load_f32x16(columns + 64 * c + 64)
        square, other = vmul(x, x), vmul(y, y)
        a, b, top = vadd(a, square), vadd(b, other), vmax_fast(vmax_fast(square, other), top)
    norms = vadd(a, b)
    factors = lane_factors(norms, top)
    store_f32x16(dst, lane_scales(norms, factors))
    for half in range(0, PAIRS_BLOCK, 32):
        for c in range(half, half + 16):
            low, high = load_f32x16(columns + 64 * c), load_f32x16(columns + 64 * c + 1024)
            dst += stride
            store_i32x16(dst, pairs_of(rounded(low, factors), rounded(high, factors)))


def make_unpack_pairs(kind, rows):
    """unpack_tile(w, row_bytes, n, k0, kc, tile): n <= `rows` rows of columns k0 .. k0+kc-1.

    Missing rows repeat the last one, missing columns of a block are zero.
    """
    unpack = unpack_float16(kind)
    block_bytes = 4 * rows * (PAIRS_BLOCK // 2 + 1)

    @inline
    def columns_of(w, row_bytes, n, count, columns):
        full = count & ~15
        for i in range(0, full, 16):
            unpack(w + 2 * i, row_bytes, min(n, 16), columns + 64 * i, 64)
        for i in range(full, count):
            for r in range(16):
                st_f32(columns + 64 * i + 4 * r, ld_f16(w + min(r, n - 1) * row_bytes + 2 * i))
        for i in range(count, PAIRS_BLOCK):
            store_f32x16(columns + 64 * i, zero_f32x16())

    @merge
    def unpack_tile(w, row_bytes, n, k0, kc, tile):
        columns = tile + _SCRATCH_AT
        for r in range(0, rows, 16):
            first, dst = min(r, n - 1), tile + 4 * r
            for i in range(k0, k0 + kc, PAIRS_BLOCK):
                count = min(PAIRS_BLOCK, k0 + kc - i)
                columns_of(w + first * row_bytes + 2 * i, row_bytes, n - first, count, columns)
                _store_block(columns, dst, 4 * rows)
                dst += block_bytes

    return unpack_tile


def make_pair_step(rows, nt):
    """step(tile, k0, kc, k, a, a_stride, out, out_stride, n): a tile of `rows` times nt activation rows."""
    micro = pair_tile(rows // 16, nt)

    @inline
    def step(tile, k0, kc, k, a, a_stride, out, out_stride, n):
        blocks = (kc + PAIRS_BLOCK - 1) // PAIRS_BLOCK
        micro(tile, blocks, a + integers_at(k, k0), a_stride, out, out_stride, n, k0)

    return step
