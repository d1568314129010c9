"""Flash attention for tasks of 2 to 16 rows and caches of bfloat16 or fewer bits: products of pairs.

As attention_few.py, whose blocks it uses with twice as many products per instruction, on the tiles of
attention_pairs.py. Q is [chunk of 32 columns][row][32] with a scale per row, P is rounded to pairs of positions.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import (
    CORRECTION,
    FIRST_HEAD,
    GROUP,
    K_AT,
    K_CHUNKS,
    LIMIT,
    O_AT,
    O_UNIT,
    Q_UNIT,
    S_AT,
    SCRATCH,
    SCRATCH_BYTES,
    STATS_AT,
    STATS_BYTES,
    TILE,
    UNIT_HEADS,
    UNITS,
    V_AT,
    V_COLS,
    find_task,
    n_base_tasks,
    n_splits,
    segment_word,
    split_length,
    start_rows,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.attention_few import (
    find_slot,
    finish_unit,
    load_q,
    make_dot_block,
    make_values_block,
    soft_max_tile,
)
from ikcli.backends.cpu.kernels.attention_pairs import (
    k_scales,
    make_stage_pairs,
    pair_chunk,
    rounded,
    row_factor,
    row_norm,
    row_scale,
)
from ikcli.backends.cpu.kernels.common import SEG_POS, SEG_TOKEN, next_work, word
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
_four_chunks, _two_chunks = make_values_block(4, 4, "bf16"), make_values_block(4, 2, "bf16")


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


@merge
def add_values(p, p_stride, rows, v, v_chunk, n_pairs, n_chunks, o, o_stride, scale):
    """o[rows][16 * n_chunks] = o * scale + P V, rows a multiple of 4, n_chunks even."""
    c = 0
    while c < n_chunks:
        four = c + 4 <= n_chunks
        for r in range(0, rows, 4):
            at, weights, factor = o + r * o_stride + 64 * c, p + r * p_stride, scale + 4 * r
            if four:
                _four_chunks(weights, p_stride, v, v_chunk, n_pairs, at, o_stride, factor)
            else:
                _two_chunks(weights, p_stride, v, v_chunk, n_pairs, at, o_stride, factor)
        step = 4 if four else 2
        c += step
        v += step * v_chunk


def make_flash_few_pairs(k_type, v_type):
    """flash_attn for 2 to 16 rows per task; same parameters. v_type "view": inside K's rows."""
    stage = make_stage_pairs(k_type, v_type)

    @merge
    def add_tile(params, segment, unit, q, k, v, s, o, stats, rows, padded, n, tile):
        s_stride, heads, chunks = 4 * (word(params, TILE) + 16), word(params, UNIT_HEADS), word(params, K_CHUNKS)
        v_chunks, kv_head = word(params, V_COLS) >> 4, (word(params, FIRST_HEAD) + unit * heads) // word(params, GROUP)
        stage(params, segment, kv_head, k, v, tile, n)
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
        add_values(s, s_stride, padded, v, pair_chunk(params), pairs, v_chunks, o, 64 * v_chunks, stats + CORRECTION)

    def flash_few_pairs(params, ith, nth):
        n_base, units = n_base_tasks(params), word(params, UNITS)
        splits = n_splits(params, n_base, nth)
        heads, tile = word(params, UNIT_HEADS), word(params, TILE)
        q = word(params, SCRATCH) + ith * word(params, SCRATCH_BYTES)
        k, v, s = q + word(params, K_AT), q + word(params, V_AT), q + word(params, S_AT)
        o, stats = q + word(params, O_AT), q + word(params, STATS_AT)
        q_unit, o_unit = word(params, Q_UNIT), word(params, O_UNIT)
        while True:
            task = next_work(params, 1)
            if task >= n_base // units * splits:
                break
            base = task // splits * units
            segment, first, n_tokens, _ = find_task(params, base)
            rows, token = n_tokens * heads, segment_word(segment, SEG_TOKEN) + first
            padded = (rows + 3) & ~3
            position = segment_word(segment, SEG_POS) + first
            length = split_length(params, position + n_tokens, splits)
            begin = length * (task % splits)
            end = min(begin + length, position + n_tokens)
            if begin >= end:
                continue
            for u in range(units):
                load_q(params, token, u, rows, padded, q + u * q_unit)
                round_q(q + u * q_unit, padded, word(params, K_CHUNKS))
                start_rows(stats + u * STATS_BYTES, rows, heads, position, o + u * o_unit, o_unit)
            for at in range(begin, end, tile):
                n = min(tile, end - at)
                for u in range(units):
                    st = stats + u * STATS_BYTES
                    add_tile(params, segment, u, q + u * q_unit, k, v, s, o + u * o_unit, st, rows, padded, n, at)
            for u in range(units):
                slot = 0
                if length < position + n_tokens:
                    slot = find_slot(params, (base + u) * splits + task % splits)
                finish_unit(params, token, u, rows, o + u * o_unit, stats + u * STATS_BYTES, slot)

    return flash_few_pairs
