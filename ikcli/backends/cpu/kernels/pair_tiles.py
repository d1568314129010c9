"""Stage tiles of K and V for products of pairs: rows of a cache become 16-bit integers.

A tile of K is [chunk of 32 columns][position][16][2], one of V [chunk of 16 columns][pair of positions][16][2]; rows
have a scale each. A pair of K's columns is 16 apart (of q8_0 blocks: adjacent, attention_codes.py). Rows of f16 and
bf16 are converted in place, others become f32 first. Behind the tile of K there is room for two such rows, or for the
scales of blocks, and then for the sizes of the rows of K, V and Q.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import make_stage_k, make_stage_part
from ikcli.backends.cpu.kernels.attention_tasks import k_part, part_row, tile_chunk, v_part
from ikcli.backends.cpu.kernels.kv import LOAD16, make_prefetch_row
from ikcli.backends.cpu.kernels.pair_codes import lane_factors, lane_scales, pairs_of, rounded
from ikcli.backends.cpu.kernels.pair_sizes import make_row_sizes
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.backends.cpu.params_attention import BLOCK_SPACE
from ikcli.native.jit import inline, merge
from ikcli.native.simd.vec import (
    bcast_f32x16,
    load_f32x16,
    splat_i32x16,
    store_f32x16,
    store_i32x16,
    vfma,
    zero_f32x16,
)

SUM = np.float32(2.13e9)  # of products of a row's weights with a tile of V, before rounding
LEAST = np.float32(1e-33)
ROWS = 16  # of a cache at a time: their scales fill a vector
_SIZE = {"f32": 4, "f16": 2, "bf16": 2}


# --- scratch ---------------------------------------------------------------------------------------------------------
@inline
def row_space(params, k):
    """Return the room for ROWS rows of f32 chunks, behind the tile of K. BLOCK_SPACE follows, then the scales."""
    return k + ((params.k_chunks + 1) >> 1) * tile_chunk(params)


@inline
def row_space_bytes(params):
    return 64 * max(params.k_chunks, (params.v_cols + 15) >> 4)


@inline
def factors(params, k):
    """Return the address of one f32 for each of ROWS rows; two vectors more hold their inputs."""
    return row_space(params, k) + ROWS * row_space_bytes(params)


@inline
def k_scales(params, k):
    """Return the address of one f32 per position of the tile: of K's rows, or of their part before V."""
    return factors(params, k) + BLOCK_SPACE


@inline
def v_scales(params, k):
    """Return the address of one f32 per position; V inside K's rows of q8_0 has `k_scales`, as all of the row."""
    return k_scales(params, k) + 4 * params.tile


@inline
def v_tops(params, k):
    """Return the address of one f32 per position, which no number of its row of V exceeds."""
    return k_scales(params, k) + 8 * params.tile


@inline
def q_scales(params, k):
    """Return the address of one f32 per row; where V lies inside K's rows, as many more for the columns before V's."""
    return k_scales(params, k) + 12 * params.tile


@inline
def sums_space(params, stride):
    """Return the bytes of the sums of products of a tile's positions, `stride` for each.

    Where V lies inside K's rows, the sums of the rest of the rows follow.
    """
    return stride * (params.tile + 16)


@inline
def pair_chunk(params):
    """Return the bytes of 16 columns of V's tile, 64 per pair of positions.

    One pair more, so that chunks do not share sets.
    """
    return CHUNK_ROW * ((params.tile >> 1) + 1)


@inline
def k_columns(params):
    return params.k_chunks << 4


@inline
def v_columns(params):
    return (params.v_cols + 15) & ~15


# --- factors ---------------------------------------------------------------------------------------------------------
def _make_find_factors(type_):
    """Return find_factors(params, x, stride, n, chunks, k, scales) of n <= ROWS rows.

    The factors on rows go to `factors(params, k)`, those on their sums to `scales`; it returns their largest
    magnitudes.
    """
    row_sizes = make_row_sizes(type_)

    @inline
    def find_factors(params, x, stride, n, chunks, k, scales):
        norms = factors(params, k) + 4 * ROWS
        tops = norms + 4 * ROWS
        row_sizes(x, stride, n, chunks, norms, tops)
        norm, top = load_f32x16(norms), load_f32x16(tops)
        factor = lane_factors(norm, top)
        store_f32x16(factors(params, k), factor)
        store_f32x16(scales, lane_scales(norm, factor))
        return vfma(norm, zero_f32x16(), top)

    return find_factors


# --- two rows --------------------------------------------------------------------------------------------------------
def _make_store_k(type_):
    """Return store_k(params, x, y, k, v, chunks, factors): two rows as K."""
    load = LOAD16[type_]

    @inline
    def store_row(dst, chunk_bytes, x, chunks, factor):
        for c in range(0, chunks - 1, 2):
            store_i32x16(dst, pairs_of(rounded(load(x, 16 * c), factor), rounded(load(x, 16 * c + 16), factor)))
            dst += chunk_bytes
        if chunks & 1 != 0:
            store_i32x16(dst, pairs_of(rounded(load(x, 16 * chunks - 16), factor), splat_i32x16(0)))

    @inline
    def store_k(params, x, y, k, v, chunks, factors):
        store_row(k, tile_chunk(params), x, chunks, bcast_f32x16(factors))
        store_row(k + CHUNK_ROW, tile_chunk(params), y, chunks, bcast_f32x16(factors + 4))

    return store_k


def _make_store_v(type_):
    """Return the same for two rows as V."""
    load = LOAD16[type_]

    @inline
    def store_v(params, x, y, k, v, chunks, factors):
        one, other = bcast_f32x16(factors), bcast_f32x16(factors + 4)
        for c in range(chunks):
            store_i32x16(v, pairs_of(rounded(load(x, 16 * c), one), rounded(load(y, 16 * c), other)))
            v += pair_chunk(params)

    return store_v


def _make_store_both(type_):
    """Return the same for two rows as both, an even number of chunks."""
    load = LOAD16[type_]

    @inline
    def store_both(params, x, y, k, v, chunks, factors):
        one, other = bcast_f32x16(factors), bcast_f32x16(factors + 4)
        k_chunk, v_chunk = tile_chunk(params), pair_chunk(params)
        for c in range(0, chunks, 2):
            x0, x1 = rounded(load(x, 16 * c), one), rounded(load(x, 16 * c + 16), one)
            y0, y1 = rounded(load(y, 16 * c), other), rounded(load(y, 16 * c + 16), other)
            store_i32x16(k, pairs_of(x0, x1))
            store_i32x16(k + CHUNK_ROW, pairs_of(y0, y1))
            store_i32x16(v, pairs_of(x0, y0))
            store_i32x16(v + v_chunk, pairs_of(x1, y1))
            k += k_chunk
            v += 2 * v_chunk

    return store_both


# --- rows of a cache -------------------------------------------------------------------------------------------------
def _make_find_f32(stage_part):
    """Return find(params, segment, kv_head, k, position, n): n <= ROWS rows made f32.

    It returns (address, bytes to the next).
    """

    @inline
    def find(params, segment, kv_head, k, position, n):
        x, stride = row_space(params, k), row_space_bytes(params)
        for i in range(n):
            stage_part(params, segment, kv_head, x + i * stride, 64, position + i, 1)
        return x, stride

    return find


def _make_find_direct(part_of, type_):
    """Return the same for rows that are read in place."""
    size = _SIZE[type_]

    @inline
    def find(params, segment, kv_head, k, position, n):
        part = part_of(params)
        row, element = part_row(params, part, segment, kv_head)
        stride = part.row_bytes
        return row + position * stride + size * element, stride

    return find


def _make_ask(type_, part_of):
    """Return ask(params, x, stride, columns), which prefetches the rows of two positions of a part of a cache.

    It does nothing for rows made f32, nor for whole rows, which lie one behind the other: the hardware notices that.
    """
    if part_of is None:

        @inline
        def ask_nothing(params, x, stride, columns):
            return

        return ask_nothing
    prefetch_row = make_prefetch_row(type_)

    @inline
    def ask(params, x, stride, columns):
        if part_of(params).head_stride > 0:
            prefetch_row(x, 0, columns)
            prefetch_row(x + stride, 0, columns)

    return ask


# --- tiles -----------------------------------------------------------------------------------------------------------
def _make_store_rows(type_, store, in_v, part_of):
    """Return store_rows(params, x, stride, first, n, chunks, tile, k, v).

    It stores n <= ROWS rows from the position `first` of the tile on. k and v: where their integers go.
    """
    find_factors, ask, scales_of = _make_find_factors(type_), _make_ask(type_, part_of), v_scales if in_v else k_scales

    @inline
    def store_rows(params, x, stride, first, n, chunks, tile, k, v):
        top = find_factors(params, x, stride, n, chunks, tile, scales_of(params, tile) + 4 * first)
        if in_v:
            store_f32x16(v_tops(params, tile) + 4 * first, top)
        for i in range(0, n, 2):
            y = x + stride if i + 1 < n else x
            ask(params, x + ROWS * stride, stride, 16 * chunks)
            store(params, x, y, k + CHUNK_ROW * i, v + 32 * i, chunks, factors(params, tile) + 4 * i)
            x += 2 * stride

    return store_rows


def _make_stage(find, type_, in_v, part_of):
    """Return stage(params, segment, kv_head, k, v, position, n): the tile of K, or of V."""
    store = _make_store_v(type_) if in_v else _make_store_k(type_)
    store_rows = _make_store_rows(type_, store, in_v, part_of)

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        chunks = v_columns(params) >> 4 if in_v else params.k_chunks
        for first in range(0, n, ROWS):
            here = min(ROWS, n - first)
            x, stride = find(params, segment, kv_head, k, position + first, here)
            store_rows(params, x, stride, first, here, chunks, k, k + CHUNK_ROW * first, v + 32 * first)

    return stage


def _make_stage_both(find, type_, part_of):
    """Return the same for both: V is the end of K's rows, in an even number of chunks, as is the part before it."""
    store_first = _make_store_rows(type_, _make_store_k(type_), False, part_of)
    store_both = _make_store_rows(type_, _make_store_both(type_), True, part_of)
    chunk_bytes = 16 * _SIZE[type_]

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        chunks = params.v_chunk
        inside = k + (chunks >> 1) * tile_chunk(params)
        for first in range(0, n, ROWS):
            here = min(ROWS, n - first)
            x, stride = find(params, segment, kv_head, k, position + first, here)
            store_first(params, x, stride, first, here, chunks, k, k + CHUNK_ROW * first, v)
            x += chunk_bytes * chunks
            to = inside + CHUNK_ROW * first
            store_both(params, x, stride, first, here, v_columns(params) >> 4, k, to, v + 32 * first)

    return stage


def make_both(stage_k, stage_v=None):
    """Return stage(params, segment, kv_head, k, v, position, n): both tiles; it returns the address of V.

    Without stage_v, stage_k makes the tile of V as well.
    """
    if stage_v is None:

        @merge
        def stage_rows(params, segment, kv_head, k, v, position, n):
            stage_k(params, segment, kv_head, k, v, position, n)
            return v

        return stage_rows

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        stage_k(params, segment, kv_head, k, v, position, n)
        stage_v(params, segment, kv_head, k, v, position, n)
        return v

    return stage


def make_stage_pairs(k_types, v_type, direct):
    """Return `make_both` for rows of any type; `direct`: of whole chunks of one part of f16 or bf16."""
    k_read, v_read = (k_types, v_type) if direct else ("f32", "f32")
    find_k = _make_find_direct(k_part, k_types) if direct else _make_find_f32(make_stage_k(k_types))
    k_of, v_of = (k_part, v_part) if direct else (None, None)
    if v_type == "view":
        return make_both(_make_stage_both(find_k, k_read, k_of))
    stage_part = make_stage_part(v_type)

    @inline
    def stage_v(params, segment, kv_head, dst, chunk_bytes, position, n):
        stage_part(params, params.v, segment, kv_head, dst, chunk_bytes, position, n)

    find_v = _make_find_direct(v_part, v_type) if direct else _make_find_f32(stage_v)
    return make_both(_make_stage(find_k, k_read, False, k_of), _make_stage(find_v, v_read, True, v_of))
