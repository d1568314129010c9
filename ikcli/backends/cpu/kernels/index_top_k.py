"""The indexer of sparse attention: scores of cached positions, and the choice of the largest.

A score is the sum over heads of weight * max(q . k, 0). Rows of a task, tokens times heads, are the vector lanes of the
products, as in attention.py: Q is transposed once, tiles of keys become f32. The sum over a token's heads then runs
over whole vectors, so a task has several tokens only where the heads fill vectors; lanes without a head have weight 0.

`make_index_top_k` keeps the scores of a task in its own scratch. For few tokens, `make_index_scores` shares the
positions between threads, with scores in a common buffer, and `make_index_choice` follows.

The choice is exact and does not depend on the order of threads: three counts of digits (11, 11, 10 bits) of the scores
as ordered integers find the smallest chosen score, and one more pass writes the cells in ascending order.
"""

import numpy as np

from ikcli.backends.cpu.kernels.attention import AHEAD, make_stage_k, pack_q
from ikcli.backends.cpu.kernels.attention_tasks import find_task, n_base_tasks, part_row, segment_word, tile_chunk
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
from ikcli.backends.cpu.kernels.kv import make_prefetch_row, make_stage
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import CHUNK_ROW, MAX_VECTORS, make_rows_product
from ikcli.backends.cpu.params_attention import INDEX_SPAN, IndexParams
from ikcli.native.jit import inline, merge
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i32,
    load_f32x16,
    reduce_add,
    st_f32,
    st_i32,
    store_f32x16,
    vfma,
    vmax_fast,
    zero_f32x16,
)

_BUCKETS = 2048
_F1 = np.float32(1.0)


def make_stage_keys(type_):
    """Return stage_keys(...), as `make_stage_part` does, of keys that are `ratio` rows apart, in the last of them."""
    stage, prefetch_row = make_stage(type_), make_prefetch_row(type_)

    @inline
    def stage_keys(params, part, segment, kv_head, dst, chunk_bytes, position, n):
        row, element = part_row(params, part, segment, kv_head)
        stride, width = part.row_bytes * params.ratio, part.width
        row += position * stride + stride - part.row_bytes
        for i in range(n):
            prefetch_row(row + AHEAD * stride, element, width)
            stage(dst + CHUNK_ROW * i, chunk_bytes, row, element, width)
            row += stride

    return stage_keys


def make_score_positions(k_type):
    """Return score_positions(params, segment, rows, q, k, s, weights, begin, end, scores, stride).

    It writes the scores of positions begin..end-1 for every token of the task; `stride`: bytes from token to token.
    """
    stage_k, product = make_stage_k(k_type, make_stage_keys), make_rows_product(False)

    @merge
    def score_positions(params, segment, rows, q, k, s, weights, begin, end, scores, stride):
        vectors, tile = (rows + 15) >> 4, params.tile
        per_token = (params.unit_heads + 15) >> 4
        row_bytes = 64 * vectors
        for at in range(begin, end, tile):
            n = min(tile, end - at)
            stage_k(params, segment, 0, k, tile_chunk(params), at, n)
            for v in range(0, vectors, MAX_VECTORS):
                wide = min(MAX_VECTORS, vectors - v)
                product(wide, k, tile_chunk(params), n, q + 64 * v, row_bytes, params.k_chunks, s + 64 * v, row_bytes)
            for t in range(vectors // per_token):
                first = 64 * per_token * t
                for i in range(n):
                    total = zero_f32x16()
                    for x in range(first, first + 64 * per_token, 64):
                        dots = vmax_fast(load_f32x16(s + row_bytes * i + x), zero_f32x16())
                        total = vfma(dots, load_f32x16(weights + x), total)
                    st_f32(scores + stride * t + 4 * (at + i), reduce_add(total))

    return score_positions


@inline
def load_weights(params, token, rows, weights):
    """Write the head weights of a task's rows, 0 in lanes without a head."""
    heads = params.unit_heads
    for v in range((rows + 15) >> 4):
        store_f32x16(weights + 64 * v, zero_f32x16())
    for r in range(rows):
        weight = _F1
        if params.weights != 0:
            weight = ld_f32(params.weights + (token + r // heads) * params.weight_bytes + 4 * (r % heads))
        st_f32(weights + 4 * r, weight)


@inline
def _ordered(address):
    """Return a float32 as an integer from 0 to 2**32 - 1 in the same order."""
    bits = ld_i32(address)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 0x80000000


@merge
def choose(scores, n, cell, most, counts, out):
    """Write the cells of the `most` largest of n scores, ascending, then -1; all cells if there are no more."""
    if n <= most:
        for i in range(n):
            st_i32(out + 4 * i, cell + i)
        for i in range(n, most):
            st_i32(out + 4 * i, -1)
        return
    least, left = 0, most  # the digits found so far, and how many scores with exactly them are chosen
    for digit in range(3):
        shift = 21 if digit == 0 else 10 if digit == 1 else 0
        above = 32 if digit == 0 else 21 if digit == 1 else 10
        mask = 1023 if digit == 2 else 2047
        for i in range(_BUCKETS):
            st_i32(counts + 4 * i, 0)
        for i in range(n):
            x = _ordered(scores + 4 * i)
            if x >> above == least:
                at = counts + 4 * ((x >> shift) & mask)
                st_i32(at, ld_i32(at) + 1)
        bucket = mask
        while ld_i32(counts + 4 * bucket) < left:
            left -= ld_i32(counts + 4 * bucket)
            bucket -= 1
        least = (least << (above - shift)) | bucket
    written = 0
    for i in range(n):
        x = _ordered(scores + 4 * i)
        if x > least:
            st_i32(out + 4 * written, cell + i)
            written += 1
        elif x == least and left > 0:
            st_i32(out + 4 * written, cell + i)
            written += 1
            left -= 1


def make_index_top_k(k_type):
    """Return the kernel for many tokens: a task scores all positions of its tokens and chooses."""
    score_positions = make_score_positions(k_type)

    @kernel(IndexParams)
    def index_top_k(params, ith, nth):
        n_tasks, heads, most = n_base_tasks(params), params.unit_heads, params.most
        q = params.scratch + ith * params.scratch_bytes
        k, s, weights = q + params.k_at, q + params.s_at, q + params.weights_at
        counts, scores = q + params.counts_at, q + params.scores_at
        while True:
            task = next_work(params, 1)
            if task >= n_tasks:
                break
            segment, first, n_tokens, _ = find_task(params, task)
            token, position = segment_word(segment, SEG_TOKEN) + first, segment_word(segment, SEG_POS) + first
            rows, end = n_tokens * heads, (position + n_tokens) // params.ratio
            if end > most:
                pack_q(params, token, 0, rows, q, k)
                load_weights(params, token, rows, weights)
                score_positions(params, segment, rows, q, k, s, weights, 0, end, scores, params.score_bytes)
            for t in range(n_tokens):
                out = params.out + (token + t) * params.out_stride
                cell = segment_word(segment, SEG_CELL)
                seen = (position + t + 1) // params.ratio
                choose(scores + t * params.score_bytes, seen, cell, most, counts, out)

    return index_top_k


def make_index_scores(k_type):
    """Return the first kernel for few tokens: a task scores a span of positions."""
    score_positions = make_score_positions(k_type)

    @kernel(IndexParams)
    def index_scores(params, ith, nth):
        longest, segments = 0, state_word(params, SEGMENTS)
        for i in range(state_word(params, N_SEG)):
            longest = max(longest, segment_word(segments + 8 * SEG_WORDS * i, SEG_N_KV) // params.ratio)
        if longest <= params.most:
            return
        spans, heads = (longest + INDEX_SPAN - 1) // INDEX_SPAN, params.unit_heads
        n_tasks = n_base_tasks(params) * spans
        q = params.scratch + ith * params.scratch_bytes
        k, s, weights = q + params.k_at, q + params.s_at, q + params.weights_at
        while True:
            task = next_work(params, 1)
            if task >= n_tasks:
                break
            segment, first, n_tokens, _ = find_task(params, task // spans)
            token, position = segment_word(segment, SEG_TOKEN) + first, segment_word(segment, SEG_POS) + first
            rows, begin = n_tokens * heads, task % spans * INDEX_SPAN
            seen = (position + n_tokens) // params.ratio
            end = min(begin + INDEX_SPAN, seen)
            if begin >= end or seen <= params.most:
                continue
            pack_q(params, token, 0, rows, q, k)
            load_weights(params, token, rows, weights)
            scores = params.scores + token * params.score_bytes
            score_positions(params, segment, rows, q, k, s, weights, begin, end, scores, params.score_bytes)

    return index_scores


def make_index_choice():
    """Return the second kernel for few tokens: a task chooses the positions of a token."""

    @kernel(IndexParams)
    def index_choice(params, ith, nth):
        n_tasks = n_base_tasks(params)
        counts = params.scratch + ith * params.scratch_bytes + params.counts_at
        while True:
            task = next_work(params, 1)
            if task >= n_tasks:
                break
            segment, first, n_tokens, _ = find_task(params, task)
            token, position = segment_word(segment, SEG_TOKEN) + first, segment_word(segment, SEG_POS) + first
            for t in range(n_tokens):
                out = params.out + (token + t) * params.out_stride
                scores = params.scores + (token + t) * params.score_bytes
                cell = segment_word(segment, SEG_CELL)
                choose(scores, (position + t + 1) // params.ratio, cell, params.most, counts, out)

    return index_choice
