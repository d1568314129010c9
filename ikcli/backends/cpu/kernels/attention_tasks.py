"""What the kernels of attention share: their parameter words, statistics of rows, and how work is divided into tasks.

Factories have an argument `more`: letters of what an op asks for beyond causal attention. w: windows or chunks;
s: sinks; c: a soft cap of scores. Without a letter a kernel's code has nothing of it.
"""

import numpy as np

from ikcli.backends.cpu.cell_places import IN_ROWS, IN_WINDOW
from ikcli.backends.cpu.kernels.common import (
    N_SEG,
    SEG_CELL,
    SEG_KV_ROW,
    SEG_N_TOKENS,
    SEG_WORDS,
    SEGMENTS,
    state_word,
    word,
)
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW
from ikcli.backends.cpu.kernels.windows import window_cell
from ikcli.native.jit import inline
from ikcli.native.simd.control import atomic_load
from ikcli.native.simd.vec import ld_i64

# Parameter words.
OUT, OUT_STRIDE, FIRST_HEAD, UNITS, UNIT_HEADS, GROUP, BLOCK, TILE, SCALE, K_CHUNKS, V_COLS, V_CHUNK = range(3, 15)
SCRATCH, SCRATCH_BYTES, K_AT, V_AT, S_AT, O_AT, STATS_AT, SLOTS, SLOT_BYTES = range(15, 24)
UNITS_PER_TASK, MIN_SPLIT, Q_UNIT, O_UNIT = range(24, 28)  # the last two: bytes per unit, where a task has several
INDEPENDENT = 28  # 1: how a task is split does not depend on the other tasks
WINDOW, CHUNK, SINKS, CAP = range(29, 33)  # positions (many: no window), address of f32 per head, f32
PARTS = 33  # q, q, k, k, v: PART_WORDS each; width 0 = absent
PART_ADDRESS, PART_ROW_BYTES, PART_OFFSET, PART_HEAD_STRIDE, PART_WIDTH, PART_PLACE, PART_WORDS = range(7)
Q0, Q1, K0, K1, V0 = (PARTS + PART_WORDS * i for i in range(5))

MAX_ROWS = 144  # rows of a task
STAT_BYTES = 4 * MAX_ROWS  # statistics: M, L, CORRECTION, LIMIT, UNIT (of integer weights), FIRST (position seen)
M, L, CORRECTION, LIMIT, UNIT, FIRST = (STAT_BYTES * i for i in range(6))
STATS_BYTES = 6 * STAT_BYTES
SPLITS_PER_THREAD = 4

LOWEST = np.float32(-3.0e38)


@inline
def segment_word(segment, i):
    return ld_i64(segment + 8 * i)


@inline
def n_base_tasks(params):
    """Tasks before splitting over positions."""
    segments, block, total = state_word(params, SEGMENTS), word(params, BLOCK), 0
    for i in range(state_word(params, N_SEG)):
        # An atomic load keeps LLVM from spreading this short loop over vectors, 30 KB of code.
        total += (atomic_load(segments + 8 * (SEG_WORDS * i + SEG_N_TOKENS)) + block - 1) // block
    return total * word(params, UNITS)


@inline
def find_task(params, task):
    """(segment address, first token inside it, tokens, unit); the blocks with most positions come first."""
    segment, block, units = state_word(params, SEGMENTS), word(params, BLOCK), word(params, UNITS)
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
    """Parts every task is split into: the same in all kernels of one run."""
    if nth == 1 or n_base == 0:
        return 1
    if word(params, INDEPENDENT):
        n_base = word(params, UNITS)
    return max(1, SPLITS_PER_THREAD * nth * word(params, UNITS_PER_TASK) // n_base)


@inline
def split_length(params, n_positions, splits):
    """Positions per part: whole tiles."""
    tile = word(params, TILE)
    length = max((n_positions + splits - 1) // splits, word(params, MIN_SPLIT))
    return (length + tile - 1) // tile * tile


def make_first_seen(more):
    """first_seen(params, position): the first position that a token sees. Parts of a task count from it."""
    if "w" not in more:

        @inline
        def all_seen(params, position):
            return 0

        return all_seen

    @inline
    def first_seen(params, position):
        return max(position + 1 - word(params, WINDOW), position - position % word(params, CHUNK), 0)

    return first_seen


@inline
def part_row(params, part, segment, kv_head):
    """(address of the row of position 0, first element) of a K or V part."""
    place = word(params, part + PART_PLACE)
    if place == IN_ROWS:
        first = segment_word(segment, SEG_KV_ROW)
    else:
        first = window_cell(params, segment) if place == IN_WINDOW else segment_word(segment, SEG_CELL)
    address = word(params, part + PART_ADDRESS) + first * word(params, part + PART_ROW_BYTES)
    return address, word(params, part + PART_OFFSET) + kv_head * word(params, part + PART_HEAD_STRIDE)


@inline
def tile_chunk(params):
    """Bytes of a chunk of a tile; one row more than needed, so that chunks do not share cache sets."""
    return CHUNK_ROW * (word(params, TILE) + 1)
