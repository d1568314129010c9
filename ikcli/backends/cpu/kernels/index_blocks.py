"""The indexer of block-sparse attention: scores of blocks of cached positions, and the choice of the largest.

The score of a block is the largest q . k in it. Rows of a task, tokens times heads, are the vector lanes of the
products, as in attention.py, and the maxima run over positions, lane by lane. Blocks that a query sees in part are its
own or follow it; the own one is always chosen, so that scores are needed only of blocks that end before it.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import make_stage_k, pack_q
from ikcli.backends.cpu.kernels.attention_tasks import LOWEST, find_task, n_base_tasks, segment_word, tile_chunk
from ikcli.backends.cpu.kernels.common import (
    N_SEG,
    SEG_CELL,
    SEG_N_KV,
    SEG_POS,
    SEG_TOKEN,
    SEG_WORDS,
    SEGMENTS,
    next_work,
    state_word,
)
from ikcli.backends.cpu.kernels.index_top_k import choose
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import MAX_VECTORS, make_rows_product
from ikcli.backends.cpu.params_attention import IndexBlockParams
from ikcli.native.jit import inline, merge
from ikcli.native.simd.vec import ld_f32, ld_i32, load_f32x16, splat_f32x16, st_f32, st_i32, store_f32x16, vmax_fast

_ALWAYS = np.float32(np.inf)


@inline
def _row_scores(params, token, head):
    """Return the address of the scores of a token's head."""
    return params.scores + (token * params.unit_heads + head) * params.score_bytes


def make_block_scores(k_type):
    """Return the first kernel: a task scores the blocks of a range of positions for some tokens."""
    stage_k, product = make_stage_k(k_type), make_rows_product(False)

    @merge
    def score_block(params, segment, rows, q, k, s, best, begin):
        """Write the score of the block from position `begin` on for every row."""
        vectors, tile = (rows + 15) >> 4, params.tile
        row_bytes, end = 64 * vectors, begin + params.span
        for v in range(vectors):
            store_f32x16(best + 64 * v, splat_f32x16(LOWEST))
        for at in range(begin, end, tile):
            n = min(tile, end - at)
            stage_k(params, segment, 0, k, tile_chunk(params), at, n)
            for v in range(0, vectors, MAX_VECTORS):
                wide = min(MAX_VECTORS, vectors - v)
                product(wide, k, tile_chunk(params), n, q + 64 * v, row_bytes, params.k_chunks, s + 64 * v, row_bytes)
            for v in range(vectors):
                top = load_f32x16(best + 64 * v)
                for i in range(n):
                    top = vmax_fast(load_f32x16(s + row_bytes * i + 64 * v), top)
                store_f32x16(best + 64 * v, top)

    @kernel(IndexBlockParams)
    def block_scores(params, ith, nth):
        longest, segments = 0, state_word(params, SEGMENTS)
        for i in range(state_word(params, N_SEG)):
            longest = max(longest, segment_word(segments + 8 * SEG_WORDS * i, SEG_N_KV))
        span, heads = params.span, params.unit_heads
        if longest <= params.most * span:
            return
        ranges = (longest + params.task_span - 1) // params.task_span
        n_tasks = n_base_tasks(params) * ranges
        q = params.scratch + ith * params.scratch_bytes
        k, s, best = q + params.k_at, q + params.s_at, q + params.best_at
        while True:
            task = next_work(params, 1)
            if task >= n_tasks:
                break
            segment, first, n_tokens, _ = find_task(params, task // ranges)
            token, position = segment_word(segment, SEG_TOKEN) + first, segment_word(segment, SEG_POS) + first
            rows, last = n_tokens * heads, position + n_tokens - 1
            begin = task % ranges * params.task_span
            end = min(begin + params.task_span, (last // span + 1 - params.local) * span)
            if begin >= end or last < params.most * span:
                continue
            pack_q(params, token, 0, rows, q, k)
            for at in range(begin, end, span):
                score_block(params, segment, rows, q, k, s, best, at)
                for r in range(rows):
                    row = _row_scores(params, token + r // heads, r % heads)
                    st_f32(row + 4 * (at // span), ld_f32(best + 4 * r))

    return block_scores


def make_block_choice():
    """Return the second kernel: a task chooses the blocks of some tokens and writes their cells."""

    @inline
    def write_cells(params, chosen, n_chosen, n, cell, out):
        """Write the cells of the chosen blocks that hold positions below n, then -1."""
        span, written = params.span, 0
        for i in range(n_chosen):
            begin = ld_i32(chosen + 4 * i) * span
            for at in range(begin, min(begin + span, n)):
                st_i32(out + 4 * written, cell + at)
                written += 1
        for i in range(written, params.most * span):
            st_i32(out + 4 * i, -1)

    @kernel(IndexBlockParams)
    def block_choice(params, ith, nth):
        n_tasks, heads, span, most = n_base_tasks(params), params.unit_heads, params.span, params.most
        scratch = params.scratch + ith * params.scratch_bytes
        counts, chosen = scratch + params.counts_at, scratch + params.chosen_at
        while True:
            task = next_work(params, 1)
            if task >= n_tasks:
                break
            segment, first, n_tokens, _ = find_task(params, task)
            token, position = segment_word(segment, SEG_TOKEN) + first, segment_word(segment, SEG_POS) + first
            cell = segment_word(segment, SEG_CELL)
            for t in range(n_tokens):
                n = position + t + 1
                blocks = (n + span - 1) // span
                for h in range(heads):
                    scores = _row_scores(params, token + t, h)
                    if blocks > most:
                        for b in range(blocks - params.local, blocks):
                            st_f32(scores + 4 * b, _ALWAYS)
                    choose(scores, blocks, 0, most, counts, chosen)
                    out = params.out + (token + t) * params.out_stride + 4 * most * span * h
                    write_cells(params, chosen, min(blocks, most), n, cell, out)

    return block_choice
