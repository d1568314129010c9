"""Shared parts of the attention kernels: statistics of rows, and the division of work into tasks.

Factories have an argument `more`: letters of the features that an op needs beyond causal attention. w: windows or
chunks; s: sinks; c: a soft cap of scores; b: both directions; d: scores weakened by distance; t: a table of what
scores gain by distance; i: chosen positions (attention_sparse.py); f: with i, rows before all positions; p: positions
and entries (attention_pooled.py); x: all positions of an encoder; r: ranges of positions that come with tokens, whose
ends do not decrease. A kernel contains no code for letters that it lacks.
"""

import numpy as np

from ikcli.backends.cpu.cell_places import IN_ROWS, IN_WINDOW
from ikcli.backends.cpu.kernels.common import (
    N_SEG,
    SEG_CELL,
    SEG_KV_ROW,
    SEG_N_KV,
    SEG_N_TOKENS,
    SEG_WORDS,
    SEGMENTS,
    state_word,
)
from ikcli.backends.cpu.kernels.media import SEEN, SEEN_END, place
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.backends.cpu.kernels.windows import window_cell
from ikcli.backends.cpu.params_attention import SPLITS_PER_THREAD, STAT_BYTES
from ikcli.native.jit import inline
from ikcli.native.simd.control import atomic_load
from ikcli.native.simd.vec import ld_i32, ld_i64

# Statistics: UNIT is that of integer weights, FIRST the first position seen.
M, L, CORRECTION, LIMIT, UNIT, FIRST = (STAT_BYTES * i for i in range(6))
SLOPE, PLACE = UNIT, FIRST  # with "d": slope and position of a row; there are neither integers nor windows then
HEAD = UNIT  # with "t": the head of a row, beside its position

LOWEST = np.float32(-3.0e38)


@inline
def segment_word(segment, i):
    return ld_i64(segment + 8 * i)


@inline
def n_base_tasks(params):
    """Return the number of tasks before splitting over positions."""
    segments, block, total = state_word(params, SEGMENTS), params.block, 0
    for i in range(state_word(params, N_SEG)):
        # An atomic load keeps LLVM from spreading this short loop over vectors, 30 KB of code.
        total += (atomic_load(segments + 8 * (SEG_WORDS * i + SEG_N_TOKENS)) + block - 1) // block
    return total * params.units


@inline
def find_task(params, task):
    """Return (segment, first token inside it, tokens, unit) of a task; blocks with most positions come first."""
    segment, block, units = state_word(params, SEGMENTS), params.block, params.units
    while True:
        n_tokens = segment_word(segment, SEG_N_TOKENS)
        here = (n_tokens + block - 1) // block * units
        if task < here:
            first = (here - 1 - task) // units * block
            return segment, first, min(block, n_tokens - first), task % units
        task -= here
        segment += 8 * SEG_WORDS


@inline
def n_splits(params, n_base, nth):
    """Return the parts that every task is split into: the same in all kernels of one run."""
    if nth == 1 or n_base == 0:
        return 1
    if params.batch_invariant:  # batch-invariant: split as if the token were alone
        n_base = params.units
    return max(1, SPLITS_PER_THREAD * nth * params.units_per_task // n_base)


@inline
def split_length(params, n_positions, splits):
    """Return the positions per part: whole tiles."""
    tile = params.tile
    length = max((n_positions + splits - 1) // splits, params.min_split)
    return (length + tile - 1) // tile * tile


def make_first_seen(more):
    """Return first_seen(params, position): the first position that a token sees. Parts of a task count from it."""
    if "w" not in more:

        @inline
        def all_seen(params, position):
            return 0

        return all_seen

    @inline
    def first_seen(params, position):
        return max(position + 1 - params.window, position - position % params.chunk, 0)

    return first_seen


def make_origin(more):
    """Return origin(params, token, position): the first position that a token or one after it sees."""
    first_seen = make_first_seen(more)
    if "r" not in more:

        @inline
        def first_of_token(params, token, position):
            return first_seen(params, position)

        return first_of_token

    @inline
    def origin(params, token, position):
        return min(first_seen(params, position), ld_i32(place(params, token) + SEEN))

    return origin


def make_end_seen(more):
    """Return end_seen(params, segment, token, position, n_tokens): the end of what n tokens from a position on see."""
    if "r" in more:

        @inline
        def end_of_range(params, segment, token, position, n_tokens):
            return max(position + n_tokens, ld_i32(place(params, token + n_tokens - 1) + SEEN_END))

        return end_of_range
    if "x" in more:

        @inline
        def end_of_encoder(params, segment, token, position, n_tokens):
            return segment_word(segment, SEG_CELL) - window_cell(params, segment) + 1

        return end_of_encoder
    if "b" not in more:

        @inline
        def behind_tokens(params, segment, token, position, n_tokens):
            return position + n_tokens

        return behind_tokens

    if "w" in more:

        @inline
        def end_of_window(params, segment, token, position, n_tokens):
            return min(segment_word(segment, SEG_N_KV), position + n_tokens - 1 + params.window)

        return end_of_window

    @inline
    def end_seen(params, segment, token, position, n_tokens):
        return segment_word(segment, SEG_N_KV)

    return end_seen


def make_cells(more):
    """Return cells(params, segment, token): where a kernel finds the rows of positions.

    It is the segment, or the list of cells that were chosen for a token.
    """
    if "i" not in more and "p" not in more:

        @inline
        def of_segment(params, segment, token):
            return segment

        return of_segment

    @inline
    def chosen(params, segment, token):
        return params.cells + token * params.cell_bytes

    return chosen


def make_most_seen(more):
    """Return most_seen(params, n): the positions that are attended to of n visible ones."""
    if "p" in more:

        @inline
        def recent_and_entries(params, n):
            return min(n, params.recent) + min(n // params.ratio, params.most)

        return recent_and_entries
    if "f" in more:

        @inline
        def first_and_chosen(params, n):
            return params.n_prefix + min(n, params.most)

        return first_and_chosen
    if "i" not in more:

        @inline
        def all_visible(params, n):
            return n

        return all_visible

    @inline
    def chosen(params, n):
        # Where blocks are chosen, the last one is the query's own, of which it sees a part; behind whole entries are
        # the positions that no entry has yet, if there are any.
        return n if n <= params.most else params.most - params.span + 1 + (n - params.own) % params.span

    return chosen


@inline
def kv_head_of(params, unit):
    """Return the KV head that a unit of heads reads."""
    return (params.first_head + unit * params.unit_heads) // params.group


@inline
def k_part(params):
    """Return the first part of K."""
    return params.k[0]


@inline
def v_part(params):
    return params.v


@inline
def part_row(params, part, segment, kv_head):
    """Return (address of the row of position 0, first element) of a K or V part."""
    place = part.place
    if place == IN_ROWS:
        first = segment_word(segment, SEG_KV_ROW)
    else:
        first = window_cell(params, segment) if place == IN_WINDOW else segment_word(segment, SEG_CELL)
    address = part.at + first * part.row_bytes
    return address, part.offset + kv_head * part.head_stride


@inline
def tile_chunk(params):
    """Return the bytes of a chunk of a tile; one row more than needed, so that chunks do not share cache sets."""
    return CHUNK_ROW * (params.tile + 1)
