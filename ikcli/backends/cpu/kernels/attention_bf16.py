"""Flash attention for many rows whose cache holds no more than bfloat16 does: products of pairs, at twice the rate.

Q, the soft-max's weights and the tiles are rounded to bfloat16, two adjacent columns (K) or positions (V) where
attention.py has one f32; sums, statistics and the output stay f32. Rounding changes a value by at most 2**-8 of itself:
little beside what a cache of 8 bits or fewer has lost already. For CPUs with avx512bf16.
"""

from ikcli.backends.cpu.kernels.attention import (
    CORRECTION,
    K_CHUNKS,
    LIMIT,
    TILE,
    V0,
    V_CHUNK,
    V_COLS,
    column_top,
    is_masked,
    make_flash,
    make_stage_k,
    make_stage_part,
    pack_q,
    tile_chunk,
    update_rows,
)
from ikcli.backends.cpu.kernels.common import word
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW, MAX_VECTORS, make_columns_product, make_rows_product
from ikcli.native.jit import inline, merge
from ikcli.native.simd.dot import dot_bf16, store_bf16_pairs, store_bf16x32
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    ld_i32,
    load_f32x16,
    load_i32x16,
    select_less_i32,
    splat_i32x16,
    store_f32x16,
    vadd,
    vfma,
    vsub,
    zero_f32x16,
)

_ONES = 0x3F803F80  # a pair


# --- pairs -----------------------------------------------------------------------------------------------------------
@inline
def join_rows(x, stride, n):
    """An even number of rows of f32 at x become half as many rows of pairs, in place."""
    for i in range(0, n, 2):
        store_bf16_pairs(x + (i >> 1) * stride, load_f32x16(x + i * stride), load_f32x16(x + (i + 1) * stride))


@inline
def clear(x, n):
    """n times 64 bytes of zeros."""
    for i in range(n):
        store_f32x16(x + 64 * i, zero_f32x16())


@inline
def pack_q_pairs(params, token, unit, rows, q, tmp):
    """q[pair of columns][row] = scale * Q, for whole chunks of 32 columns."""
    pack_q(params, token, unit, rows, q, tmp)
    stride, chunks = 64 * ((rows + 15) >> 4), word(params, K_CHUNKS)
    for i in range(0, stride, 64):
        join_rows(q + i, stride, 16 * chunks)
    if chunks & 1 != 0:  # the last chunk of K is half empty; what lies here need not be finite
        clear(q + 8 * chunks * stride, stride >> 3)


@inline
def pair_chunk(params):
    """Bytes of 16 columns of V's tile, 64 per pair of positions; one pair more, so that chunks do not share sets."""
    return CHUNK_ROW * ((word(params, TILE) >> 1) + 1)


@inline
def store_k_row(dst, chunk_bytes, x, chunks):
    """A row of f32 chunks as chunks of 32 columns."""
    for c in range(0, chunks, 2):
        upper = load_f32x16(x + 64 * c + 64) if c + 1 < chunks else zero_f32x16()
        store_bf16x32(dst, load_f32x16(x + 64 * c), upper)
        dst += chunk_bytes


@inline
def store_v_rows(dst, chunk_bytes, x, y, chunks):
    """Two rows of f32 chunks as pairs."""
    for c in range(chunks):
        store_bf16_pairs(dst, load_f32x16(x + 64 * c), load_f32x16(y + 64 * c))
        dst += chunk_bytes


# --- staging ---------------------------------------------------------------------------------------------------------
@inline
def row_space(params, k):
    """(two addresses): room for a row of f32 chunks each, behind the tile of K."""
    chunks = word(params, K_CHUNKS)
    x = k + ((chunks + 1) >> 1) * tile_chunk(params)
    return x, x + 64 * max(chunks, (word(params, V_COLS) + 15) >> 4)


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
        x, y = row_space(params, k)
        for i in range(0, n, 2):
            stage_k(params, segment, kv_head, x, 64, position + i, 1)
            store_k_row(k + 64 * i, chunk_bytes, x, chunks)
            if i + 1 < n:
                stage_k(params, segment, kv_head, y, 64, position + i + 1, 1)
                store_k_row(k + 64 * (i + 1), chunk_bytes, y, chunks)
            else:
                clear(y, chunks)
            finish(params, x, y, v, i)

    return stage


def make_stage_v_pairs(v_type):
    """stage(params, segment, kv_head, k, v, position, n): n rows of V; `k`: the tile of K, behind which is room."""
    stage_part = make_stage_part(v_type)

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        chunks = (word(params, V_COLS) + 15) >> 4
        x, y = row_space(params, k)
        for i in range(0, n, 2):
            stage_part(params, V0, segment, kv_head, x, 64, position + i, 1)
            if i + 1 < n:
                stage_part(params, V0, segment, kv_head, y, 64, position + i + 1, 1)
            else:
                clear(y, chunks)
            store_v_rows(v + 32 * i, pair_chunk(params), x, y, chunks)

    return stage


# --- soft-max --------------------------------------------------------------------------------------------------------
@inline
def soft_max_pairs(s, stride, n, tile, stats):
    """As soft_max_column, but the weights become pairs of positions, a zero after an odd number of them.

    The sum is that of the rounded weights, so that what rounding does to a large one cancels in the division.
    """
    limit = vsub(load_i32x16(stats + LIMIT), splat_i32x16(tile))
    masked, top, zero = is_masked(n, tile, stats), column_top(s, stride, n, tile, stats), zero_f32x16()
    total, nan, ones = zero, zero, splat_i32x16(_ONES)
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
def make_flash_bf16(k_types, v_type):
    """As make_flash_attn; the region of K's tile has room for two rows of f32 behind it."""
    view = v_type == "view"
    stage_k = make_stage_k_pairs(k_types, view)
    rows_product, columns_product = make_rows_product(False, pairs=True), make_columns_product(pairs=True)

    if view:

        @merge
        def stage(params, segment, kv_head, k, v, position, n):
            stage_k(params, segment, kv_head, k, v, position, n)
            return v

    else:
        stage_v = make_stage_v_pairs(v_type)

        @merge
        def stage(params, segment, kv_head, k, v, position, n):
            stage_k(params, segment, kv_head, k, v, position, n)
            stage_v(params, segment, kv_head, k, v, position, n)
            return v

    @merge
    def attend(params, q, k, v, s, o, stats, rows, n, tile):
        """All rows of the task with the n staged positions from `tile` on."""
        vectors, k_chunk, v_chunk = (rows + 15) >> 4, tile_chunk(params), pair_chunk(params)
        stride, v_chunks = 64 * vectors, (word(params, V_COLS) + 15) >> 4
        for at in range(0, vectors, MAX_VECTORS):
            wide = min(MAX_VECTORS, vectors - at)
            seen = min(n, ld_i32(stats + LIMIT + 4 * (16 * (at + wide) - 1)) - tile)
            if seen <= 0:
                continue
            x = 64 * at
            rows_product(wide, k, k_chunk, seen, q + x, stride, (word(params, K_CHUNKS) + 1) >> 1, s + x, stride)
            for i in range(x, x + 64 * wide, 64):
                soft_max_pairs(s + i, stride, seen, tile, stats + i)
            pairs = (seen + 1) >> 1
            columns_product(wide, v, v_chunk, v_chunks, s + x, stride, pairs, o + x, stride, stats + CORRECTION + x)

    return make_flash(pack_q_pairs, stage, attend)
