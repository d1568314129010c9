"""Flash attention for tasks of a few rows (generation): columns, not rows, are the vector lanes.

A task is (segment, block of its tokens[, range of positions]) with all units of heads, tile by tile, so that the cache
is read in order. Tiles, statistics and parts are those of attention.py, whose `make_combine` merges split tasks. Scores
come from dot products of 4 rows with 4 positions, whose 16 sums are reduced together; the output is [row][column].
"""

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.attention import (
    CORRECTION,
    FIRST_HEAD,
    GROUP,
    K0,
    K_AT,
    K_CHUNKS,
    LIMIT,
    O_AT,
    O_UNIT,
    OUT,
    OUT_STRIDE,
    PART_ROW_BYTES,
    PART_WIDTH,
    Q_UNIT,
    S_AT,
    SCALE,
    SCRATCH,
    SCRATCH_BYTES,
    SLOT_BYTES,
    SLOTS,
    STAT_BYTES,
    STATS_AT,
    STATS_BYTES,
    TILE,
    UNIT_HEADS,
    UNITS,
    V0,
    V_AT,
    V_CHUNK,
    V_COLS,
    L,
    M,
    find_task,
    make_stage_k,
    make_stage_v,
    n_base_tasks,
    n_splits,
    part_row,
    segment_word,
    split_length,
    stage_q,
    start_rows,
    tile_chunk,
)
from ikcli.backends.cpu.kernels.common import SEG_POS, SEG_TOKEN, next_work, word
from ikcli.backends.cpu.kernels.kv import make_prefetch_row
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW, fma_f32x16, load_f32x16_at, loop, offset, sum_lanes, transpose16
from ikcli.native import isa
from ikcli.native.jit import inline, merge
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    const_vector,
    f32x16,
    half_to_f32,
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

_F1, _LOWEST = np.float32(1.0), np.float32(-3.0e38)
_I32, _F32 = ir.IntType(32), ir.FloatType()
WIDE = isa.current().name == "avx512"
ROWS = 4 if WIDE else 1  # most rows of a block
SUMS = 16 if WIDE else 4  # sums of a block
_HALVES = ir.VectorType(ir.IntType(16), 16)
SIZES = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of an element of the types that are read as they lie


def _load_chunk(builder, address, kind):
    """16 elements of a stored type as floats."""
    if kind == "f32":
        return load_f32x16_at(builder, address)
    bits = load_f32x16_at(builder, address, _HALVES)
    if kind == "f16":
        return half_to_f32(builder, bits)
    wide = builder.shl(builder.zext(bits, llvm_type(i32x16)), const_vector(i32x16, [16] * 16))
    return builder.bitcast(wide, llvm_type(f32x16))


def make_dot_block(m, n, kind):
    """s[m rows][n positions] = Q K^T over chunks of 16 columns, m * n <= 16 a power of two.

    Q's rows are CHUNK_ROW apart, K's positions k_row bytes.
    """

    @intrinsic
    def dot_block(typingctx, q, q_chunk, k, k_row, k_chunk, n_chunks, s, s_stride):
        def codegen(context, builder, sig, args):
            q, q_chunk, k, k_row, k_chunk, n_chunks, s, s_stride = args
            strides = [builder.mul(k_row, ir.Constant(k_row.type, i)) for i in range(5)]
            fours = [k]
            for _ in range(4, n, 4):
                fours.append(builder.add(fours[-1], strides[4]))

            def chunk(state):
                qt, kts, accs = state[0], state[1 : 1 + len(fours)], state[1 + len(fours) :]
                rows = [load_f32x16_at(builder, offset(builder, qt, CHUNK_ROW * i)) for i in range(m)]
                out = [None] * (m * n)
                for j in range(n):
                    at = builder.add(kts[j // 4], strides[j % 4]) if j % 4 else kts[j // 4]
                    x = _load_chunk(builder, at, kind)
                    for i in range(m):
                        out[i * n + j] = fma_f32x16(builder, rows[i], x, accs[i * n + j])
                return [builder.add(qt, q_chunk), *(builder.add(kt, k_chunk) for kt in kts), *out]

            zero = const_vector(f32x16, [0.0] * 16)
            accs = loop(builder, n_chunks, [q, *fours, *[zero] * (m * n)], chunk)[1 + len(fours) :]
            sums = sum_lanes(builder, accs)
            for i in range(m):
                pick = ir.Constant(ir.VectorType(_I32, n), [i * n + j for j in range(n)])
                row = builder.shuffle_vector(sums, sums, pick)
                builder.store(row, pointer(builder, s, row.type), align=1)
                s = builder.add(s, s_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return dot_block


def make_values_block(m, n, kind):
    """o[m rows][n chunks] = o * scale[row] + P V over n_positions >= 1, v_row bytes apart."""

    @intrinsic
    def values_block(typingctx, p, p_stride, v, v_row, v_chunk, n_positions, o, o_stride, scale):
        def codegen(context, builder, sig, args):
            p, p_stride, v, v_row, v_chunk, n_positions, o, o_stride, scale = args
            chunks = [builder.mul(v_chunk, ir.Constant(v_chunk.type, j)) for j in range(n)]
            rows, outs, accs = [p], [o], []
            for _ in range(1, m):
                rows.append(builder.add(rows[-1], p_stride))
                outs.append(builder.add(outs[-1], o_stride))
            for i in range(m):
                factor = splat_value(builder, f32x16, load_f32x16_at(builder, offset(builder, scale, 4 * i), _F32))
                accs += [builder.fmul(load_f32x16_at(builder, offset(builder, outs[i], 64 * j)), factor)
                         for j in range(n)]  # fmt: skip

            def position(state):
                four, at, *accs = state
                x = [_load_chunk(builder, builder.add(at, chunks[j]) if j else at, kind) for j in range(n)]
                out = []
                for i in range(m):
                    w = splat_value(builder, f32x16, load_f32x16_at(builder, builder.add(rows[i], four), _F32))
                    out += [fma_f32x16(builder, w, x[j], accs[i * n + j]) for j in range(n)]
                return [offset(builder, four, 4), builder.add(at, v_row), *out]

            _, _, *accs = loop(builder, n_positions, [ir.Constant(p.type, 0), v, *accs], position)
            for i in range(m):
                for j in range(n):
                    at = offset(builder, outs[i], 64 * j)
                    builder.store(accs[i * n + j], pointer(builder, at, accs[0].type), align=1)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), codegen

    return values_block


def _make_scores(m, kind):
    """scores(...) of rows in blocks of m: s[rows][n]."""
    wide = SUMS // m
    block, one = make_dot_block(m, wide, kind), make_dot_block(m, 1, kind)

    @inline
    def scores(q, rows, k, k_row, k_chunk, n, n_chunks, s, s_stride):
        q_chunk = CHUNK_ROW * rows
        t = 0
        while t + wide <= n:
            for r in range(0, rows, m):
                at = s + r * s_stride + 4 * t
                block(q + CHUNK_ROW * r, q_chunk, k + k_row * t, k_row, k_chunk, n_chunks, at, s_stride)
            t += wide
        while t < n:
            for r in range(0, rows, m):
                at = s + r * s_stride + 4 * t
                one(q + CHUNK_ROW * r, q_chunk, k + k_row * t, k_row, k_chunk, n_chunks, at, s_stride)
            t += 1

    return scores


def _make_values(m, kind):
    """add_values(...) of rows in blocks of m: o[rows][16 * n_chunks] = o * scale + P V."""
    wide = min(SUMS // m, 8)
    block, one = make_values_block(m, wide, kind), make_values_block(m, 1, kind)

    @inline
    def add_values(p, p_stride, rows, v, v_row, v_chunk, n, n_chunks, o, o_stride, scale):
        c = 0
        while c + wide <= n_chunks:
            for r in range(0, rows, m):
                at = o + r * o_stride + 64 * c
                block(p + r * p_stride, p_stride, v + c * v_chunk, v_row, v_chunk, n, at, o_stride, scale + 4 * r)
            c += wide
        while c < n_chunks:
            for r in range(0, rows, m):
                at = o + r * o_stride + 64 * c
                one(p + r * p_stride, p_stride, v + c * v_chunk, v_row, v_chunk, n, at, o_stride, scale + 4 * r)
            c += 1

    return add_values


@inline
def padded_rows(rows):
    """Rows of a task as they are computed: 1, 2, or a multiple of ROWS."""
    return rows if rows <= 2 else (rows + ROWS - 1) // ROWS * ROWS


def make_products(kind, v_kind):
    """(scores, add_values) for any number of rows as `padded_rows` gives it; element types of K and V as they lie."""
    scores1, values1 = _make_scores(1, kind), _make_values(1, v_kind)
    if ROWS == 1:
        return scores1, values1
    scores2, values2 = _make_scores(2, kind), _make_values(2, v_kind)
    scores4, values4 = _make_scores(ROWS, kind), _make_values(ROWS, v_kind)

    @inline
    def scores(q, rows, k, k_row, k_chunk, n, n_chunks, s, s_stride):
        if rows == 1:
            scores1(q, rows, k, k_row, k_chunk, n, n_chunks, s, s_stride)
        elif rows == 2:
            scores2(q, rows, k, k_row, k_chunk, n, n_chunks, s, s_stride)
        else:
            scores4(q, rows, k, k_row, k_chunk, n, n_chunks, s, s_stride)

    @inline
    def add_values(p, p_stride, rows, v, v_row, v_chunk, n, n_chunks, o, o_stride, scale):
        if rows == 1:
            values1(p, p_stride, rows, v, v_row, v_chunk, n, n_chunks, o, o_stride, scale)
        elif rows == 2:
            values2(p, p_stride, rows, v, v_row, v_chunk, n, n_chunks, o, o_stride, scale)
        else:
            values4(p, p_stride, rows, v, v_row, v_chunk, n, n_chunks, o, o_stride, scale)

    return scores, add_values


@inline
def soft_max_tile(s, seen, n, stats):
    """e**(score - max) of a row's first `seen` positions, 0 up to n; updates its statistics. NaN makes the sum NaN."""
    lowest, zero = splat_f32x16(_LOWEST), zero_f32x16()
    old = splat_f32x16(ld_f32(stats + M))
    top = old
    for i in range(0, seen, 16):
        x = select_less_i32(lane_index(), splat_i32x16(seen - i), load_f32x16(s + 4 * i), lowest)
        top = vmax_fast(x, top)
    top = splat_f32x16(reduce_max(top))
    total, nan = zero, zero
    for i in range(0, n, 16):
        x = select_less_i32(lane_index(), splat_i32x16(seen - i), load_f32x16(s + 4 * i), lowest)
        x = vsub(x, top)
        nan = vfma(x, zero, nan)
        p = select_less_i32(lane_index(), splat_i32x16(seen - i), vexp_fast(x), zero)
        total = vadd(total, p)
        store_f32x16(s + 4 * i, p)
    correction = vexp_fast(vsub(old, top))
    store_f32_first(stats + M, top, 1)
    store_f32_first(stats + CORRECTION, correction, 1)
    total = vadd(total, nan)
    new = vfma(splat_f32x16(ld_f32(stats + L)), correction, splat_f32x16(reduce_add(total)))
    store_f32_first(stats + L, new, 1)


@inline
def load_q(params, token, unit, rows, padded, q):
    """Scaled Q as chunks of `padded` rows, zeros in those beyond `rows`."""
    chunks = word(params, K_CHUNKS)
    scale = splat_f32x16(ld_f32(params + 8 * SCALE))
    for r in range(rows):
        stage_q(params, token, unit, r, q + CHUNK_ROW * r, CHUNK_ROW * padded)
    for c in range(chunks):
        for r in range(padded):
            at = q + CHUNK_ROW * (c * padded + r)
            store_f32x16(at, vmul(load_f32x16(at), scale) if r < rows else zero_f32x16())


@inline
def write_few(params, token, unit, rows, o, o_stride, sums):
    """o[row][column] over the sums, to the node's output."""
    heads, cols = word(params, UNIT_HEADS), word(params, V_COLS)
    for r in range(rows):
        head = word(params, FIRST_HEAD) + unit * heads + r % heads
        dst = word(params, OUT) + (token + r // heads) * word(params, OUT_STRIDE) + 4 * head * cols
        scale = splat_f32x16(_F1 / ld_f32(sums + 4 * r))
        for c in range(0, cols, 16):
            store_f32_first(dst + 4 * c, vmul(load_f32x16(o + r * o_stride + 4 * c), scale), min(16, cols - c))


@inline
def write_few_slot(slot, stats, o, o_stride):
    """A part of a split task, transposed to the form that make_combine reads (one vector of rows)."""
    for i in range(0, 2 * STAT_BYTES, 64):
        store_f32x16(slot + i, load_f32x16(stats + i))
    for c in range(0, o_stride, 64):
        transpose16(o + c, o_stride, slot + 2 * STAT_BYTES + 16 * c, 64)


@inline
def finish_unit(params, token, unit, rows, o, stats, slot):
    """Write a unit's output, or its part of it if there is a slot."""
    o_stride = 64 * ((word(params, V_COLS) + 15) >> 4)
    if slot == 0:
        write_few(params, token, unit, rows, o, o_stride, stats + L)
    else:
        write_few_slot(slot, stats, o, o_stride)


@inline
def find_slot(params, item):
    """Where the part `item` (unit of a task * parts + part) of a split task is kept."""
    return word(params, SLOTS) + item * word(params, SLOT_BYTES)


def _make_tile(k_types, v_type, direct):
    """tile(params, segment, kv_head, k, v, position, n) -> where K and V of n positions are, as `make_products` reads
    them: (k, k_row, k_chunk, v, v_row, v_chunk). `direct`: in the cache itself, otherwise staged as floats."""
    if direct:
        k_size, v_size = SIZES[k_types], SIZES[k_types if v_type == "view" else v_type]
        is_view = v_type == "view"
        prefetch_k, prefetch_v = make_prefetch_row(k_types), make_prefetch_row(k_types if is_view else v_type)

        @inline
        def address(params, part, segment, kv_head, position, size, n):
            row, element = part_row(params, part, segment, kv_head)
            stride = word(params, part + PART_ROW_BYTES)
            return row + position * stride + size * element, stride

        @inline
        def tile_direct(params, segment, kv_head, k, v, position, n):
            k, k_row = address(params, K0, segment, kv_head, position, k_size, n)
            for i in range(n):
                prefetch_k(k + (n + i) * k_row, 0, word(params, K0 + PART_WIDTH))
            if is_view:
                return k, k_row, 16 * k_size, k + 16 * k_size * word(params, V_CHUNK), k_row, 16 * k_size
            v, v_row = address(params, V0, segment, kv_head, position, v_size, n)
            for i in range(n):
                prefetch_v(v + (n + i) * v_row, 0, word(params, V0 + PART_WIDTH))
            return k, k_row, 16 * k_size, v, v_row, 16 * v_size

        return tile_direct
    stage_k, stage_v = make_stage_k(k_types), make_stage_v(v_type)

    @inline
    def tile_staged(params, segment, kv_head, k, v, position, n):
        chunk = tile_chunk(params)
        stage_k(params, segment, kv_head, k, chunk, position, n)
        return k, CHUNK_ROW, chunk, stage_v(params, segment, kv_head, k, v, chunk, position, n), CHUNK_ROW, chunk

    return tile_staged


def make_flash_few(k_types, v_type, direct):
    """flash_attn for at most 8 rows per task; same parameters, scratch for 16 rows.

    direct = 1: the types are in SIZES, K is one part, and widths are multiples of 16; rows are read where they lie.
    """
    tile_of = _make_tile(k_types, v_type, direct)
    v_kind = k_types if v_type == "view" else v_type
    scores, add_values = make_products(k_types if direct else "f32", v_kind if direct else "f32")

    @merge
    def attend(params, q, k, k_row, k_chunk, v, v_row, v_chunk, s, o, stats, rows, padded, n, tile):
        s_stride, v_chunks = 4 * (word(params, TILE) + 16), (word(params, V_COLS) + 15) >> 4
        scores(q, padded, k, k_row, k_chunk, n, word(params, K_CHUNKS), s, s_stride)
        for r in range(rows):
            seen = max(0, min(n, ld_i32(stats + LIMIT + 4 * r) - tile))
            soft_max_tile(s + r * s_stride, seen, n, stats + 4 * r)
        for r in range(rows, padded):
            st_f32(stats + CORRECTION + 4 * r, _F1)
        add_values(s, s_stride, padded, v, v_row, v_chunk, n, v_chunks, o, 64 * v_chunks, stats + CORRECTION)

    def flash_few(params, ith, nth):
        n_base, units = n_base_tasks(params), word(params, UNITS)
        splits = n_splits(params, n_base, nth)
        heads, tile, group = word(params, UNIT_HEADS), word(params, TILE), word(params, GROUP)
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
            padded = padded_rows(rows)
            position = segment_word(segment, SEG_POS) + first
            length = split_length(params, position + n_tokens, splits)
            begin = length * (task % splits)
            end = min(begin + length, position + n_tokens)
            if begin >= end:
                continue
            for u in range(units):
                load_q(params, token, u, rows, padded, q + u * q_unit)
                start_rows(stats + u * STATS_BYTES, rows, heads, position, o + u * o_unit, o_unit)
            for at in range(begin, end, tile):
                n = min(tile, end - at)
                for u in range(units):
                    kv_head = (word(params, FIRST_HEAD) + u * heads) // group
                    kt, k_row, k_chunk, vt, v_row, v_chunk = tile_of(params, segment, kv_head, k, v, at, n)
                    st = stats + u * STATS_BYTES
                    attend(
                        params, q + u * q_unit, kt, k_row, k_chunk, vt, v_row, v_chunk, s, o + u * o_unit, st, rows,
                        padded, n, at,
                    )  # fmt: skip
            for u in range(units):
                slot = 0
                if length < position + n_tokens:
                    slot = find_slot(params, (base + u) * splits + task % splits)
                finish_unit(params, token, u, rows, o + u * o_unit, stats + u * STATS_BYTES, slot)

    return flash_few
