"""Attention with stored scores (no flash attention): K*Q, soft-max, times V, as three kernels per step of heads.

Scores are [head of the step][token][position] f32, position counted within the token's sequence. Products have
positions (K*Q) or columns of V as vector lanes; Q and the probabilities are staged as chunks (sgemm.py). V may be a
transposed cache: row = column of V, element = cell. The parameter words are those of flash attention, with other
meanings below.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import make_stage_k, stage_q
from ikcli.backends.cpu.kernels.attention_mask import load_cap, make_capped
from ikcli.backends.cpu.kernels.attention_tasks import (
    LOWEST,
    find_task,
    kv_head_of,
    make_first_seen,
    n_base_tasks,
    part_row,
    segment_word,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.basic import copy_f32
from ikcli.backends.cpu.kernels.common import (
    N_SEG,
    N_TOKENS,
    POS,
    SEG_CELL,
    SEG_N_KV,
    SEG_POS,
    SEG_TOKEN,
    SEG_WORDS,
    SEGMENTS,
    next_work,
    state_word,
)
from ikcli.backends.cpu.kernels.kv import make_stage
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW, MAX_VECTORS, make_rows_product, transpose16
from ikcli.backends.cpu.params_attention import FullParams
from ikcli.native.jit import inline
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    lane_index,
    ld_f32,
    ld_i32,
    load_f32x16,
    reduce_add,
    reduce_max,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    vadd,
    vfma,
    vmax_fast,
    vmul,
    vsub,
    zero_f32x16,
)

SPAN_TILES = 4  # tiles of positions per K*Q task
PANEL = MAX_VECTORS  # chunks of V columns per V task

_F0, _F1 = np.float32(0.0), np.float32(1.0)
_stage_f32 = make_stage("f32")


@inline
def score_row(params, token, unit, row):
    """Return the address of the scores of one row of a task."""
    heads = params.unit_heads
    index = (unit * heads + row % heads) * params.score_rows + token + row // heads
    return params.scores + index * params.score_bytes


@inline
def most_positions(params):
    """Return the positions of the longest sequence in the micro-batch."""
    most, segment = 0, state_word(params, SEGMENTS)
    for i in range(state_word(params, N_SEG)):
        most = max(most, segment_word(segment + 8 * SEG_WORDS * i, SEG_N_KV))
    return most


@inline
def store_scores(params, token, unit, rows, position, n, products):
    """Copy products [row][TILE] to the score rows, n positions from `position` on."""
    for r in range(rows):
        copy_f32(score_row(params, token, unit, r) + 4 * position, products + 4 * params.tile * r, n)


def make_kq(k_types, more=""):
    """Return a kernel for the scores of one task: (segment, block of tokens, unit of heads, span of positions)."""
    stage_k, product, first_seen = make_stage_k(k_types), make_rows_product(False), make_first_seen(more)

    @inline
    def scores_of_tile(params, q, q_chunk, rows, k, kt, products, n):
        tile, chunks = params.tile, params.k_chunks
        vectors = (n + 15) >> 4
        for c in range(chunks):
            for v in range(vectors):
                src = k + c * tile_chunk(params) + 16 * v * CHUNK_ROW
                transpose16(src, CHUNK_ROW, kt + 64 * (c * tile + v), 4 * tile)
        for at in range(0, vectors, MAX_VECTORS):
            x = 64 * at
            wide = min(MAX_VECTORS, vectors - at)
            product(wide, q, q_chunk, rows, kt + x, 4 * tile, chunks, products + x, 4 * tile)

    @kernel(FullParams)
    def kq(params, ith, nth):
        tile, heads, chunks = params.tile, params.unit_heads, params.k_chunks
        span = SPAN_TILES * tile
        spans = (most_positions(params) + span - 1) // span
        q = params.scratch + ith * params.scratch_bytes
        k, kt, products = q + params.k_at, q + params.v_at, q + params.s_at
        n_tasks = n_base_tasks(params) * spans
        scale = splat_f32x16(params.scale)
        while True:
            task = next_work(params, 1)
            if task >= n_tasks:
                break
            segment, first, n_tokens, unit = find_task(params, task // spans)
            position = segment_word(segment, SEG_POS) + first
            begin = task % spans * span
            end = min(begin + span, position + n_tokens)
            begin = max(begin, first_seen(params, position))
            if begin >= end:
                continue
            rows, token = n_tokens * heads, segment_word(segment, SEG_TOKEN) + first
            q_chunk = CHUNK_ROW * (((rows + 15) & ~15) + 1)
            for r in range(rows):
                stage_q(params, token, unit, r, q + CHUNK_ROW * r, q_chunk)
                for c in range(chunks):
                    at = q + CHUNK_ROW * r + c * q_chunk
                    store_f32x16(at, vmul(load_f32x16(at), scale))
            for position in range(begin, end, tile):
                n = min(tile, end - position)
                stage_k(params, segment, kv_head_of(params, unit), k, tile_chunk(params), position, n)
                scores_of_tile(params, q, q_chunk, rows, k, kt, products, n)
                store_scores(params, token, unit, rows, position, n, products)

    return kq


def make_soft_max_row(more):
    """Return soft_max_row(params, s, first, n, sink): probabilities of the scores [first, n) in place.

    Zeros fill up whole vectors. NaN and Inf make all probabilities NaN. `sink`: address of the head's sink.
    """
    capped, has_windows, has_sinks = make_capped(more), "w" in more, "s" in more

    @inline
    def soft_max_row(params, s, first, n, sink):
        lowest, zero, cap = splat_f32x16(LOWEST), zero_f32x16(), load_cap(params)
        begin, top = first & ~15, lowest
        if has_sinks:
            top = splat_f32x16(ld_f32(sink))
        for i in range(begin, n, 16):
            x = capped(load_f32x16(s + 4 * i), cap)
            x = select_less_i32(lane_index(), splat_i32x16(n - i), x, lowest)
            if has_windows:
                x = select_less_i32(lane_index(), splat_i32x16(first - i), lowest, x)
            store_f32x16(s + 4 * i, x)
            top = vmax_fast(x, top)
        top = splat_f32x16(reduce_max(top))
        total, nan = zero, zero
        for i in range(begin, n, 16):
            x = vsub(load_f32x16(s + 4 * i), top)
            nan = vfma(x, zero, nan)
            p = select_less_i32(lane_index(), splat_i32x16(n - i), vexp_fast(x), zero)
            if has_windows:
                p = select_less_i32(lane_index(), splat_i32x16(first - i), zero, p)
            total = vadd(total, p)
            store_f32x16(s + 4 * i, p)
        if has_sinks:
            x = vsub(splat_f32x16(ld_f32(sink)), top)
            total = vadd(total, select_less_i32(lane_index(), splat_i32x16(1), vexp_fast(x), zero))
        scale = splat_f32x16(_F1 / reduce_add(vadd(total, nan)))
        for i in range(begin, n, 16):
            store_f32x16(s + 4 * i, vmul(load_f32x16(s + 4 * i), scale))

    return soft_max_row


def make_soft_max(more=""):
    """Return a kernel over every (head of the step, token): the positions that it sees."""
    soft_max_row, first_seen = make_soft_max_row(more), make_first_seen(more)

    @kernel(FullParams)
    def soft_max(params, ith, nth):
        n_tokens, pos = state_word(params, N_TOKENS), state_word(params, POS)
        n_heads = params.units * params.unit_heads
        while True:
            item = next_work(params, 1)
            if item >= n_tokens * n_heads:
                break
            token, head = item // n_heads, item % n_heads
            s = params.scores + (head * params.score_rows + token) * params.score_bytes
            position, sink = ld_i32(pos + 4 * token), params.sinks + 4 * (params.first_head + head)
            soft_max_row(params, s, first_seen(params, position), position + 1, sink)

    return soft_max


def make_stage_probabilities(more):
    """Return stage_probabilities(params, token, unit, rows, first_pos, position, n, dst, chunk_bytes).

    It stages rows of P as chunks. Positions that a row does not see, and those that fill the last chunk, are zero.
    """
    has_windows, first_seen = "w" in more, make_first_seen(more)

    @inline
    def stage_probabilities(params, token, unit, rows, first_pos, position, n, dst, chunk_bytes):
        heads, chunks = params.unit_heads, (n + 15) >> 4
        for r in range(rows):
            here = first_pos + r // heads
            seen = max(0, min(n, here + 1 - position))
            at = dst + CHUNK_ROW * r
            _stage_f32(at, chunk_bytes, score_row(params, token, unit, r), position, seen)
            for c in range((seen + 15) >> 4, chunks):
                store_f32x16(at + c * chunk_bytes, zero_f32x16())
            if has_windows:
                hidden = min(n, first_seen(params, here) - position)
                for c in range((hidden + 15) >> 4):
                    x, lanes = load_f32x16(at + c * chunk_bytes), splat_i32x16(hidden - 16 * c)
                    store_f32x16(at + c * chunk_bytes, select_less_i32(lane_index(), lanes, zero_f32x16(), x))

    return stage_probabilities


def make_stage_panel(v_type, transposed):
    """Return stage_panel(params, segment, kv_head, column, dst, tmp, position, n): V as [position][16*PANEL columns].

    Rows up to the next multiple of 16 are zero.
    """
    stage = make_stage(v_type)
    row_out = 64 * PANEL

    @inline
    def stage_panel(params, segment, kv_head, column, dst, tmp, position, n):
        row, element = part_row(params, params.v, segment, kv_head)
        stride, width = params.v.row_bytes, min(16 * PANEL, params.v_cols - column)
        for t in range(n):
            stage(dst + row_out * t, 64, row + (position + t) * stride, element + column, width)
        for i in range(row_out * n, row_out * ((n + 15) & ~15), 64):
            store_f32x16(dst + i, zero_f32x16())

    @inline
    def stage_panel_transposed(params, segment, kv_head, column, dst, tmp, position, n):
        first = params.v.offset + kv_head * params.v.head_stride + column
        stride, cell = params.v.row_bytes, segment_word(segment, SEG_CELL) + position
        width = min(16 * PANEL, params.v_cols - column)
        for t in range(0, n, 16):
            for c in range(0, width, 16):
                for i in range(16):
                    store_f32x16(tmp + 64 * i, zero_f32x16())
                    if c + i < width:
                        row = params.v.at + (first + c + i) * stride
                        stage(tmp + 64 * i, 64, row, cell + t, min(16, n - t))
                transpose16(tmp, 64, dst + row_out * t + 4 * c, row_out)

    return stage_panel_transposed if transposed else stage_panel


def make_kqv(v_type, transposed, more=""):
    """Return a kernel for the output columns of one task.

    A task is (segment, block of tokens, unit of heads, panel of columns).
    """
    stage_panel, product = make_stage_panel(v_type, transposed), make_rows_product(True)
    first_seen, stage_probabilities = make_first_seen(more), make_stage_probabilities(more)
    wide = 16 * PANEL

    @kernel(FullParams)
    def kqv(params, ith, nth):
        tile, heads, cols = params.tile, params.unit_heads, params.v_cols
        panels = (cols + wide - 1) // wide
        p = params.scratch + ith * params.scratch_bytes
        tmp, v, products = p + params.k_at, p + params.v_at, p + params.s_at
        n_tasks = n_base_tasks(params) * panels
        while True:
            task = next_work(params, 1)
            if task >= n_tasks:
                break
            segment, first, n_tokens, unit = find_task(params, task // panels)
            column = task % panels * wide
            rows, token = n_tokens * heads, segment_word(segment, SEG_TOKEN) + first
            first_pos = segment_word(segment, SEG_POS) + first
            p_chunk = CHUNK_ROW * (((rows + 15) & ~15) + 1)
            for i in range(0, 4 * wide * (rows + 16), 64):
                store_f32x16(products + i, zero_f32x16())
            for position in range(first_seen(params, first_pos), first_pos + n_tokens, tile):
                n = min(tile, first_pos + n_tokens - position)
                stage_probabilities(params, token, unit, rows, first_pos, position, n, p, p_chunk)
                stage_panel(params, segment, kv_head_of(params, unit), column, v, tmp, position, n)
                product(PANEL, p, p_chunk, rows, v, 4 * wide, (n + 15) >> 4, products, 4 * wide)
            for r in range(rows):
                head = params.first_head + unit * heads + r % heads
                dst = params.out + (token + r // heads) * params.out_stride + 4 * (head * cols + column)
                copy_f32(dst, products + 4 * wide * r, min(wide, cols - column))

    return kqv
