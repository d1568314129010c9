"""Flash attention for tasks of 2 to 8 rows whose cache holds no more than f16 does: products of pairs.

It uses the blocks of attention_few.py with twice as many products per instruction, the tiles of pair_tiles.py and the
rounding of attention_pairs.py. Q is [chunk of 32 columns][row][16][2] with a scale per row, P [row][position].
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention_few import (
    load_q,
    make_add_values,
    make_dot_block,
    make_flash_units,
    make_soft_max_tile,
)
from ikcli.backends.cpu.kernels.attention_tasks import CORRECTION, UNIT, kv_head_of, tile_chunk
from ikcli.backends.cpu.kernels.pair_codes import TOP, pairs_of, rounded, row_factor, row_scale
from ikcli.backends.cpu.kernels.pair_sizes import make_row_size
from ikcli.backends.cpu.kernels.pair_tiles import LEAST, SUM, k_scales, make_stage_pairs, pair_chunk, v_scales, v_tops
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.backends.cpu.params_attention import STATS_BYTES
from ikcli.native.jit import inline, merge
from ikcli.native.simd.dot import store_i16x32
from ikcli.native.simd.vec import (
    bcast_f32x16,
    lane_index,
    ld_f32,
    load_f32x16,
    reduce_add,
    reduce_max,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    store_f32x16,
    store_i32x16,
    vadd,
    vfma,
    vmax_fast,
    vmul,
    zero_f32x16,
)

_F0, _F1 = np.float32(0.0), np.float32(1.0)
REST = 32
row_size = make_row_size("f32")
_four_rows, _eight_rows = make_dot_block(4, 4, "i16"), make_dot_block(8, 2, "i16")
_add_values = make_add_values(4, 2, "i16", UNIT - CORRECTION)


@inline
def row_scales(q, padded, n_chunks):
    """Return the address of the row scales: one f32 per row, up to 8, behind all chunks of Q as f32.

    REST bytes on are those for the columns before V's, where V lies inside K's rows; 64 bytes more on their inverses.
    """
    return q + CHUNK_ROW * padded * n_chunks


@inline
def round_part(q, padded, first, end, scales):
    """Round chunks of 16 columns, f32, to chunks of 32 columns in place; rows get their scales."""
    for r in range(padded):
        norm, top = row_size(q + CHUNK_ROW * (first * padded + r), 16 * padded, end - first)
        factor = row_factor(norm, top)
        st_f32(scales + 4 * r, row_scale(norm, factor))
        st_f32(scales + 64 + 4 * r, factor)
    for c in range(first >> 1, end >> 1):
        for r in range(padded):
            src, factor = q + CHUNK_ROW * (2 * c * padded + r), splat_f32x16(ld_f32(scales + 64 + 4 * r))
            low, high = rounded(load_f32x16(src), factor), rounded(load_f32x16(src + CHUNK_ROW * padded), factor)
            store_i32x16(q + CHUNK_ROW * (c * padded + r), pairs_of(low, high))


@inline
def scale_scores(s, n, q_scale, k_scale):
    """Turn a row of sums of products of n positions into scores."""
    for i in range(0, n, 16):
        x = vmul(load_f32x16(s + 4 * i), load_f32x16(k_scale + 4 * i))
        store_f32x16(s + 4 * i, vmul(x, bcast_f32x16(q_scale)))


@inline
def scale_parts(s, n, q_scale, k_scale, v_scale, rest):
    """Turn the sums over V's columns and over those before, `rest` bytes behind them, into scores."""
    for i in range(0, n, 16):
        x = vmul(load_f32x16(s + rest + 4 * i), load_f32x16(k_scale + 4 * i))
        y = vmul(load_f32x16(s + 4 * i), load_f32x16(v_scale + 4 * i))
        store_f32x16(s + 4 * i, vfma(y, bcast_f32x16(q_scale), vmul(x, bcast_f32x16(q_scale + REST))))


@inline
def round_p(s, n, v_scale, v_top, unit):
    """Round a row of n weights to pairs in place; the factor on sums of products with them goes to `unit`."""
    zero = zero_f32x16()
    sums, largest = zero, zero
    for i in range(0, n, 16):
        here, p = splat_i32x16(n - i), load_f32x16(s + 4 * i)
        scaled = select_less_i32(lane_index(), here, vmul(p, load_f32x16(v_scale + 4 * i)), zero)
        sums = vadd(sums, select_less_i32(lane_index(), here, vmul(p, load_f32x16(v_top + 4 * i)), zero))
        largest = vmax_fast(scaled, largest)
        store_f32x16(s + 4 * i, scaled)
    total = reduce_add(sums)
    factor = min(SUM / (total + LEAST), TOP / (reduce_max(largest) + LEAST))
    # adding 0 * total makes the output NaN where a row of V is not finite
    st_f32(unit, _F1 / factor + _F0 * total)
    wide = splat_f32x16(factor)
    for i in range(0, n, 32):
        store_i16x32(s + 2 * i, rounded(load_f32x16(s + 4 * i), wide), rounded(load_f32x16(s + 4 * i + 64), wide))


@merge
def scores(q, rows, k, k_chunk, n, n_chunks, s, s_stride):
    """Compute s[rows][n], rows a multiple of 4; up to 3 positions more are written."""
    if rows & 7 == 0:
        for r in range(0, rows, 8):
            for t in range(0, n, 2):
                at = s + r * s_stride + 4 * t
                _eight_rows(q + CHUNK_ROW * r, CHUNK_ROW * rows, k + CHUNK_ROW * t, k_chunk, n_chunks, at, s_stride)
    else:
        for t in range(0, n, 4):
            for r in range(0, rows, 4):
                at = s + r * s_stride + 4 * t
                _four_rows(q + CHUNK_ROW * r, CHUNK_ROW * rows, k + CHUNK_ROW * t, k_chunk, n_chunks, at, s_stride)


@inline
def in_fours(rows):
    return (rows + 3) & ~3


def make_flash_few_pairs(k_type, v_type, staging, more=""):
    """Return flash_attn for 2 to 8 rows per task; same parameters. `staging`: see make_flash_pairs."""
    stage, in_parts = make_stage_pairs(k_type, v_type, staging == "direct"), v_type == "view"
    soft_max_tile = make_soft_max_tile(more)

    @inline
    def prepare(params, token, unit, rows, q, tmp):
        padded, chunks, first = in_fours(rows), params.k_chunks, 0
        scales = row_scales(q, padded, chunks)
        load_q(params, token, unit, rows, padded, q)
        if in_parts:
            first = params.v_chunk
            round_part(q, padded, 0, first, scales + REST)
        round_part(q, padded, first, chunks, scales)

    @merge
    def attend(params, q, k, v, s, o, stats, rows, n, tile):
        s_stride, chunks, k_chunk = 4 * (params.tile + 16), params.k_chunks, tile_chunk(params)
        v_chunks = (params.v_cols + 15) >> 4
        padded = in_fours(rows)
        first, rest = params.v_chunk >> 1, padded * s_stride
        if in_parts:
            scores(q, padded, k, k_chunk, n, first, s + rest, s_stride)
            at = q + CHUNK_ROW * padded * first
            scores(at, padded, k + first * k_chunk, k_chunk, n, (chunks >> 1) - first, s, s_stride)
        else:
            scores(q, padded, k, k_chunk, n, chunks >> 1, s, s_stride)
        for r in range(padded):
            at, q_scale = s + r * s_stride, row_scales(q, padded, chunks) + 4 * r
            if in_parts:
                scale_parts(at, n, q_scale, k_scales(params, k), v_scales(params, k), rest)
            else:
                scale_scores(at, n, q_scale, k_scales(params, k))
            if r < rows:
                soft_max_tile(params, at, n, tile, stats + 4 * r)
                round_p(at, n, v_scales(params, k), v_tops(params, k), stats + UNIT + 4 * r)
            else:
                st_f32(stats + CORRECTION + 4 * r, _F1)
        pairs = (n + 1) >> 1
        _add_values(s, s_stride, padded, v, pair_chunk(params), pairs, v_chunks, o, 64 * v_chunks, stats + CORRECTION)

    @merge
    def add_tile(params, segment, q, k, v, s, o, stats, rows, n, position, last):
        for u in range(params.units):
            values = stage(params, segment, kv_head_of(params, u), k, v, position, n)
            unit_q, unit_o = q + u * params.q_unit, o + u * params.o_unit
            attend(params, unit_q, k, values, s, unit_o, stats + u * STATS_BYTES, rows, n, position)

    return make_flash_units(prepare, add_tile, more)
