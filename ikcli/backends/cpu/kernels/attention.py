"""Flash attention: online soft-max over tiles of the KV cache; K*Q is never stored.

A task is (segment, block of its tokens, unit of heads that share one KV head[, range of positions]). Its rows, tokens
times heads, are the vector lanes: Q is transposed once to [column][row], cached rows become f32 tiles of 16-column
chunks (sgemm.py), scores [position][row] overwrite each other tile by tile, and the output grows as [column][row].
With few tasks the positions are split as well; `make_combine` then merges the parts. Arithmetic is f32 throughout.

Corresponds to ggml's flash_attn_ext; the recurrence is Milakov & Gimelshein 2018, Dao et al. 2022.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention_mask import (
    limits,
    load_cap,
    make_capped,
    make_is_masked,
    make_sees_none,
    make_start_rows,
    make_weakened,
    make_where_seen,
)
from ikcli.backends.cpu.kernels.attention_tasks import (
    CORRECTION,
    LIMIT,
    LOWEST,
    L,
    M,
    find_task,
    kv_head_of,
    make_cells,
    make_end_seen,
    make_most_seen,
    make_origin,
    n_base_tasks,
    n_splits,
    part_row,
    segment_word,
    split_length,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.common import SEG_POS, SEG_TOKEN, next_work
from ikcli.backends.cpu.kernels.kv import make_prefetch_row, make_stage
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import (
    CHUNK_ROW,
    MAX_VECTORS,
    make_columns_product,
    make_rows_product,
    transpose16,
)
from ikcli.backends.cpu.params_attention import STAT_BYTES, FlashParams
from ikcli.native.jit import inline, merge
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i32,
    load_f32x16,
    splat_f32x16,
    splat_i32x16,
    store_f32_first,
    store_f32x16,
    vadd,
    vfma,
    vmax_fast,
    vmul,
    vsub,
    zero_f32x16,
)

AHEAD = 8  # rows asked for before they are read: slices of rows are too short for the hardware to predict

_F1 = np.float32(1.0)


# --- staging ---------------------------------------------------------------------------------------------------------
def make_stage_part(type_):
    """Return stage_part(params, part, segment, kv_head, dst, chunk_bytes, position, n): n rows of a part, as chunks."""
    stage, prefetch_row = make_stage(type_), make_prefetch_row(type_)

    @inline
    def stage_part(params, part, segment, kv_head, dst, chunk_bytes, position, n):
        row, element = part_row(params, part, segment, kv_head)
        stride, width = part.row_bytes, part.width
        row += position * stride
        for i in range(n):
            prefetch_row(row + AHEAD * stride, element, width)
            stage(dst + CHUNK_ROW * i, chunk_bytes, row, element, width)
            row += stride

    return stage_part


def make_stage_k(k_types, make_part=make_stage_part):
    """Return stage_k(...) of one or two parts, `k_types` joined by '+'."""
    types = k_types.split("+")
    first = make_part(types[0])
    if len(types) == 1:

        @inline
        def stage_k(params, segment, kv_head, dst, chunk_bytes, position, n):
            first(params, params.k[0], segment, kv_head, dst, chunk_bytes, position, n)

        return stage_k
    second = make_part(types[1])

    @inline
    def stage_k2(params, segment, kv_head, dst, chunk_bytes, position, n):
        first(params, params.k[0], segment, kv_head, dst, chunk_bytes, position, n)
        # Its chunks follow those of the first part, so that one product covers both.
        dst += (params.k[0].width + 15) // 16 * chunk_bytes
        second(params, params.k[1], segment, kv_head, dst, chunk_bytes, position, n)

    return stage_k2


def make_stage_v(v_type, make_part=make_stage_part):
    """Return stage_v(...): address of the V tile. v_type "view": the chunks of the K tile from V_CHUNK on."""
    if v_type == "view":

        @inline
        def stage_v(params, segment, kv_head, k, v, chunk_bytes, position, n):
            return k + params.v_chunk * chunk_bytes  # V lies inside K's rows, which have been staged already

    else:
        stage_part = make_part(v_type)

        @inline
        def stage_v(params, segment, kv_head, k, v, chunk_bytes, position, n):
            stage_part(params, params.v, segment, kv_head, v, chunk_bytes, position, n)
            return v

    return stage_v


_stage_f32, _prefetch_f32 = make_stage("f32"), make_prefetch_row("f32")


@inline
def q_columns(params, part, token, unit, row):
    """Return the address of one row of the task (token * heads + head) in a part of Q."""
    heads = params.unit_heads
    head = params.first_head + unit * heads + row % heads
    element = part.offset + head * part.head_stride
    return part.at + (token + row // heads) * part.row_bytes + 4 * element


@inline
def stage_q(params, token, unit, row, dst, chunk_bytes):
    """Stage one row of the task as chunks, not yet scaled."""
    for i in range(2):
        part = params.q[i]
        width = part.width
        _stage_f32(dst, chunk_bytes, q_columns(params, part, token, unit, row), 0, width)
        dst += (width + 15) // 16 * chunk_bytes


@inline
def prefetch_q(params, token, unit, first, end):
    """Prefetch the rows [first, end) of the task."""
    for row in range(first, end):
        for i in range(2):
            part = params.q[i]
            _prefetch_f32(q_columns(params, part, token, unit, row), 0, part.width)


@inline
def pack_q(params, token, unit, rows, q, tmp):
    """Store q[column][row] = scale * Q, with zeros in the rows that fill the last vector."""
    vectors, chunks = (rows + 15) >> 4, params.k_chunks
    # The scale goes into Q once, instead of into every score.
    scale = splat_f32x16(params.scale)
    for v in range(vectors):
        # Rows are scattered in memory: ask for those of the next vector while these are turned.
        prefetch_q(params, token, unit, 16 * v + 16, min(16 * v + 32, rows))
        for r in range(16):
            if 16 * v + r < rows:
                stage_q(params, token, unit, 16 * v + r, tmp + CHUNK_ROW * r, 16 * CHUNK_ROW)
            else:
                # Lanes without a row compute zeros, which are never written.
                for c in range(chunks):
                    store_f32x16(tmp + CHUNK_ROW * (16 * c + r), zero_f32x16())
        for c in range(chunks):
            at = q + 16 * c * 64 * vectors + 64 * v
            transpose16(tmp + 16 * CHUNK_ROW * c, CHUNK_ROW, at, 64 * vectors)
            for i in range(16):
                store_f32x16(at + 64 * vectors * i, vmul(load_f32x16(at + 64 * vectors * i), scale))


# --- soft-max --------------------------------------------------------------------------------------------------------
@inline
def update_rows(stats, top, total):
    """Store maximum, sum (`total` is that of the new positions) and correction of one vector of rows."""
    # Sum and output so far are relative to the old maximum; this factor makes them relative to the new one.
    correction = vexp_fast(vsub(load_f32x16(stats + M), top))
    store_f32x16(stats + M, top)
    store_f32x16(stats + L, vfma(load_f32x16(stats + L), correction, total))
    store_f32x16(stats + CORRECTION, correction)


def make_weight(more):
    """Return weight(s, t, top, limit, first, masked, nan): e**(score - top) of one vector of rows.

    t is the position in the tile. The weight is 0 where a row does not see it. `nan` is kept NaN, or becomes it where
    the score is not finite.
    """
    where_seen = make_where_seen(more)

    @inline
    def weight(s, t, top, limit, first, masked, nan):
        x = vsub(load_f32x16(s), top)
        p = vexp_fast(x)
        if masked:
            p = where_seen(splat_i32x16(t), limit, first, p, zero_f32x16())
        return p, vfma(x, zero_f32x16(), nan)  # x * 0 is NaN for NaN and Inf, which vexp_fast would hide

    return weight


def make_find_top(more):
    """Return find_top(params, s, stride, n, tile, stats): the largest score of each row, or the earlier maximum.

    Scores of n positions become capped or weakened, and the lowest where a row does not see them.
    """
    is_masked, where_seen, capped = make_is_masked(more), make_where_seen(more), make_capped(more)
    is_changed, weakened = "c" in more or "d" in more or "t" in more, make_weakened(more)

    @inline
    def find_top(params, s, stride, n, tile, stats):
        top, cap = load_f32x16(stats + M), load_cap(params)
        # Only tiles at an end of what the rows see pay for comparisons of positions.
        if is_masked(n, tile, stats):
            limit, first = limits(tile, stats)
            for t in range(n):
                x = weakened(params, capped(load_f32x16(s + t * stride), cap), t, tile, stats)
                x = where_seen(splat_i32x16(t), limit, first, x, splat_f32x16(LOWEST))
                store_f32x16(s + t * stride, x)
                top = vmax_fast(x, top)
            return top
        if is_changed:
            for t in range(n):
                x = weakened(params, capped(load_f32x16(s + t * stride), cap), t, tile, stats)
                store_f32x16(s + t * stride, x)
                top = vmax_fast(x, top)
            return top
        other = top  # two chains of maxima, which do not wait for each other
        for t in range(0, n - 1, 2):
            top = vmax_fast(load_f32x16(s + t * stride), top)
            other = vmax_fast(load_f32x16(s + t * stride + stride), other)
        return vmax_fast(vmax_fast(load_f32x16(s + (n - 1) * stride), top), other)

    return find_top


def make_soft_max_column(more):
    """Return soft_max_column(params, s, stride, n, tile, stats) for one vector of rows.

    Scores of n positions become e**(score - max), 0 where a row does not see them; the statistics are updated. A NaN or
    infinite score makes the row's sum NaN.
    """
    find_top, weight, is_masked = make_find_top(more), make_weight(more), make_is_masked(more)

    @inline
    def soft_max_column(params, s, stride, n, tile, stats):
        top, masked = find_top(params, s, stride, n, tile, stats), is_masked(n, tile, stats)
        limit, first = limits(tile, stats)
        # A second pass, as the maximum is known now: one exponential per score, and none to correct earlier ones.
        total, nan = zero_f32x16(), zero_f32x16()
        for t in range(n):
            p, nan = weight(s + t * stride, t, top, limit, first, masked, nan)
            total = vadd(total, p)
            store_f32x16(s + t * stride, p)
        update_rows(stats, top, vadd(total, nan))

    return soft_max_column


# --- output ----------------------------------------------------------------------------------------------------------
@inline
def write_chunk(params, token, unit, rows, v, chunk, o, stride, sums, tmp):
    """Write 16 columns of up to 16 rows (vector v) of o[column][row], over their sums, to the node's output."""
    heads, cols = params.unit_heads, params.v_cols
    transpose16(o + 16 * chunk * stride + 64 * v, stride, tmp, 64)
    n = min(16, cols - 16 * chunk)
    for r in range(min(16, rows - 16 * v)):
        row = 16 * v + r
        head = params.first_head + unit * heads + row % heads
        dst = params.out + (token + row // heads) * params.out_stride + 4 * (head * cols + 16 * chunk)
        # One multiplication per output instead of one division per weight.
        x = vmul(load_f32x16(tmp + 64 * r), splat_f32x16(_F1 / ld_f32(sums + 4 * row)))
        if n == 16:
            store_f32x16(dst, x)
        else:
            store_f32_first(dst, x, n)


@inline
def write_rows(params, token, unit, rows, o, stride, sums, tmp):
    for v in range((rows + 15) >> 4):
        for chunk in range((params.v_cols + 15) >> 4):
            write_chunk(params, token, unit, rows, v, chunk, o, stride, sums, tmp)


@inline
def write_slot(slot, stats, o, o_bytes):
    """Store a part of a split task: M, L, then o as it is."""
    # Not divided by its sum: parts are weighted by their maxima before they are added.
    for i in range(0, 2 * STAT_BYTES, 64):
        store_f32x16(slot + i, load_f32x16(stats + i))
    for i in range(0, o_bytes, 64):
        store_f32x16(slot + 2 * STAT_BYTES + i, load_f32x16(o + i))


@inline
def next_k(params, segment, kv_head, position, otherwise):
    """Return the address of K's row at a position if the row is all K, and so are those that follow."""
    # Where heads share a row, the next bytes belong to other heads, and asking for them would not help.
    row, _ = part_row(params, params.k[0], segment, kv_head)
    whole = params.k[0].head_stride == 0
    return row + position * params.k[0].row_bytes if whole else otherwise


# --- kernels ---------------------------------------------------------------------------------------------------------
def make_flash(pack, stage, weigh, add, more, params_type=FlashParams):
    """Return the kernel made of these functions:

    pack(params, token, unit, rows, q, tmp): Q of a task. stage(params, segment, kv_head, k, v, position, n): tiles of
    the cache; returns the address of V. weigh(params, wide, q, k, s, stride, stats, x, n, tile): the weights of n
    positions. add(params, wide, v, s, stride, o, stats, x, n, ask): the output with them, while memory from `ask` on
    may be prefetched. The last two take up to MAX_VECTORS vectors of rows, from byte x of a row of vectors on.
    """
    origin_of, start_rows, sees_none = make_origin(more), make_start_rows(more), make_sees_none(more)
    end_seen, most_seen, cells = make_end_seen(more), make_most_seen(more), make_cells(more)
    scattered = "i" in more or "p" in more

    @merge
    def attend(params, q, k, v, s, o, stats, rows, n, tile, ask):
        """Attend all rows of the task to the n staged positions from `tile` on."""
        vectors = (rows + 15) >> 4
        for at in range(0, vectors, MAX_VECTORS):
            # As many vectors as fit the registers share each value broadcast from the tile.
            wide = min(MAX_VECTORS, vectors - at)
            # Rows are in the order of tokens, so the last one sees most: no product for positions that none sees.
            seen = min(n, ld_i32(stats + LIMIT + 4 * (16 * (at + wide) - 1)) - tile)
            if seen > 0 and not sees_none(stats + 64 * at, tile + seen):
                weigh(params, wide, q, k, s, 64 * vectors, stats, 64 * at, seen, tile)
                add(params, wide, v, s, 64 * vectors, o, stats, 64 * at, seen, ask)

    @kernel(params_type)
    def flash_attn(params, ith, nth):
        n_base = n_base_tasks(params)
        splits = n_splits(params, n_base, nth)
        heads, tile = params.unit_heads, params.tile
        # Q, both tiles, scores, output and statistics belong to the thread.
        q = params.scratch + ith * params.scratch_bytes
        k, v, s = q + params.k_at, q + params.v_at, q + params.s_at
        o, stats = q + params.o_at, q + params.stats_at
        while True:
            task = next_work(params, 1)
            if task >= n_base * splits:
                break
            segment, first, n_tokens, unit = find_task(params, task // splits)
            kv_head = kv_head_of(params, unit)
            rows, token = n_tokens * heads, segment_word(segment, SEG_TOKEN) + first
            position = segment_word(segment, SEG_POS) + first
            # Parts count from the first position that the task sees: its cost is that of the window, at any depth.
            origin = origin_of(params, token, position)
            task_end = most_seen(params, end_seen(params, segment, token, position, n_tokens))
            n_positions = task_end - origin
            length = split_length(params, n_positions, splits)
            begin = length * (task % splits)
            end = min(begin + length, n_positions)
            # Parts are whole tiles, so the last ones may be empty.
            if begin >= end:
                continue
            stride = 64 * ((rows + 15) >> 4)
            o_bytes = stride * ((params.v_cols + 15) & ~15)
            # K's tile is free until the first positions are staged, and serves as scratch.
            pack(params, token, unit, rows, q, k)
            start_rows(params, token, unit, rows, position, task_end, stats, o, o_bytes, begin == 0)
            begin += origin
            end += origin
            for at in range(begin, end, tile):
                n = min(tile, end - at)
                values = stage(params, cells(params, segment, token), kv_head, k, v, at, n)
                ask = values
                if not scattered and at + n < end:
                    # While V is multiplied, the next rows of K are on their way.
                    ask = next_k(params, segment, kv_head, at + n, values)
                attend(params, q, k, values, s, o, stats, rows, n, at, ask)
            if length >= n_positions:
                write_rows(params, token, unit, rows, o, stride, stats + L, s)
            else:
                write_slot(params.slots + task * params.slot_bytes, stats, o, o_bytes)

    return flash_attn


def make_flash_attn(k_types, v_type, more="", make_part=make_stage_part, params_type=FlashParams):
    """Return the kernel for these element types of K (parts joined by '+') and V ("view": inside K's rows)."""
    stage_k, stage_v = make_stage_k(k_types, make_part), make_stage_v(v_type, make_part)
    soft_max_column = make_soft_max_column(more)
    rows_product, columns_product = make_rows_product(False), make_columns_product()

    @merge
    def stage(params, segment, kv_head, k, v, position, n):
        stage_k(params, segment, kv_head, k, tile_chunk(params), position, n)
        return stage_v(params, segment, kv_head, k, v, tile_chunk(params), position, n)

    @inline
    def weigh(params, wide, q, k, s, stride, stats, x, n, tile):
        rows_product(wide, k, tile_chunk(params), n, q + x, stride, params.k_chunks, s + x, stride)
        for i in range(x, x + 64 * wide, 64):
            soft_max_column(params, s + i, stride, n, tile, stats + i)

    @inline
    def add(params, wide, v, s, stride, o, stats, x, n, ask):
        chunk_bytes, chunks, factors = tile_chunk(params), (params.v_cols + 15) >> 4, stats + CORRECTION + x
        columns_product(wide, v, chunk_bytes, chunks, s + x, stride, n, o + x, stride, factors, ask)

    return make_flash(pack_q, stage, weigh, add, more, params_type)


@inline
def merge_chunk(slot, slot_bytes, parts, v, chunk, stride, sums, out):
    """Sum 16 columns of one vector of rows over the parts of a task: out[column][row], sums[row]."""
    # Parts are added in order, whichever thread computed them, so the result does not depend on timing.
    top = load_f32x16(slot + M + 64 * v)
    for i in range(1, parts):
        top = vmax_fast(load_f32x16(slot + i * slot_bytes + M + 64 * v), top)
    total = zero_f32x16()
    for i in range(parts):
        part = slot + i * slot_bytes
        weight = vexp_fast(vsub(load_f32x16(part + M + 64 * v), top))
        total = vfma(load_f32x16(part + L + 64 * v), weight, total)
        src = part + 2 * STAT_BYTES + 16 * chunk * stride + 64 * v
        for c in range(16):
            old = load_f32x16(out + 64 * c) if i > 0 else zero_f32x16()
            store_f32x16(out + 64 * c, vfma(load_f32x16(src + c * stride), weight, old))
    store_f32x16(sums, total)


def make_combine(more="", params_type=FlashParams):
    """Return a kernel that merges the parts of split tasks, with the same parameters; it skips unsplit tasks."""
    origin_of, end_seen, most_seen = make_origin(more), make_end_seen(more), make_most_seen(more)

    @kernel(params_type)
    def combine(params, ith, nth):
        n_base = n_base_tasks(params)
        splits = n_splits(params, n_base, nth)
        if splits == 1:
            return
        heads, slot_bytes = params.unit_heads, params.slot_bytes
        tmp = params.scratch + ith * params.scratch_bytes
        v_chunks = (params.v_cols + 15) >> 4
        # Divided in advance rather than by a counter: all items cost the same.
        for item in range(n_base * v_chunks * ith // nth, n_base * v_chunks * (ith + 1) // nth):
            task, chunk = item // v_chunks, item % v_chunks
            segment, first, n_tokens, unit = find_task(params, task)
            position = segment_word(segment, SEG_POS) + first
            rows, token = n_tokens * heads, segment_word(segment, SEG_TOKEN) + first
            n_positions = most_seen(params, end_seen(params, segment, token, position, n_tokens))
            n_positions -= origin_of(params, token, position)
            length = split_length(params, n_positions, splits)
            if length >= n_positions:
                continue
            stride = 64 * ((rows + 15) >> 4)
            slot = params.slots + task * splits * slot_bytes
            parts = (n_positions + length - 1) // length
            for v in range(stride >> 6):
                merge_chunk(slot, slot_bytes, parts, v, chunk, stride, tmp + 2048, tmp)
                merged = tmp - 64 * v - 16 * chunk * 64  # write_chunk adds these back
                write_chunk(params, token, unit, rows, v, chunk, merged, 64, tmp + 2048 - 64 * v, tmp + 1024)

    return combine
