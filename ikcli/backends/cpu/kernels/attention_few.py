"""Flash attention for tasks of a few rows: columns, not rows, are the vector lanes.

A task is (segment, block of its tokens[, range of positions]) with all units of heads, tile by tile, so that the cache
is read in order. Tiles, statistics and parts are those of attention.py, whose `make_combine` merges split tasks. Scores
come from dot products of 4 rows with 4 positions, whose 16 sums are reduced together; the output is [row][column].
Generation with the usual caches has a separate kernel, attention_stream.py.
"""

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.attention import make_stage_k, make_stage_v, stage_q
from ikcli.backends.cpu.kernels.attention_mask import load_cap, make_capped, make_start_rows, make_weakened_row
from ikcli.backends.cpu.kernels.attention_tasks import (
    CORRECTION,
    FIRST,
    LIMIT,
    LOWEST,
    L,
    M,
    find_task,
    kv_head_of,
    make_end_seen,
    make_origin,
    n_base_tasks,
    n_splits,
    segment_word,
    split_length,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.common import SEG_POS, SEG_TOKEN, next_work
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import (
    CHUNK_ROW,
    KINDS,
    fma_f32x16,
    load_f32x16_at,
    loop,
    offset,
    store_block,
    strided,
    sum_lanes,
    transpose16,
)
from ikcli.backends.cpu.params_attention import STAT_BYTES, STATS_BYTES, FlashParams
from ikcli.native import isa
from ikcli.native.jit import inline, merge
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    f32x16,
    i32x16,
    lane_index,
    ld_f32,
    ld_i32,
    llvm_type,
    load_f32x16,
    pointer,
    reduce_add,
    reduce_max,
    select_less_i32,
    splat_f32x16,
    splat_i32x16,
    splat_value,
    st_f32,
    store_f32_first,
    store_f32x16,
    vadd,
    vfma,
    vmax_fast,
    vmul,
    vsub,
    zero_f32x16,
)

_F1 = np.float32(1.0)
_I32, _F32 = ir.IntType(32), ir.FloatType()
WIDE = isa.current().name == "avx512"
ROWS = 4 if WIDE else 1  # rows of a block; tasks of one row use blocks of one
ONE_ROW_POSITIONS = 16 if WIDE else 4


def make_dot_block(m, n, kind="f32"):
    """Return a block: s[m rows][n positions] = Q K^T, both as chunks (of 32 columns if in pairs).

    M * n <= 16, a power of two.
    """
    type_, _, sum_type, multiply = KINDS[kind]
    operand = llvm_type(type_)

    @intrinsic
    def dot_block(typingctx, q, q_chunk, k, k_chunk, n_chunks, s, s_stride):
        def codegen(context, builder, sig, args):
            q, q_chunk, k, k_chunk, n_chunks, s, s_stride = args

            def chunk(state):
                qt, kt, *accs = state
                # m + n loads feed m * n products, whose sums stay in registers until the last chunk.
                rows = [load_f32x16_at(builder, offset(builder, qt, CHUNK_ROW * i), operand) for i in range(m)]
                out = [None] * (m * n)
                for j in range(n):
                    x = load_f32x16_at(builder, offset(builder, kt, CHUNK_ROW * j), operand)
                    for i in range(m):
                        out[i * n + j] = multiply(builder, accs[i * n + j], rows[i], x)
                return [builder.add(qt, q_chunk), builder.add(kt, k_chunk), *out]

            zero = ir.Constant(llvm_type(sum_type), None)
            _, _, *accs = loop(builder, n_chunks, [q, k, *[zero] * (m * n)], chunk)
            if sum_type is i32x16:
                accs = [builder.sitofp(x, llvm_type(f32x16)) for x in accs]
            # Folding all sums into one vector takes about one addition per sum; folding each by itself would take four.
            store_block(builder, sum_lanes(builder, accs), m, n, s, s_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 7), codegen

    return dot_block


def make_values_block(m, n, kind="f32", unit=0):
    """Return a block: o[m rows][n chunks] = o * scale[row] + P V over n_positions >= 1 (or pairs of them).

    Integer sums are multiplied by the factor `unit` bytes behind scale[row].
    """
    type_, weight, sum_type, multiply = KINDS[kind]
    operand = llvm_type(type_)

    @intrinsic
    def values_block(typingctx, p, p_stride, v, v_chunk, n_positions, o, o_stride, scale):
        def codegen(context, builder, sig, args):
            p, p_stride, v, v_chunk, n_positions, o, o_stride, scale = args
            chunks = strided(builder, v, v_chunk, n)
            rows, outs = strided(builder, p, p_stride, m), strided(builder, o, o_stride, m)

            def of_row(i, at):
                return splat_value(builder, f32x16, load_f32x16_at(builder, offset(builder, scale, 4 * i + at), _F32))

            def rescaled():
                out = []
                for i in range(m):
                    factor = of_row(i, 0)
                    out += [builder.fmul(load_f32x16_at(builder, offset(builder, outs[i], 64 * j)), factor)
                            for j in range(n)]  # fmt: skip
                return out

            integers = sum_type is i32x16
            # Integer sums begin at 0 and join the old output, which is f32, at the end.
            accs = [ir.Constant(llvm_type(i32x16), None)] * (m * n) if integers else rescaled()

            def position(state):
                four, sixty_four, *accs = state
                # Each weight is broadcast once for n chunks, each chunk loaded once for m rows.
                x = [load_f32x16_at(builder, builder.add(c, sixty_four), operand) for c in chunks]
                out = []
                for i in range(m):
                    w = load_f32x16_at(builder, builder.add(rows[i], four), weight)
                    w = splat_value(builder, type_, w)
                    out += [multiply(builder, accs[i * n + j], w, x[j]) for j in range(n)]
                return [offset(builder, four, 4), offset(builder, sixty_four, 64), *out]

            start = ir.Constant(p.type, 0)
            _, _, *accs = loop(builder, n_positions, [start, start, *accs], position)
            if integers:
                units = [of_row(i, unit) for i in range(m)]
                sums = [builder.sitofp(x, llvm_type(f32x16)) for x in accs]
                accs = [fma_f32x16(builder, x, units[i // n], old)
                        for i, (x, old) in enumerate(zip(sums, rescaled(), strict=True))]  # fmt: skip
            for i in range(m):
                for j in range(n):
                    at = offset(builder, outs[i], 64 * j)
                    builder.store(accs[i * n + j], pointer(builder, at, accs[0].type), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return values_block


_dot_rows, _dot_one = make_dot_block(ROWS, 4), make_dot_block(1, ONE_ROW_POSITIONS)


@merge
def scores(q, rows, k, k_chunk, n, n_chunks, s, s_stride):
    """Compute s[rows][n]; rows is 1 or a multiple of ROWS. Up to 15 positions more are written."""
    if rows == 1:
        # A single row takes more positions at once instead, so that as many sums run side by side.
        for t in range(0, n, ONE_ROW_POSITIONS):
            _dot_one(q, CHUNK_ROW, k + CHUNK_ROW * t, k_chunk, n_chunks, s + 4 * t, s_stride)
    else:
        for t in range(0, n, 4):
            for r in range(0, rows, ROWS):
                at = s + r * s_stride + 4 * t
                _dot_rows(q + CHUNK_ROW * r, CHUNK_ROW * rows, k + CHUNK_ROW * t, k_chunk, n_chunks, at, s_stride)


def make_add_values(m, fewest, kind="f32", unit=0):
    """Return add_values(p, p_stride, rows, v, v_chunk, n, n_chunks, o, o_stride, scale).

    o[rows][columns] = o * scale + P V. rows: a multiple of m; n_chunks: 16 columns each, a multiple of `fewest`;
    n: positions (or pairs).
    """
    four, rest = (make_values_block(m, n, kind, unit) for n in (4, fewest))

    @merge
    def add_values(p, p_stride, rows, v, v_chunk, n, n_chunks, o, o_stride, scale):
        c = 0
        while c < n_chunks:
            # Blocks of four chunks, then narrower ones: outputs are read and written once per tile either way.
            full = c + 4 <= n_chunks
            for r in range(0, rows, m):
                at, weights, factor = o + r * o_stride + 64 * c, p + r * p_stride, scale + 4 * r
                if full:
                    four(weights, p_stride, v, v_chunk, n, at, o_stride, factor)
                else:
                    rest(weights, p_stride, v, v_chunk, n, at, o_stride, factor)
            step = 4 if full else fewest
            c += step
            v += step * v_chunk

    return add_values


_add_rows, _add_one = make_add_values(ROWS, 1), make_add_values(1, 1)


def make_soft_max_tile(more):
    """Return soft_max_tile(params, s, n, tile, stats) for one row.

    Scores of the n positions from `tile` on become e**(score - max), 0 where the row does not see them; its statistics
    are updated. NaN makes the sum NaN.
    """
    capped, has_windows, is_changed = make_capped(more), "w" in more, "c" in more or "d" in more or "t" in more
    weakened = make_weakened_row(more)

    @inline
    def soft_max_tile(params, s, n, tile, stats):
        lowest, zero, cap = splat_f32x16(LOWEST), zero_f32x16(), load_cap(params)
        old = splat_f32x16(ld_f32(stats + M))
        seen, hidden = max(0, min(n, ld_i32(stats + LIMIT) - tile)), ld_i32(stats + FIRST) - tile
        top = old
        for i in range(0, seen, 16):
            x = weakened(params, capped(load_f32x16(s + 4 * i), cap), i, tile, stats)
            if is_changed:
                store_f32x16(s + 4 * i, x)
            # Scores of the last vector behind `seen` are whatever lay there.
            x = select_less_i32(lane_index(), splat_i32x16(seen - i), x, lowest)
            if has_windows:
                x = select_less_i32(lane_index(), splat_i32x16(hidden - i), lowest, x)
            top = vmax_fast(x, top)
        top = splat_f32x16(reduce_max(top))
        total, nan = zero, zero
        for i in range(0, n, 16):
            x = select_less_i32(lane_index(), splat_i32x16(seen - i), load_f32x16(s + 4 * i), lowest)
            if has_windows:
                x = select_less_i32(lane_index(), splat_i32x16(hidden - i), lowest, x)
            x = vsub(x, top)
            # x * 0 is NaN for NaN and Inf, which the exponential would hide.
            nan = vfma(x, zero, nan)
            p = select_less_i32(lane_index(), splat_i32x16(seen - i), vexp_fast(x), zero)
            if has_windows:
                p = select_less_i32(lane_index(), splat_i32x16(hidden - i), zero, p)
            total = vadd(total, p)
            store_f32x16(s + 4 * i, p)
        correction = vexp_fast(vsub(old, top))
        store_f32_first(stats + M, top, 1)
        store_f32_first(stats + CORRECTION, correction, 1)
        total = vadd(total, nan)
        new = vfma(splat_f32x16(ld_f32(stats + L)), correction, splat_f32x16(reduce_add(total)))
        store_f32_first(stats + L, new, 1)

    return soft_max_tile


@inline
def load_q(params, token, unit, rows, padded, q):
    """Load scaled Q as chunks of `padded` rows, zeros in those beyond `rows`."""
    chunks = params.k_chunks
    scale = splat_f32x16(params.scale)
    for r in range(rows):
        stage_q(params, token, unit, r, q + CHUNK_ROW * r, CHUNK_ROW * padded)
    for c in range(chunks):
        for r in range(padded):
            at = q + CHUNK_ROW * (c * padded + r)
            store_f32x16(at, vmul(load_f32x16(at), scale) if r < rows else zero_f32x16())


@inline
def write_few(params, token, unit, rows, o, o_stride, sums):
    """Write o[row][column] over the sums to the node's output."""
    heads, cols = params.unit_heads, params.v_cols
    for r in range(rows):
        head = params.first_head + unit * heads + r % heads
        dst = params.out + (token + r // heads) * params.out_stride + 4 * head * cols
        scale = splat_f32x16(_F1 / ld_f32(sums + 4 * r))
        for c in range(0, cols, 16):
            store_f32_first(dst + 4 * c, vmul(load_f32x16(o + r * o_stride + 4 * c), scale), min(16, cols - c))


@inline
def write_few_slot(slot, stats, o, o_stride):
    """Store a part of a split task, transposed to the form that make_combine reads (one vector of rows)."""
    for i in range(0, 2 * STAT_BYTES, 64):
        store_f32x16(slot + i, load_f32x16(stats + i))
    for c in range(0, o_stride, 64):
        transpose16(o + c, o_stride, slot + 2 * STAT_BYTES + 16 * c, 64)


@inline
def finish_unit(params, token, unit, rows, o, stats, slot):
    """Write a unit's output, or its part of it if there is a slot."""
    o_stride = 64 * ((params.v_cols + 15) >> 4)
    if slot == 0:
        write_few(params, token, unit, rows, o, o_stride, stats + L)
    else:
        write_few_slot(slot, stats, o, o_stride)


def make_flash_units(prepare, add_tile, more):
    """Return the kernel made of these functions:

    prepare(params, token, unit, rows, q, tmp): the unit's Q (tmp is the place of K's tile). add_tile(params, segment,
    q, k, v, s, o, stats, rows, n, position, last): all units with n positions of the cache.
    """
    origin_of, end_seen, start_rows = make_origin(more), make_end_seen(more), make_start_rows(more)

    @kernel(FlashParams)
    def flash_units(params, ith, nth):
        n_base, units = n_base_tasks(params), params.units
        splits = n_splits(params, n_base, nth)
        heads, tile = params.unit_heads, params.tile
        q = params.scratch + ith * params.scratch_bytes
        k, v, s = q + params.k_at, q + params.v_at, q + params.s_at
        o, stats = q + params.o_at, q + params.stats_at
        q_unit, o_unit = params.q_unit, params.o_unit
        while True:
            task = next_work(params, 1)
            if task >= n_base // units * splits:
                break
            # A task has all units of its tokens, because their KV heads lie in the same cached rows.
            base = task // splits * units
            segment, first, n_tokens, _ = find_task(params, base)
            rows, token = n_tokens * heads, segment_word(segment, SEG_TOKEN) + first
            position = segment_word(segment, SEG_POS) + first
            origin, task_end = origin_of(params, token, position), end_seen(params, segment, token, position, n_tokens)
            n_positions = task_end - origin
            length = split_length(params, n_positions, splits)
            begin = length * (task % splits)
            end = min(begin + length, n_positions)
            if begin >= end:
                continue
            for u in range(units):
                prepare(params, token, u, rows, q + u * q_unit, k)
                unit_stats = stats + u * STATS_BYTES
                start_rows(params, token, u, rows, position, task_end, unit_stats, o + u * o_unit, o_unit, begin == 0)
            begin += origin
            end += origin
            for at in range(begin, end, tile):
                last = at + tile >= end
                add_tile(params, segment, q, k, v, s, o, stats, rows, min(tile, end - at), at, last)
            for u in range(units):
                slot = 0
                if length < n_positions:
                    slot = params.slots + ((base + u) * splits + task % splits) * params.slot_bytes
                finish_unit(params, token, u, rows, o + u * o_unit, stats + u * STATS_BYTES, slot)

    return flash_units


@inline
def in_blocks(rows):
    """Round rows up to whole blocks."""
    return 1 if rows == 1 else (rows + ROWS - 1) // ROWS * ROWS


def make_flash_few(k_types, v_type, more=""):
    """Return flash_attn for at most 8 rows per task; same parameters, scratch for 16 rows."""
    stage_k, stage_v, soft_max_tile = make_stage_k(k_types), make_stage_v(v_type), make_soft_max_tile(more)

    @inline
    def prepare(params, token, unit, rows, q, tmp):
        load_q(params, token, unit, rows, in_blocks(rows), q)

    @merge
    def attend(params, q, k, v, s, o, stats, rows, n, tile):
        chunk_bytes, s_stride, padded = tile_chunk(params), 4 * (params.tile + 16), in_blocks(rows)
        v_chunks = (params.v_cols + 15) >> 4
        scores(q, padded, k, chunk_bytes, n, params.k_chunks, s, s_stride)
        for r in range(rows):
            soft_max_tile(params, s + r * s_stride, n, tile, stats + 4 * r)
        # Rows that only fill the block need a factor as well.
        for r in range(rows, padded):
            st_f32(stats + CORRECTION + 4 * r, _F1)
        if padded == 1:
            _add_one(s, s_stride, 1, v, chunk_bytes, n, v_chunks, o, 64 * v_chunks, stats + CORRECTION)
        else:
            _add_rows(s, s_stride, padded, v, chunk_bytes, n, v_chunks, o, 64 * v_chunks, stats + CORRECTION)

    @merge
    def add_tile(params, segment, q, k, v, s, o, stats, rows, n, position, last):
        for u in range(params.units):
            kv_head = kv_head_of(params, u)
            stage_k(params, segment, kv_head, k, tile_chunk(params), position, n)
            values = stage_v(params, segment, kv_head, k, v, tile_chunk(params), position, n)
            unit_q, unit_o = q + u * params.q_unit, o + u * params.o_unit
            attend(params, unit_q, k, values, s, unit_o, stats + u * STATS_BYTES, rows, n, position)

    return make_flash_units(prepare, add_tile, more)
