"""Flash attention for tasks of 2 to 16 rows and caches of bfloat16 or fewer bits: products of pairs.

As attention_few.py, whose blocks it uses with twice as many products per instruction, on the tiles of
pair_tiles.py. Q is [chunk of 32 columns][row][32] with a scale per row, P is rounded to pairs of positions.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import (
    CORRECTION,
    K_CHUNKS,
    LIMIT,
    O_UNIT,
    Q_UNIT,
    STATS_BYTES,
    TILE,
    UNITS,
    V_COLS,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.attention_few import (
    kv_head_of,
    load_q,
    make_add_values,
    make_dot_block,
    make_flash_units,
    soft_max_tile,
)
from ikcli.backends.cpu.kernels.common import word
from ikcli.backends.cpu.kernels.pair_tiles import (
    k_scales,
    make_stage_pairs,
    pair_chunk,
    rounded,
    row_factor,
    row_norm,
    row_scale,
)
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.native.jit import inline, merge
from ikcli.native.simd.dot import store_bf16x32, store_i16x32
from ikcli.native.simd.vec import (
    bcast_f32x16,
    ld_f32,
    ld_i32,
    load_f32x16,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vmul,
)

_F1 = np.float32(1.0)
_four_rows, _eight_rows = make_dot_block(4, 4, "i16"), make_dot_block(8, 2, "i16")
_add_values = make_add_values(4, 2, "bf16")


@inline
def row_scales(q, padded, n_chunks):
    """One f32 per row, behind all chunks of Q as f32; 64 bytes more for their inverses."""
    return q + CHUNK_ROW * padded * n_chunks


@inline
def round_q(q, padded, n_chunks):
    """Chunks of 16 columns, f32, become chunks of 32 columns in place; rows get their scales."""
    scales = row_scales(q, padded, n_chunks)
    for r in range(padded):
        norm = row_norm(q + CHUNK_ROW * r, CHUNK_ROW * padded, n_chunks)
        factor = row_factor(norm)
        st_f32(scales + 4 * r, row_scale(norm, factor))
        st_f32(scales + 64 + 4 * r, factor)
    for c in range(n_chunks >> 1):
        for r in range(padded):
            src, factor = q + CHUNK_ROW * (2 * c * padded + r), splat_f32x16(ld_f32(scales + 64 + 4 * r))
            low, high = rounded(load_f32x16(src), factor), rounded(load_f32x16(src + CHUNK_ROW * padded), factor)
            store_i16x32(q + CHUNK_ROW * (c * padded + r), low, high)


@inline
def scale_scores(s, n, q_scale, k_scale):
    """A row of sums of products of n positions becomes scores."""
    for i in range(0, n, 16):
        x = vmul(load_f32x16(s + 4 * i), load_f32x16(k_scale + 4 * i))
        store_f32x16(s + 4 * i, vmul(x, bcast_f32x16(q_scale)))


@inline
def round_p(s, n):
    """A row of n weights becomes pairs in place."""
    for i in range(0, n, 32):
        store_bf16x32(s + 2 * i, load_f32x16(s + 4 * i), load_f32x16(s + 4 * i + 64))


@merge
def scores(q, rows, k, k_chunk, n, n_chunks, s, s_stride):
    """s[rows][n], rows a multiple of 4; up to 3 positions more are written."""
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


@inline
def prepare(params, token, unit, rows, q, tmp):
    load_q(params, token, unit, rows, in_fours(rows), q)
    round_q(q, in_fours(rows), word(params, K_CHUNKS))


def make_flash_few_pairs(k_type, v_type):
    """flash_attn for 2 to 16 rows per task; same parameters. v_type "view": inside K's rows."""
    stage = make_stage_pairs(k_type, v_type)

    @merge
    def attend(params, q, k, v, s, o, stats, rows, n, tile):
        s_stride, chunks, v_chunks = 4 * (word(params, TILE) + 16), word(params, K_CHUNKS), word(params, V_COLS) >> 4
        padded = in_fours(rows)
        scores(q, padded, k, tile_chunk(params), n, chunks >> 1, s, s_stride)
        for r in range(padded):
            at = s + r * s_stride
            scale_scores(at, n, row_scales(q, padded, chunks) + 4 * r, k_scales(params, k))
            if r < rows:
                seen = max(0, min(n, ld_i32(stats + LIMIT + 4 * r) - tile))
                soft_max_tile(at, seen, n, stats + 4 * r)
            else:
                st_f32(stats + CORRECTION + 4 * r, _F1)
            round_p(at, n)
        pairs = (n + 1) >> 1
        _add_values(s, s_stride, padded, v, pair_chunk(params), pairs, v_chunks, o, 64 * v_chunks, stats + CORRECTION)

    @merge
    def add_tile(params, segment, q, k, v, s, o, stats, rows, n, position, last):
        for u in range(word(params, UNITS)):
            values = stage(params, segment, kv_head_of(params, u), k, v, position, n)
            unit_q, unit_o = q + u * word(params, Q_UNIT), o + u * word(params, O_UNIT)
            attend(params, unit_q, k, values, s, unit_o, stats + u * STATS_BYTES, rows, n, position)

    return make_flash_units(prepare, add_tile)
