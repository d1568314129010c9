"""Parts that every kernel shares: the run-time state block and the division of work.

Kernel signature: kernel(params, ith, nth). params is a record (`backends/cpu/params.py`, `records.py`).
The state block (int64 words) is the only thing that changes between two runs of a program:
    n_tokens n_outputs n_kv n_seg, then addresses of: tokens i32[], pos i32[], cells i64[], out_ids i64[],
    segments i64[n_seg][SEG_WORDS], kv_cells i64[n_kv]
A segment is the part of one sequence in the micro-batch: its tokens are adjacent, its cells are adjacent in the cache.
"""

from ikcli.native.jit import inline
from ikcli.native.simd.control import atomic_add, atomic_cas, atomic_load
from ikcli.native.simd.vec import ld_i64

WORK, MOST_QUEUES = 64, 8  # bytes before the parameters: the counters of queues of work items; most ops have one
# State words; STATE_WORDS is their number.
N_TOKENS, N_OUTPUTS, N_KV, N_SEG, TOKENS, POS, CELLS, OUT_IDS, SEGMENTS, KV_CELLS, STATE_WORDS = range(11)
# Segment words: first token, number of tokens, first cell of the sequence, position of the first token (= cached
# positions before it), first compact KV row, number of cached positions including this micro-batch.
SEG_TOKEN, SEG_N_TOKENS, SEG_CELL, SEG_POS, SEG_KV_ROW, SEG_N_KV, SEG_WORDS = range(7)


@inline
def state_word(params, i):
    return ld_i64(params.state + 8 * i)


@inline
def n_rows(params):
    """Return the rows of this op in this run."""
    return ld_i64(params.state + 8 * params.row_count) * params.row_factor


@inline
def next_work(params, chunk):
    """Return the start of the next `chunk` work items; threads share the counter, the executor clears it."""
    return atomic_add(params.address - WORK, chunk)


@inline
def next_span(counter, total, n_threads):
    """Return (first, stop) of the next work items by the counter at this address: large pieces first, single ones last.

    `n_threads` take items of this queue. They stream through memory and need long runs, because hardware prefetching
    runs past the end of each.
    """
    while True:
        first = atomic_load(counter)
        if first >= total:
            return total, total
        size = max((total - first) // (2 * n_threads), 1)
        if atomic_cas(counter, first, first + size) != 0:
            return first, first + size


@inline
def queues_of(n_threads, streaming):
    """Return the number of queues of work items, and how many threads at most begin with the same one.

    Threads that stream have their own adjacent items, so that one piece continues where the last one ended, and help
    others at the end. What is not streamed is handed out in order: the cache keeps what neighbours share.
    """
    n = min(n_threads, MOST_QUEUES) if streaming else 1
    return n, (n_threads + n - 1) // n
