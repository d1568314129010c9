"""Flash attention for many rows whose cache holds no more than bfloat16 does: products of pairs, at twice the rate.

Where attention.py has one f32, tiles have two adjacent columns (K) or positions (V). Rows of Q and K become integers of
16 bits with a scale per row; by Cauchy and Schwarz no sum can leave 32 bits when both have a norm below 2**15, and the
rounding is that of 12 bits or more beside an ordinary element. V and the weights of the soft-max become bfloat16.
Statistics and the output stay f32. For CPUs with avx512bf16.
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.attention import (
    CORRECTION,
    K_CHUNKS,
    LIMIT,
    LOWEST,
    TILE,
    V0,
    V_CHUNK,
    V_COLS,
    M,
    is_masked,
    make_flash,
    make_stage_k,
    make_stage_part,
    pack_q,
    tile_chunk,
    update_rows,
)
from ikcli.backends.cpu.kernels.common import word
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW, make_columns_product, make_rows_product
from ikcli.native.jit import inline, merge
from ikcli.native.simd.dot import dot_bf16, store_bf16_pairs, store_i16x32
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    bcast_f32x16,
    bits_f32x16_i32,
    cvt_i32x16_f32,
    load_f32x16,
    load_i32x16,
    reduce_add,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    store_f32x16,
    store_i32x16,
    vadd,
    vand,
    vdiv,
    vfma,
    vmax_fast,
    vmul,
    vor,
    vshl,
    vsqrt,
    vsub,
    zero_f32x16,
)

_ONES = 0x3F803F80  # a pair of bfloat16
_NORM = np.float32(32700)  # of rows of integers, before rounding
_TINY = np.float32(1e-37)
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
    return row_space(params, k) + 2 * row_space_bytes(params)


@inline
def q_scales(params, k):
    """One f32 per row of the task."""
    return k_scales(params, k) + 4 * word(params, TILE)


@inline
def pair_chunk(params):
    """Bytes of 16 columns of V's tile, 64 per pair of positions; one pair more, so that chunks do not share sets."""
    return CHUNK_ROW * ((word(params, TILE) >> 1) + 1)


@inline
def clear(x, n):
    """n times 64 bytes of zeros."""
    for i in range(n):
        store_f32x16(x + 64 * i, zero_f32x16())


# --- Q ---------------------------------------------------------------------------------------------------------------
@inline
def rounded(x, factor):
    """x * factor to the nearest integer, even in a tie, in the lower 16 bits of each lane."""
    return bits_f32x16_i32(vfma(x, factor, splat_f32x16(_ROUND)))


@inline
def pack_q_pairs(params, token, unit, rows, q, k):
    """q[pair of columns][row] of scale * Q, for whole chunks of 32 columns, and the rows' scales behind K's tile."""
    pack_q(params, token, unit, rows, q, k)
    stride, chunks = 64 * ((rows + 15) >> 4), word(params, K_CHUNKS)
    scales, zero, low = q_scales(params, k), zero_f32x16(), splat_i32x16(0xFFFF)
    for i in range(0, stride, 64):
        at, total = q + i, zero
        for c in range(16 * chunks):
            x = load_f32x16(at + c * stride)
            total = vfma(x, x, total)
        factor = vdiv(splat_f32x16(_NORM), vsqrt(vadd(total, splat_f32x16(_TINY))))
        # adding 0 * total makes the scale of a row that is not finite NaN
        store_f32x16(scales + i, vfma(total, zero, vdiv(splat_f32x16(_F1), factor)))
        for c in range(0, 16 * chunks, 2):
            even, odd = (
                rounded(load_f32x16(at + c * stride), factor),
                rounded(load_f32x16(at + (c + 1) * stride), factor),
            )
            store_i32x16(at + (c >> 1) * stride, vor(vand(even, low), vshl(odd, 16)))
    if chunks & 1 != 0:  # the last chunk of K is half empty, this half need not be
        clear(q + 8 * chunks * stride, stride >> 3)


# --- staging ---------------------------------------------------------------------------------------------------------
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
    return _NORM / np.float32(math.sqrt(norm + _TINY))


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


def make_stage_pairs(k_types, v_type):
    """stage(params, segment, kv_head, k, v, position, n): both tiles; returns the address of V."""
    view = v_type == "view"
    stage_k = make_stage_k_pairs(k_types, view)
    if view:

        @merge
        def stage_row(params, segment, kv_head, k, v, position, n):
            stage_k(params, segment, kv_head, k, v, position, n)
            return v

        return stage_row
    stage_v = make_stage_v_pairs(v_type)

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        stage_k(params, segment, kv_head, k, v, position, n)
        stage_v(params, segment, kv_head, k, v, position, n)
        return v

    return stage


# --- soft-max --------------------------------------------------------------------------------------------------------
@inline
def scaled_score(s, q_scale, k_scale):
    return vmul(vmul(cvt_i32x16_f32(load_i32x16(s)), q_scale), bcast_f32x16(k_scale))


@inline
def scale_column(s, stride, n, tile, stats, q_scale, k_scale):
    """Sums of products become scores, the lowest beyond a row's limit; their maximum with that of before."""
    top = load_f32x16(stats + M)
    if is_masked(n, tile, stats):
        limit, lowest = vsub(load_i32x16(stats + LIMIT), splat_i32x16(tile)), splat_f32x16(LOWEST)
        for t in range(n):
            x = scaled_score(s + t * stride, q_scale, k_scale + 4 * t)
            x = select_less_i32(splat_i32x16(t), limit, x, lowest)
            store_f32x16(s + t * stride, x)
            top = vmax_fast(x, top)
    else:
        for t in range(n):
            x = scaled_score(s + t * stride, q_scale, k_scale + 4 * t)
            store_f32x16(s + t * stride, x)
            top = vmax_fast(x, top)
    return top


@inline
def soft_max_pairs(s, stride, n, tile, stats, q_scale, k_scale):
    """As soft_max_column, from sums of products to weights in pairs of positions, a zero after an odd number of them.

    The sum is that of the rounded weights, so that what rounding does to a large one cancels in the division.
    """
    limit = vsub(load_i32x16(stats + LIMIT), splat_i32x16(tile))
    masked = is_masked(n, tile, stats)
    top = scale_column(s, stride, n, tile, stats, load_f32x16(q_scale), k_scale)
    zero, ones = zero_f32x16(), splat_i32x16(_ONES)
    total, nan = zero, zero
    for t in range(0, n, 2):
        x = vsub(load_f32x16(s + t * stride), top)
        nan = vfma(x, zero, nan)
        p, other = vexp_fast(x), zero
        if t + 1 < n:
            x = vsub(load_f32x16(s + (t + 1) * stride), top)
            nan = vfma(x, zero, nan)
            other = vexp_fast(x)
        if masked:
            p = select_less_i32(splat_i32x16(t), limit, p, zero)
            other = select_less_i32(splat_i32x16(t + 1), limit, other, zero)
        at = s + (t >> 1) * stride
        store_bf16_pairs(at, p, other)
        total = dot_bf16(total, load_i32x16(at), ones)
    update_rows(stats, top, vadd(total, nan))


# --- kernel ----------------------------------------------------------------------------------------------------------
def make_flash_pairs(k_types, v_type):
    """As make_flash_attn; behind K's tile there is room for two rows of f32 and the scales."""
    stage = make_stage_pairs(k_types, v_type)
    rows_product, columns_product = make_rows_product(False, "i16"), make_columns_product("bf16")

    @inline
    def weigh(params, wide, q, k, s, stride, stats, x, n, tile):
        chunks, q_scale, k_scale = (word(params, K_CHUNKS) + 1) >> 1, q_scales(params, k), k_scales(params, k)
        rows_product(wide, k, tile_chunk(params), n, q + x, stride, chunks, s + x, stride)
        for i in range(x, x + 64 * wide, 64):
            soft_max_pairs(s + i, stride, n, tile, stats + i, q_scale + i, k_scale)

    @inline
    def add(params, wide, v, s, stride, o, stats, x, n):
        chunks, pairs, factors = (word(params, V_COLS) + 15) >> 4, (n + 1) >> 1, stats + CORRECTION + x
        columns_product(wide, v, pair_chunk(params), chunks, s + x, stride, pairs, o + x, stride, factors)

    return make_flash(pack_q_pairs, stage, weigh, add)
