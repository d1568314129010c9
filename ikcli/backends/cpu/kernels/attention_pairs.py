"""Flash attention for many rows whose cache holds no more than f16 does: products of pairs, at twice the rate.

Where attention.py has one f32, tiles have two adjacent columns (K) or positions (V). Rows of Q, K and V become 16-bit
integers with a scale per row, which rounds about as f16 does. The norms are bounded, so by Cauchy and Schwarz no sum of
Q and K can leave 32 bits. Scales of V go into the weights of the soft-max, which become integers with a scale per row
and tile, such that their products with the largest numbers of V's rows bound every sum. Statistics and the output stay
f32.
"""

from ikcli.backends.cpu.kernels.attention import make_flash, make_weight, pack_q, update_rows
from ikcli.backends.cpu.kernels.attention_codes import make_stage_codes
from ikcli.backends.cpu.kernels.attention_mask import (
    limits,
    load_cap,
    make_capped,
    make_is_masked,
    make_where_seen,
)
from ikcli.backends.cpu.kernels.attention_tasks import CORRECTION, LOWEST, UNIT, M, tile_chunk
from ikcli.backends.cpu.kernels.pair_codes import TOP, lane_factors, lane_scales, pairs_of, rounded
from ikcli.backends.cpu.kernels.pair_tiles import (
    LEAST,
    SUM,
    k_scales,
    make_stage_pairs,
    pair_chunk,
    q_scales,
    sums_space,
    v_scales,
    v_tops,
)
from ikcli.backends.cpu.kernels.sgemm import make_columns_product, make_rows_product
from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bcast_f32x16,
    cvt_i32x16_f32,
    load_f32x16,
    load_i32x16,
    splat_f32x16,
    splat_i32x16,
    store_f32x16,
    store_i32x16,
    vabs,
    vadd,
    vdiv,
    vfma,
    vmax_fast,
    vmin,
    vmul,
    zero_f32x16,
)


# --- Q ---------------------------------------------------------------------------------------------------------------
def make_pack_q_pairs(adjacent, in_parts):
    """Return pack(params, token, unit, rows, q, k): q[pair of columns][row] of scale * Q.

    It packs whole chunks of 32 columns. The rows' scales go behind K's tile; `in_parts`: the scales of the columns
    before V's go behind them. Pairs are adjacent columns or 16 apart.
    """

    @inline
    def columns_of(pair):
        return (2 * pair, 2 * pair + 1) if adjacent else (pair + (pair & ~15), pair + (pair & ~15) + 16)

    @inline
    def pack_part(at, stride, first, end, scales):
        """Pack the columns [first, end) of one vector of rows."""
        zero = zero_f32x16()
        total, top = zero, zero
        for c in range(first, end):
            x = load_f32x16(at + c * stride)
            total, top = vfma(x, x, total), vmax_fast(vabs(x), top)
        factor = lane_factors(total, top)
        store_f32x16(scales, lane_scales(total, factor))
        for pair in range(first >> 1, (end + 16 & ~31) >> 1):  # K's last chunk may be half empty
            even, odd = columns_of(pair)
            low, high = zero, zero
            if even < end:
                low = load_f32x16(at + even * stride)
            if odd < end:
                high = load_f32x16(at + odd * stride)
            store_i32x16(at + pair * stride, pairs_of(rounded(low, factor), rounded(high, factor)))

    @inline
    def pack(params, token, unit, rows, q, k):
        pack_q(params, token, unit, rows, q, k)
        stride, columns, first = 64 * ((rows + 15) >> 4), 16 * params.k_chunks, 0
        if in_parts:
            first = 16 * params.v_chunk
        for i in range(0, stride, 64):
            scales = q_scales(params, k) + i
            if in_parts:
                pack_part(q + i, stride, 0, first, scales + stride)
            pack_part(q + i, stride, first, columns, scales)

    return pack


# --- soft-max --------------------------------------------------------------------------------------------------------
@inline
def _scaled(s, scale):
    return vmul(cvt_i32x16_f32(load_i32x16(s)), bcast_f32x16(scale))


@inline
def score_of_row(s, k_scale, q_scale, rest, v_scale, q_rest):
    return vmul(_scaled(s, k_scale), q_scale)


@inline
def score_of_parts(s, k_scale, q_scale, rest, v_scale, q_rest):
    """Combine the sums over V's columns and over those before, `rest` bytes behind them."""
    return vfma(_scaled(s, v_scale), q_scale, vmul(_scaled(s + rest, k_scale), q_rest))


def make_scale_column(score, more):
    """Return scale_column(params, s, stride, n, tile, stats, k_scale, q_scale, rest, v_scale, q_rest).

    Sums of products become scores, the lowest where a row does not see them; returns their maximum with the earlier
    one.
    """
    is_masked, where_seen, capped = make_is_masked(more), make_where_seen(more), make_capped(more)

    @inline
    def scale_column(params, s, stride, n, tile, stats, k_scale, q_scale, rest, v_scale, q_rest):
        top, cap = load_f32x16(stats + M), load_cap(params)
        if is_masked(n, tile, stats):
            (limit, first), lowest = limits(tile, stats), splat_f32x16(LOWEST)
            for t in range(n):
                x = capped(score(s + t * stride, k_scale + 4 * t, q_scale, rest, v_scale + 4 * t, q_rest), cap)
                x = where_seen(splat_i32x16(t), limit, first, x, lowest)
                store_f32x16(s + t * stride, x)
                top = vmax_fast(x, top)
        else:
            for t in range(n):
                x = capped(score(s + t * stride, k_scale + 4 * t, q_scale, rest, v_scale + 4 * t, q_rest), cap)
                store_f32x16(s + t * stride, x)
                top = vmax_fast(x, top)
        return top

    return scale_column


def make_soft_max_pairs(more):
    """Return soft_max_pairs(s, stride, n, tile, stats, top, v_scale, v_top).

    It does soft_max_column, from scores and their maximum to integers in pairs of positions, a zero after an odd
    number. The factor on sums of products with them goes to the statistics.
    """
    is_masked, weight = make_is_masked(more), make_weight(more)

    @inline
    def soft_max_pairs(s, stride, n, tile, stats, top, v_scale, v_top):
        limit, first = limits(tile, stats)
        masked, zero = is_masked(n, tile, stats), zero_f32x16()
        total, nan, sums, largest = zero, zero, zero, zero
        for t in range(n):
            p, nan = weight(s + t * stride, t, top, limit, first, masked, nan)
            scaled = vmul(p, bcast_f32x16(v_scale + 4 * t))
            store_f32x16(s + t * stride, scaled)
            total, sums = vadd(total, p), vfma(p, bcast_f32x16(v_top + 4 * t), sums)
            largest = vmax_fast(scaled, largest)
        # Two bounds: no sum of products may leave 32 bits, no weight 16 bits. LEAST keeps the division finite.
        factor = vdiv(splat_f32x16(SUM), vadd(sums, splat_f32x16(LEAST)))
        factor = vmin(factor, vdiv(splat_f32x16(TOP), vadd(largest, splat_f32x16(LEAST))))
        store_f32x16(stats + UNIT, lane_scales(sums, factor))  # NaN where a row of V is not finite
        for t in range(0, n, 2):
            even, odd = rounded(load_f32x16(s + t * stride), factor), splat_i32x16(0)
            if t + 1 < n:
                odd = rounded(load_f32x16(s + (t + 1) * stride), factor)
            store_i32x16(s + (t >> 1) * stride, pairs_of(even, odd))
        update_rows(stats, top, vadd(total, nan))

    return soft_max_pairs


# --- kernel ----------------------------------------------------------------------------------------------------------
def make_flash_pairs(k_types, v_type, staging, more=""):
    """Return make_flash_attn's counterpart with the scratch of pair_tiles.py.

    `staging` of rows: "codes" (whole blocks of q8_0), "direct" (whole chunks of f16 or bf16, one part) or "f32".
    """
    in_codes = staging == "codes"
    in_parts = v_type == "view" and not in_codes
    stage = make_stage_codes(v_type) if in_codes else make_stage_pairs(k_types, v_type, staging == "direct")
    rows_product, columns_product = make_rows_product(False, "i16"), make_columns_product("i16", UNIT - CORRECTION)
    v_scale_of = k_scales if in_codes and v_type == "view" else v_scales
    scale_column = make_scale_column(score_of_parts if in_parts else score_of_row, more)
    soft_max_pairs = make_soft_max_pairs(more)

    @inline
    def weigh(params, wide, q, k, s, stride, stats, x, n, tile):
        chunks, chunk_bytes, rest = (params.k_chunks + 1) >> 1, tile_chunk(params), sums_space(params, stride)
        k_scale, v_scale = k_scales(params, k), v_scale_of(params, k)
        if in_parts:  # the rotated columns before V's may be hundreds of times larger, so they have separate scales
            first = params.v_chunk >> 1
            rows_product(wide, k, chunk_bytes, n, q + x, stride, first, s + rest + x, stride)
            at = q + 16 * first * stride + x
            rows_product(wide, k + first * chunk_bytes, chunk_bytes, n, at, stride, chunks - first, s + x, stride)
        else:
            rows_product(wide, k, chunk_bytes, n, q + x, stride, chunks, s + x, stride)
        for i in range(x, x + 64 * wide, 64):
            q_scale, q_rest = load_f32x16(q_scales(params, k) + i), zero_f32x16()
            if in_parts:
                q_rest = load_f32x16(q_scales(params, k) + stride + i)
            top = scale_column(params, s + i, stride, n, tile, stats + i, k_scale, q_scale, rest, v_scale, q_rest)
            soft_max_pairs(s + i, stride, n, tile, stats + i, top, v_scale, v_tops(params, k))

    @inline
    def add(params, wide, v, s, stride, o, stats, x, n, ask):
        chunks, pairs, factors = (params.v_cols + 15) >> 4, (n + 1) >> 1, stats + CORRECTION + x
        columns_product(wide, v, pair_chunk(params), chunks, s + x, stride, pairs, o + x, stride, factors, ask)

    return make_flash(make_pack_q_pairs(in_codes, in_parts), stage, weigh, add, more)
