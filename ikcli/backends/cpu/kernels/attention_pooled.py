"""Compressed attention: entries of several positions, the list of rows that a query sees, and attention to them.

Rows of the list are those of a cache of positions, entries those of another one, as -1 - row; both have rows of one
kind. A task of attention has one token, as in attention_sparse.py.
"""

from ikcli.backends.cpu.kernels.attention import AHEAD, make_combine, make_flash_attn
from ikcli.backends.cpu.kernels.attention_tasks import segment_word
from ikcli.backends.cpu.kernels.common import (
    N_SEG,
    SEG_CELL,
    SEG_N_TOKENS,
    SEG_POS,
    SEG_TOKEN,
    SEG_WORDS,
    SEGMENTS,
    state_word,
)
from ikcli.backends.cpu.kernels.kv import STORE, make_prefetch_row, make_stage
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.backends.cpu.kernels.windows import window_cell
from ikcli.backends.cpu.params_attention import (
    EntryPositionsParams,
    PooledCellsParams,
    PooledParams,
    PooledStoreParams,
    PoolParams,
)
from ikcli.native.jit import inline, merge
from ikcli.native.simd.math import vexp_fast
from ikcli.native.simd.vec import (
    ld_i32,
    load_f32x16,
    st_i32,
    store_f32x16,
    vadd,
    vdiv,
    vfma,
    vmax_fast,
    vsub,
    zero_f32x16,
)


@inline
def _first_row(params, segment, in_window):
    """Return the row of position 0 of a segment."""
    return window_cell(params, segment) if in_window != 0 else segment_word(segment, SEG_CELL)


def make_pool():
    """Return the kernel that sums up the positions of entries; threads share the entries of a segment."""

    @merge
    def pool_entry(params, rows, begin, last, out):
        """Write the entry of which `last` is the last position, and `begin` the first that is summed up."""
        width, ratio, row_bytes = params.width, params.ratio, params.row_bytes
        own = 4 * width * (params.parts - 1)
        logits = 4 * width * params.parts
        for c in range(0, 4 * width, 64):
            top, total, values = zero_f32x16(), zero_f32x16(), zero_f32x16()
            for p in range(begin, last + 1):
                at = c + (own if p > last - ratio else 0)
                bias = load_f32x16(params.bias + p % ratio * logits + at)
                x = vadd(load_f32x16(rows + p * row_bytes + logits + at), bias)
                top = x if p == begin else vmax_fast(x, top)
            for p in range(begin, last + 1):
                at = c + (own if p > last - ratio else 0)
                bias = load_f32x16(params.bias + p % ratio * logits + at)
                x = vadd(load_f32x16(rows + p * row_bytes + logits + at), bias)
                weight = vexp_fast(vsub(x, top))
                total = vadd(total, weight)
                values = vfma(load_f32x16(rows + p * row_bytes + at), weight, values)
            store_f32x16(out + c, vdiv(values, total))

    @kernel(PoolParams)
    def pool(params, ith, nth):
        segments, ratio = state_word(params, SEGMENTS), params.ratio
        for s in range(state_word(params, N_SEG)):
            segment = segments + 8 * SEG_WORDS * s
            token, n, position = (
                segment_word(segment, SEG_TOKEN), segment_word(segment, SEG_N_TOKENS), segment_word(segment, SEG_POS)
            )  # fmt: skip
            rows = params.cache + _first_row(params, segment, params.window) * params.row_bytes
            for i in range(n * ith // nth, n * (ith + 1) // nth):
                out, p = params.out + 4 * params.width * (token + i), position + i
                if (p + 1) % ratio != 0:
                    for c in range(0, 4 * params.width, 64):
                        store_f32x16(out + c, zero_f32x16())
                else:
                    pool_entry(params, rows, max(p + 1 - params.parts * ratio, 0), p, out)

    return pool


def make_pooled_store(type_):
    """Return the kernel that writes the rows of tokens which complete an entry."""
    store = STORE[type_]

    @kernel(PooledStoreParams)
    def pooled_store(params, ith, nth):
        segments, ratio = state_word(params, SEGMENTS), params.ratio
        for s in range(state_word(params, N_SEG)):
            segment = segments + 8 * SEG_WORDS * s
            token, n, position = (
                segment_word(segment, SEG_TOKEN), segment_word(segment, SEG_N_TOKENS), segment_word(segment, SEG_POS)
            )  # fmt: skip
            for i in range(n * ith // nth, n * (ith + 1) // nth):
                if (position + i + 1) % ratio == 0:
                    row = segment_word(segment, SEG_CELL) + position + i
                    store(params.cache + row * params.row_bytes, 0, params.x + (token + i) * params.stride, params.cols)

    return pooled_store


def make_pooled_cells():
    """Return the kernel that lists the rows each query sees."""

    @kernel(PooledCellsParams)
    def pooled_cells(params, ith, nth):
        segments = state_word(params, SEGMENTS)
        for s in range(state_word(params, N_SEG)):
            segment = segments + 8 * SEG_WORDS * s
            token, n = segment_word(segment, SEG_TOKEN), segment_word(segment, SEG_N_TOKENS)
            first, cell = _first_row(params, segment, params.in_window), segment_word(segment, SEG_CELL)
            for i in range(n * ith // nth, n * (ith + 1) // nth):
                out, seen = params.out + (token + i) * params.out_bytes, segment_word(segment, SEG_POS) + i + 1
                at = out
                for p in range(max(seen - params.window, 0), seen):
                    st_i32(at, first + p)
                    at += 4
                for e in range(min(seen // params.ratio, params.most)):
                    entry = e
                    if params.chosen != 0:
                        entry = ld_i32(params.chosen + (token + i) * params.chosen_bytes + 4 * e) - cell
                    st_i32(at, -1 - (cell + (entry + 1) * params.ratio - 1))
                    at += 4
                while at < out + params.out_bytes:
                    st_i32(at, 0)
                    at += 4

    return pooled_cells


def make_entry_positions():
    """Return the kernel that lists the positions of chosen entries, and those that no entry has yet."""

    @kernel(EntryPositionsParams)
    def entry_positions(params, ith, nth):
        segments, ratio = state_word(params, SEGMENTS), params.ratio
        for s in range(state_word(params, N_SEG)):
            segment = segments + 8 * SEG_WORDS * s
            token, n, position, cell = (
                segment_word(segment, SEG_TOKEN), segment_word(segment, SEG_N_TOKENS), segment_word(segment, SEG_POS),
                segment_word(segment, SEG_CELL),
            )  # fmt: skip
            for i in range(n * ith // nth, n * (ith + 1) // nth):
                at, seen = params.out + (token + i) * params.out_bytes, position + i + 1
                end = at + params.out_bytes
                for e in range(min(seen // ratio, params.most)):
                    entry = ld_i32(params.chosen + (token + i) * params.chosen_bytes + 4 * e) - cell
                    for p in range(entry * ratio, entry * ratio + ratio):
                        st_i32(at, cell + p)
                        at += 4
                for p in range(seen - seen % ratio, seen):
                    st_i32(at, cell + p)
                    at += 4
                while at < end:
                    st_i32(at, -1)
                    at += 4

    return entry_positions


def make_stage_listed(type_):
    """Return stage_listed(params, part, cells, kv_head, dst, chunk_bytes, position, n): listed rows, as chunks."""
    stage, prefetch_row = make_stage(type_), make_prefetch_row(type_)

    @inline
    def address(params, part, cell):
        row = ld_i32(cell)
        return part.at + row * part.row_bytes if row >= 0 else params.pooled + (-1 - row) * part.row_bytes

    @inline
    def stage_listed(params, part, cells, kv_head, dst, chunk_bytes, position, n):
        here = cells + 4 * position
        for i in range(n):
            prefetch_row(address(params, part, here + 4 * min(i + AHEAD, n - 1)), part.offset, part.width)
            stage(dst + CHUNK_ROW * i, chunk_bytes, address(params, part, here + 4 * i), part.offset, part.width)

    return stage_listed


def make_flash_pooled(type_):
    """Return the kernel of attention for this type of the caches."""
    return make_flash_attn(type_, "view", "ps", make_stage_listed, PooledParams)


def make_combine_pooled():
    """Return the kernel that merges the parts of split tasks."""
    return make_combine("ps", PooledParams)
