"""Flash attention for tasks of 2 to 16 rows and caches of bfloat16 or fewer bits: products of pairs of bfloat16.

As attention_few.py, whose blocks it uses with twice as many products per instruction. Q and K are chunks of 32 columns,
[chunk][row or position][32]; V is [16 columns][pair of positions][16][2], made from rows staged like those of K (from
the K tile itself for "view"); P is rounded to pairs of positions. Sums, statistics and the soft-max are f32.
"""

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.attention import (
    AHEAD,
    CORRECTION,
    FIRST_HEAD,
    GROUP,
    K0,
    K_AT,
    K_CHUNKS,
    LIMIT,
    O_AT,
    O_UNIT,
    PART_ROW_BYTES,
    PART_WIDTH,
    Q_UNIT,
    S_AT,
    SCRATCH,
    SCRATCH_BYTES,
    STATS_AT,
    STATS_BYTES,
    TILE,
    UNIT_HEADS,
    UNITS,
    V0,
    V_AT,
    V_CHUNK,
    V_COLS,
    find_task,
    n_base_tasks,
    n_splits,
    part_row,
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
from ikcli.backends.cpu.kernels.common import SEG_POS, SEG_TOKEN, next_work, word
from ikcli.backends.cpu.kernels.kv import make_load16, make_prefetch_row
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW, load_f32x16_at
from ikcli.native.jit import inline, merge
from ikcli.native.simd.dot import bf16_pairs
from ikcli.native.simd.vec import (
    ld_i32,
    load_f32x16,
    pointer,
    st_f32,
    store_i32x16,
    zero_i32x16,
)

_F1 = np.float32(1.0)
_I16, _I32 = ir.IntType(16), ir.IntType(32)
_four_rows, _eight_rows = make_dot_block(4, 4, True), make_dot_block(8, 2, True)
_four_chunks, _two_chunks = make_values_block(4, 4, True), make_values_block(4, 2, True)


@intrinsic
def _interleave(typingctx, src, dst, dst_chunk):
    """Two adjacent rows of 32 columns at src as pairs: the first 16 columns at dst, the others a chunk behind."""

    def codegen(context, builder, sig, args):
        src, dst, dst_chunk = args
        t = ir.VectorType(_I16, 32)
        a, b = load_f32x16_at(builder, src, t), load_f32x16_at(builder, builder.add(src, src.type(CHUNK_ROW)), t)
        for first in (0, 16):
            pick = [x for i in range(first, first + 16) for x in (i, 32 + i)]
            both = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 32), pick))
            builder.store(both, pointer(builder, dst, t), align=1)
            dst = builder.add(dst, dst_chunk)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


def make_stage_rows(type_):
    """stage_rows(params, part, segment, kv_head, dst, chunk_bytes, position, n): n rows as chunks of 32 columns.

    One row of zeros follows an odd number of rows.
    """
    load16, prefetch_row = make_load16(type_), make_prefetch_row(type_)

    @inline
    def stage_rows(params, part, segment, kv_head, dst, chunk_bytes, position, n):
        row, element = part_row(params, part, segment, kv_head)
        stride, width = word(params, part + PART_ROW_BYTES), word(params, part + PART_WIDTH)
        row += position * stride
        for i in range(n):
            prefetch_row(row + AHEAD * stride, element, width)
            at = dst + CHUNK_ROW * i
            for c in range(element, element + width, 32):
                store_i32x16(at, bf16_pairs(load16(row, c), load16(row, c + 16)))
                at += chunk_bytes
            row += stride
        if n & 1:
            for at in range(0, width // 32 * chunk_bytes, chunk_bytes):
                store_i32x16(dst + CHUNK_ROW * n + at, zero_i32x16())

    return stage_rows


@inline
def round_q(q, padded, n_chunks):
    """Chunks of 16 columns, f32, become chunks of 32 columns in place."""
    for c in range(n_chunks >> 1):
        for r in range(padded):
            src = q + CHUNK_ROW * (2 * c * padded + r)
            pairs = bf16_pairs(load_f32x16(src), load_f32x16(src + CHUNK_ROW * padded))
            store_i32x16(q + CHUNK_ROW * (c * padded + r), pairs)


@inline
def round_p(s, n):
    """A row of n weights becomes pairs in place."""
    for i in range(0, n, 32):
        store_i32x16(s + 2 * i, bf16_pairs(load_f32x16(s + 4 * i), load_f32x16(s + 4 * i + 64)))


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


def make_stage_values(v_type):
    """stage_values(...): the V tile as pairs of n positions; rows of a V of its own are staged over those of K."""
    view = v_type == "view"
    stage_rows = make_stage_rows("bf16" if view else v_type)

    @inline
    def stage_values(params, segment, kv_head, k, v, v_chunk, position, n):
        if view:
            k += (word(params, V_CHUNK) >> 1) * tile_chunk(params)
        else:
            stage_rows(params, V0, segment, kv_head, k, tile_chunk(params), position, n)
        for c in range(word(params, V_COLS) >> 5):
            for t in range(0, n, 2):
                src = k + c * tile_chunk(params) + CHUNK_ROW * t
                _interleave(src, v + 2 * c * v_chunk + CHUNK_ROW // 2 * t, v_chunk)

    return stage_values


def make_flash_pairs(k_type, v_type):
    """flash_attn for 2 to 16 rows per task; same parameters. v_type "view": inside K's rows."""
    stage_rows, stage_values = make_stage_rows(k_type), make_stage_values(v_type)

    @merge
    def add_tile(params, segment, unit, q, k, v, s, o, stats, rows, padded, n, tile):
        s_stride, v_chunk = 4 * (word(params, TILE) + 16), CHUNK_ROW * ((word(params, TILE) >> 1) + 1)
        heads, v_chunks = word(params, UNIT_HEADS), word(params, V_COLS) >> 4
        kv_head = (word(params, FIRST_HEAD) + unit * heads) // word(params, GROUP)
        stage_rows(params, K0, segment, kv_head, k, tile_chunk(params), tile, n)
        scores(q, padded, k, tile_chunk(params), n, word(params, K_CHUNKS) >> 1, s, s_stride)
        for r in range(rows):
            seen = max(0, min(n, ld_i32(stats + LIMIT + 4 * r) - tile))
            soft_max_tile(s + r * s_stride, seen, n, stats + 4 * r)
            round_p(s + r * s_stride, n)
        for r in range(rows, padded):
            round_p(s + r * s_stride, n)
            st_f32(stats + CORRECTION + 4 * r, _F1)
        stage_values(params, segment, kv_head, k, v, v_chunk, tile, n)
        n_pairs = (n + 1) >> 1
        add_values(s, s_stride, padded, v, v_chunk, n_pairs, v_chunks, o, 64 * v_chunks, stats + CORRECTION)

    def flash_pairs(params, ith, nth):
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

    return flash_pairs
