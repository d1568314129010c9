"""Tiles of K and V for products of pairs: rows of a cache, taken as f32, become 16-bit integers and bfloat16.

A tile of K is [chunk of 32 columns][position][32] with a scale per position, one of V [chunk of 16 columns][pair of
positions][16][2]. Behind the tile of K lies room for two rows of f32, or for the scales of blocks, and the scales of
the rows of K, V and Q.
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.attention import (
    K_CHUNKS,
    TILE,
    V0,
    V_CHUNK,
    V_COLS,
    make_stage_k,
    make_stage_part,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.common import word
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.native.jit import inline, merge
from ikcli.native.simd.dot import store_bf16_pairs, store_i16x32
from ikcli.native.simd.vec import (
    bits_f32x16_i32,
    load_f32x16,
    reduce_add,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vadd,
    vfma,
    zero_f32x16,
)

NORM = np.float32(32700)  # of rows of integers, before rounding
TINY = np.float32(1e-37)
BLOCK_SPACE = 2560  # bytes that attention_codes.py may need beyond two rows of f32
_ROUND = np.float32(1.5 * 2**23)
_F0, _F1 = np.float32(0.0), np.float32(1.0)


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
    """One f32 per position, for V that is not a part of K's rows."""
    return k_scales(params, k) + 4 * word(params, TILE)


@inline
def q_scales(params, k):
    """One f32 per row of the task."""
    return k_scales(params, k) + 8 * word(params, TILE)


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
@inline
def rounded(x, factor):
    """x * factor to the nearest integer, even in a tie, in the lower 16 bits of each lane."""
    return bits_f32x16_i32(vfma(x, factor, splat_f32x16(_ROUND)))


@inline
def row_norm(x, stride, chunks):
    """Sum of the squares of a row of chunks."""
    a, b, c, d = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()  # so that no sum waits for the last one
    i, end = 0, chunks & ~3
    while i < end:
        y, z = load_f32x16(x + i * stride), load_f32x16(x + (i + 1) * stride)
        a, b = vfma(y, y, a), vfma(z, z, b)
        y, z = load_f32x16(x + (i + 2) * stride), load_f32x16(x + (i + 3) * stride)
        c, d = vfma(y, y, c), vfma(z, z, d)
        i += 4
    while i < chunks:
        y = load_f32x16(x + i * stride)
        a = vfma(y, y, a)
        i += 1
    return reduce_add(vadd(vadd(a, b), vadd(c, d)))


@inline
def row_factor(norm):
    """What a row is multiplied with before rounding."""
    return NORM / np.float32(math.sqrt(norm + TINY))


@inline
def row_scale(norm, factor):
    """What its sums are multiplied with; NaN for a row that is not finite."""
    return _F1 / factor + _F0 * norm


@inline
def store_k_row(dst, chunk_bytes, x, chunks, factor):
    """A row of f32 chunks as chunks of 32 columns."""
    wide, c = splat_f32x16(factor), 0
    while c < chunks:
        upper = load_f32x16(x + 64 * c + 64) if c + 1 < chunks else zero_f32x16()
        store_i16x32(dst, rounded(load_f32x16(x + 64 * c), wide), rounded(upper, wide))
        dst += chunk_bytes
        c += 2


@inline
def store_k_rows(dst, chunk_bytes, x, y, chunks, scale):
    """Two rows at once; their scales go to `scale`."""
    norm, other = row_norm(x, 64, chunks), row_norm(y, 64, chunks)
    factor, other_factor = row_factor(norm), row_factor(other)
    st_f32(scale, row_scale(norm, factor))
    st_f32(scale + 4, row_scale(other, other_factor))
    store_k_row(dst, chunk_bytes, x, chunks, factor)
    store_k_row(dst + CHUNK_ROW, chunk_bytes, y, chunks, other_factor)


@inline
def store_v_rows(dst, chunk_bytes, x, y, chunks):
    """Two rows of f32 chunks as pairs."""
    for c in range(chunks):
        store_bf16_pairs(dst, load_f32x16(x + 64 * c), load_f32x16(y + 64 * c))
        dst += chunk_bytes


def make_stage_k_pairs(k_types, view):
    """stage(params, segment, kv_head, k, v, position, n): n rows of K and, with `view`, V, a part of the same rows."""
    stage_k = make_stage_k(k_types)

    @inline
    def stage_v_view(params, x, y, v, i):
        skip = 64 * word(params, V_CHUNK)
        store_v_rows(v + 32 * i, pair_chunk(params), x + skip, y + skip, (word(params, V_COLS) + 15) >> 4)

    @inline
    def nothing(params, x, y, v, i):
        return

    finish = stage_v_view if view else nothing

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        chunks, chunk_bytes = word(params, K_CHUNKS), tile_chunk(params)
        x, scales = row_space(params, k), k_scales(params, k)
        y = x + row_space_bytes(params)
        for i in range(0, n, 2):
            stage_k(params, segment, kv_head, x, 64, position + i, 1)
            if i + 1 < n:
                stage_k(params, segment, kv_head, y, 64, position + i + 1, 1)
            else:
                clear(y, chunks)
            store_k_rows(k + 64 * i, chunk_bytes, x, y, chunks, scales + 4 * i)
            finish(params, x, y, v, i)

    return stage


def make_stage_v_pairs(v_type):
    """stage(params, segment, kv_head, k, v, position, n): n rows of V; `k`: the tile of K, behind which is room."""
    stage_part = make_stage_part(v_type)

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        chunks = (word(params, V_COLS) + 15) >> 4
        x = row_space(params, k)
        y = x + row_space_bytes(params)
        for i in range(0, n, 2):
            stage_part(params, V0, segment, kv_head, x, 64, position + i, 1)
            if i + 1 < n:
                stage_part(params, V0, segment, kv_head, y, 64, position + i + 1, 1)
            else:
                clear(y, chunks)
            store_v_rows(v + 32 * i, pair_chunk(params), x, y, chunks)

    return stage


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


def make_stage_pairs(k_types, v_type):
    """As `make_both`, of rows taken as f32."""
    if v_type == "view":
        return make_both(make_stage_k_pairs(k_types, True))
    return make_both(make_stage_k_pairs(k_types, False), make_stage_v_pairs(v_type))
