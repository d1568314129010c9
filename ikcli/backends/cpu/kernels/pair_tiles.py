"""Tiles of K and V for products of pairs: rows of a cache become 16-bit integers.

A tile of K is [chunk of 32 columns][position][16][2], one of V [chunk of 16 columns][pair of positions][16][2]; rows
have a scale each. A pair of K's columns is 16 apart (of q8_0 blocks: adjacent, attention_codes.py). Rows of f16 and
bf16 are converted where they lie, others become f32 first: behind the tile of K lies room for two of them, or for the
scales of blocks, and then what is known of the rows of K, V and Q.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import (
    AHEAD,
    K0,
    K_CHUNKS,
    PART_ROW_BYTES,
    TILE,
    V0,
    V_CHUNK,
    V_COLS,
    make_stage_k,
    make_stage_part,
    part_row,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.common import word
from ikcli.backends.cpu.kernels.kv import LOAD16, make_prefetch_row
from ikcli.backends.cpu.kernels.pair_codes import pairs_of, rounded, row_factor, row_scale
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.native.jit import inline, merge
from ikcli.native.simd.vec import (
    reduce_add,
    reduce_max,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    store_f32x16,
    store_i32x16,
    vabs,
    vadd,
    vfma,
    vmax_fast,
    zero_f32x16,
)

SUM = np.float32(2.13e9)  # of products of a row's weights with a tile of V, before rounding
LEAST = np.float32(1e-33)
BLOCK_SPACE = 2560  # bytes that attention_codes.py may need beyond two rows of f32
_F0 = np.float32(0.0)
_SIZE = {"f32": 4, "f16": 2, "bf16": 2}


# --- scratch ---------------------------------------------------------------------------------------------------------
@inline
def row_space(params, k):
    """Room for a row of f32 chunks, behind the tile of K. A second one follows, then the scales."""
    return k + ((word(params, K_CHUNKS) + 1) >> 1) * tile_chunk(params)


@inline
def row_space_bytes(params):
    return 64 * max(word(params, K_CHUNKS), (word(params, V_COLS) + 15) >> 4)


@inline
def k_scales(params, k):
    """One f32 per position of the tile."""
    return row_space(params, k) + 2 * row_space_bytes(params) + BLOCK_SPACE


@inline
def v_scales(params, k):
    """One f32 per position; V inside K's rows of q8_0 shares their scales instead."""
    return k_scales(params, k) + 4 * word(params, TILE)


@inline
def v_tops(params, k):
    """One f32 per position, which no number of its row of V exceeds."""
    return k_scales(params, k) + 8 * word(params, TILE)


@inline
def q_scales(params, k):
    """One f32 per row of the task."""
    return k_scales(params, k) + 12 * word(params, TILE)


@inline
def pair_chunk(params):
    """Bytes of 16 columns of V's tile, 64 per pair of positions; one pair more, so that chunks do not share sets."""
    return CHUNK_ROW * ((word(params, TILE) >> 1) + 1)


@inline
def clear(x, n):
    """n times 64 bytes of zeros."""
    for i in range(n):
        store_f32x16(x + 64 * i, zero_f32x16())


# --- staging ---------------------------------------------------------------------------------------------------------
def make_row_size(type_):
    """row_size(x, step, chunks): sum of squares and largest magnitude of a row, 16 numbers at every `step` of them."""
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


@inline
def put_scale(at, norm, top):
    """A row's factor; its scale goes to `at`."""
    factor = row_factor(norm, top)
    st_f32(at, row_scale(norm, factor))
    return factor


@inline
def put_v_scale(params, k, i, norm, top):
    """... of the row of V at position i of the tile, whose largest magnitude is stored as well."""
    st_f32(v_tops(params, k) + 4 * i, top + _F0 * norm)
    return put_scale(v_scales(params, k) + 4 * i, norm, top)


def make_store_k(type_):
    """store_k(params, x, y, i, k, sizes): two rows, of the positions i and i + 1 of the tile, as K."""
    load = LOAD16[type_]

    @inline
    def store_row(dst, chunk_bytes, x, chunks, factor):
        wide, c = splat_f32x16(factor), 0
        while c + 1 < chunks:
            store_i32x16(dst, pairs_of(rounded(load(x, 16 * c), wide), rounded(load(x, 16 * c + 16), wide)))
            dst += chunk_bytes
            c += 2
        if c < chunks:
            store_i32x16(dst, pairs_of(rounded(load(x, 16 * c), wide), splat_i32x16(0)))

    @inline
    def store_k(params, x, y, i, k, sizes):
        chunks, chunk_bytes, scales = word(params, K_CHUNKS), tile_chunk(params), k_scales(params, k) + 4 * i
        norm, top, other_norm, other_top = sizes
        store_row(k + CHUNK_ROW * i, chunk_bytes, x, chunks, put_scale(scales, norm, top))
        store_row(k + CHUNK_ROW * i + CHUNK_ROW, chunk_bytes, y, chunks, put_scale(scales + 4, other_norm, other_top))

    return store_k


def make_store_v(type_):
    """store_v(params, x, y, i, k, v, sizes): ... as V."""
    load = LOAD16[type_]

    @inline
    def store_v(params, x, y, i, k, v, sizes):
        norm, top, other_norm, other_top = sizes
        wide = splat_f32x16(put_v_scale(params, k, i, norm, top))
        other = splat_f32x16(put_v_scale(params, k, i + 1, other_norm, other_top))
        dst, chunk_bytes = v + 32 * i, pair_chunk(params)
        for c in range((word(params, V_COLS) + 15) >> 4):
            store_i32x16(dst, pairs_of(rounded(load(x, 16 * c), wide), rounded(load(y, 16 * c), other)))
            dst += chunk_bytes

    return store_v


def make_store_rows(type_, in_k, in_v):
    """store_rows(params, x, y, i, k, v): two rows, of the positions i and i + 1 of the tile, as K, V or both."""
    row_size, store_k, store_v, size = make_row_size(type_), make_store_k(type_), make_store_v(type_), _SIZE[type_]

    @inline
    def store_k_rows(params, x, y, i, k, v):
        chunks = word(params, K_CHUNKS)
        store_k(params, x, y, i, k, (*row_size(x, 16, chunks), *row_size(y, 16, chunks)))

    @inline
    def store_v_rows(params, x, y, i, k, v):
        chunks = (word(params, V_COLS) + 15) >> 4
        store_v(params, x, y, i, k, v, (*row_size(x, 16, chunks), *row_size(y, 16, chunks)))

    @inline
    def add_size(norm, top, x, chunks):
        if chunks > 0:
            more, other = row_size(x, 16, chunks)
            return norm + more, max(top, other)
        return norm, top

    @inline
    def store_both(params, x, y, i, k, v):
        first, inside = word(params, V_CHUNK), (word(params, V_COLS) + 15) >> 4
        skip, end = 16 * size * first, 16 * size * (first + inside)
        behind = word(params, K_CHUNKS) - first - inside
        sizes = *row_size(x + skip, 16, inside), *row_size(y + skip, 16, inside)
        store_v(params, x + skip, y + skip, i, k, v, sizes)
        norm, top, other_norm, other_top = sizes
        norm, top = add_size(norm, top, x, first)
        norm, top = add_size(norm, top, x + end, behind)
        other_norm, other_top = add_size(other_norm, other_top, y, first)
        other_norm, other_top = add_size(other_norm, other_top, y + end, behind)
        store_k(params, x, y, i, k, (norm, top, other_norm, other_top))

    return store_both if in_k and in_v else store_k_rows if in_k else store_v_rows


def make_fetch_f32(stage_part, columns):
    """fetch(params, segment, kv_head, k, position, i, n): two rows, i and i + 1 of n from `position` on, made f32."""

    @inline
    def fetch(params, segment, kv_head, k, position, i, n):
        x = row_space(params, k)
        y = x + row_space_bytes(params)
        stage_part(params, segment, kv_head, x, 64, position + i, 1)
        if i + 1 < n:
            stage_part(params, segment, kv_head, y, 64, position + i + 1, 1)
        else:
            clear(y, columns(params) >> 4)
        return x, y

    return fetch


def make_fetch_direct(part, type_, columns):
    """... where they lie, a multiple of 16 columns of f16 or bf16."""
    size, prefetch_row = _SIZE[type_], make_prefetch_row(type_)

    @inline
    def fetch(params, segment, kv_head, k, position, i, n):
        row, element = part_row(params, part, segment, kv_head)
        stride, y = word(params, part + PART_ROW_BYTES), row_space(params, k)
        row += (position + i) * stride
        prefetch_row(row + AHEAD * stride, element, columns(params))
        x = row + size * element
        if i + 1 < n:
            prefetch_row(row + (AHEAD + 1) * stride, element, columns(params))
            y = x + stride
        else:
            clear(y, columns(params) >> 4)
        return x, y

    return fetch


def _make_stage(fetch, store_rows):
    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        for i in range(0, n, 2):
            x, y = fetch(params, segment, kv_head, k, position, i, n)
            store_rows(params, x, y, i, k, v)

    return stage


@inline
def k_columns(params):
    return word(params, K_CHUNKS) << 4


@inline
def v_columns(params):
    return (word(params, V_COLS) + 15) & ~15


def make_both(stage_k, stage_v=None):
    """stage(params, segment, kv_head, k, v, position, n): both tiles; returns the address of V.

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
    """As `make_both`, of rows of any type; `direct`: of whole chunks of one part of f16 or bf16."""
    k_read, v_read = (k_types, v_type) if direct else ("f32", "f32")
    fetch_k = make_fetch_direct(K0, k_types, k_columns) if direct else make_fetch_f32(make_stage_k(k_types), k_columns)
    if v_type == "view":
        return make_both(_make_stage(fetch_k, make_store_rows(k_read, True, True)))
    stage_part = make_stage_part(v_type)

    @inline
    def stage_v(params, segment, kv_head, dst, chunk_bytes, position, n):
        stage_part(params, V0, segment, kv_head, dst, chunk_bytes, position, n)

    fetch_v = make_fetch_direct(V0, v_type, v_columns) if direct else make_fetch_f32(stage_v, v_columns)
    stage_k = _make_stage(fetch_k, make_store_rows(k_read, True, False))
    return make_both(stage_k, _make_stage(fetch_v, make_store_rows(v_read, False, True)))
