"""Flash attention for many rows whose cache holds no more than bfloat16 does: products of pairs, at twice the rate.

Where attention.py has one f32, tiles have two adjacent columns (K) or positions (V). Rows of Q and K become integers of
16 bits with a scale per row; by Cauchy and Schwarz no sum can leave 32 bits when both have a norm below 2**15, and the
rounding is that of 12 bits or more beside an ordinary element. V and the weights of the soft-max become bfloat16 (for
CPUs with avx512bf16) or, of a q8_0 cache, integers as well (attention_codes.py). Statistics and the output stay f32.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import (
    CORRECTION,
    K_CHUNKS,
    LIMIT,
    LOWEST,
    UNIT,
    V_COLS,
    M,
    is_masked,
    make_flash,
    pack_q,
    tile_chunk,
    update_rows,
)
from ikcli.backends.cpu.kernels.attention_codes import make_stage_codes, soft_max_codes
from ikcli.backends.cpu.kernels.common import word
from ikcli.backends.cpu.kernels.pair_tiles import (
    NORM,
    TINY,
    clear,
    k_scales,
    make_stage_pairs,
    pair_chunk,
    q_scales,
    rounded,
    v_scales,
)
from ikcli.backends.cpu.kernels.sgemm import make_columns_product, make_rows_product
from ikcli.native.jit import inline
from ikcli.native.simd.dot import dot_bf16, store_bf16_pairs
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    bcast_f32x16,
    cvt_i32x16_f32,
    load_f32x16,
    load_i32x16,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
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
_F1 = np.float32(1.0)


# --- Q ---------------------------------------------------------------------------------------------------------------
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
        factor = vdiv(splat_f32x16(NORM), vsqrt(vadd(total, splat_f32x16(TINY))))
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
def make_flash_pairs(k_types, v_type, in_codes):
    """As make_flash_attn, with the scratch of pair_tiles.py; `in_codes`: heads are whole blocks of q8_0 caches."""
    in_codes = bool(int(in_codes))
    stage = make_stage_codes(v_type) if in_codes else make_stage_pairs(k_types, v_type)
    rows_product = make_rows_product(False, "i16")
    columns_product = make_columns_product("i16", UNIT - CORRECTION) if in_codes else make_columns_product("bf16")
    v_scale_of = k_scales if v_type == "view" else v_scales

    if in_codes:

        @inline
        def soft_max(params, k, s, stride, n, tile, stats, q_scale, k_scale):
            top = scale_column(s, stride, n, tile, stats, load_f32x16(q_scale), k_scale)
            soft_max_codes(s, stride, n, tile, stats, top, v_scale_of(params, k))

    else:

        @inline
        def soft_max(params, k, s, stride, n, tile, stats, q_scale, k_scale):
            soft_max_pairs(s, stride, n, tile, stats, q_scale, k_scale)

    @inline
    def weigh(params, wide, q, k, s, stride, stats, x, n, tile):
        chunks, q_scale, k_scale = (word(params, K_CHUNKS) + 1) >> 1, q_scales(params, k), k_scales(params, k)
        rows_product(wide, k, tile_chunk(params), n, q + x, stride, chunks, s + x, stride)
        for i in range(x, x + 64 * wide, 64):
            soft_max(params, k, s + i, stride, n, tile, stats + i, q_scale + i, k_scale)

    @inline
    def add(params, wide, v, s, stride, o, stats, x, n):
        chunks, pairs, factors = (word(params, V_COLS) + 15) >> 4, (n + 1) >> 1, stats + CORRECTION + x
        columns_product(wide, v, pair_chunk(params), chunks, s + x, stride, pairs, o + x, stride, factors)

    return make_flash(pack_q_pairs, stage, weigh, add)
