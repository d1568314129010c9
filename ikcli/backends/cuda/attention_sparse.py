"""Lower sparse attention for the GPU: the scores of an indexer, the choice of positions, attention to them.

Scores are computed for as many tokens at a time as there is room for (`_SCORE_BYTES`). Absorbed MLA reads the chosen
cells alone (kernels/attn_mla_sparse.cu); `attn_any` computes every other shape, and f32 caches. Nothing depends on what
is beside a token, up to the parts of programs for generation, whose number is fixed.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ikcli.backends.cache_checks import check_columns
from ikcli.backends.cuda.attention import (
    MLA_BLOCK,
    MLA_KINDS,
    MLA_ROPE,
    any_shape,
    cut_heads,
    is_absorbed,
    mla_shared,
    query_args,
    score_scale,
)
from ikcli.backends.cuda.attention_parts import emit_combine
from ikcli.backends.cuda.kv_layout import kernel_type
from ikcli.backends.cuda.lower import RULES, Counts, GpuLowering
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, Node, Rows
from ikcli.graph.ops_sparse import IndexTopK, SparseAttn

INDEX_WIDTH, INDEX_TILE, INDEX_TOKENS = 128, 256, 16  # of kernels/attn_index.cu
_INDEX_SHARED = 8 * 16 * (INDEX_WIDTH + 8) * 2
_SCORE_BYTES = 64 << 20
_PART_LEAST = 2 * MLA_BLOCK  # positions


def _up(n: int, by: int) -> int:
    return -(-n // by)


@RULES.add(IndexTopK, "q weights k n_head top_k")
def index_top_k(low: GpuLowering, node: Node, op: IndexTopK) -> None:
    """Lower the choice of positions."""
    width, most = op.q.width, op.top_k
    if width > INDEX_WIDTH or width % 16 or op.q.offset % 4 or op.q.head_stride % 4:
        raise UnsupportedError(
            f"{node.name}: the CUDA backend has indexers of up to {INDEX_WIDTH} columns, a multiple of 16, not of "
            f"{width}; use -ngl 0, or --no-dsa to attend to all positions"
        )
    check_columns(op.k, 0, width)
    n_tokens, row = low.max_rows[Rows.TOKENS], _up(low.max_rows[Rows.KV], INDEX_TILE) * INDEX_TILE
    at_once = max(1, _SCORE_BYTES // (4 * row) // INDEX_TOKENS) * INDEX_TOKENS
    scores = low.buffer(4 * row * min(at_once, n_tokens))
    for first in range(0, n_tokens, at_once):
        low.emit("index_scores", partial(_score_grid, first, at_once), 256, _INDEX_SHARED, low.state,
                 *query_args(low, op.q), low.out(op.weights), low.cache(op.k), low.cells(op.k),
                 np.int32(kernel_type(op.k.type)), np.int32(width), scores, row, np.int32(op.n_head), np.int32(most),
                 np.int32(first), when=partial(_scored, first, most))  # fmt: skip
        low.emit("index_choose", partial(_group, first, at_once), 1024, 0, low.state, scores, row, low.out(node),
                 np.int32(most), np.int32(first), when=partial(_scored, first, 0))  # fmt: skip


def _scored(first: int, most: int, c: Counts) -> bool:
    return c.n_tokens > first and (c.longest or c.n_kv) > most


def _group(first: int, at_once: int, c: Counts) -> int:
    return min(c.n_tokens - first, at_once)


def _score_grid(first: int, at_once: int, c: Counts) -> tuple[int, int, int]:
    return _up(c.longest or c.n_kv, INDEX_TILE), _up(_group(first, at_once, c), INDEX_TOKENS), 1


@RULES.add(SparseAttn, "q k v n_head n_head_kv scale wide selected")
def sparse_attention(low: GpuLowering, node: Node, op: SparseAttn) -> None:
    """Lower attention to chosen positions."""
    assert op.selected is not None
    for part in (*op.k, op.v):
        if isinstance(part.source, Cache):
            check_columns(part.source, part.offset, part.width, part.head_stride)
    cache = op.k[0].source
    if isinstance(cache, Cache) and is_absorbed(op) and cache.type != GGMLType.F32:
        _mla(low, node, op, cache, op.selected)
    else:
        any_shape(low, node, op, selected=op.selected)


def _mla(low: GpuLowering, node: Node, op: SparseAttn, cache: Cache, selected: Node) -> None:
    heads, most, kind = op.n_head, selected.cols, MLA_KINDS.get(cache.type, "any")
    if kind == "f16" and mla_shared("f16s", 16) <= low.device.max_shared:
        kind = "f16s"
    rows = 32 if heads > 16 else 16
    tiles, longest = _up(heads, rows), _up(most, _PART_LEAST)

    def parts_of(n_tokens: int) -> int:
        """Return how many parts fill the GPU; in programs for generation those for one token, whatever is beside it."""
        return max(1, min(low.device.n_sm // (tiles * (1 if low.batch_invariant else n_tokens)), longest))

    def parts(c: Counts) -> int:
        return parts_of(c.n_tokens)

    width, most_rows = op.v.width, 0  # rows of partial results
    for n in range(1, low.max_rows[Rows.TOKENS] + 1):
        most_rows = max(most_rows, heads * n * parts_of(n) if parts_of(n) > 1 else 0)
    sums, stats = low.buffer(4 * most_rows * width), low.buffer(8 * most_rows)
    cut = cut_heads(op.q, MLA_ROPE)
    assert cut is not None
    low.emit(f"attn_mla_sparse_{kind}_r{rows}", lambda c: (c.n_tokens * tiles, parts(c), 1), 256,
             mla_shared(kind, rows), low.state, *query_args(low, cut[0]), *query_args(low, cut[1]), low.cache(cache),
             low.cells(cache), np.int32(kernel_type(cache.type)), low.out(node), sums, stats, np.int32(heads),
             lambda c: np.int32(parts(c)), score_scale(op), low.out(selected), np.int32(most))  # fmt: skip
    if most_rows:
        emit_combine(low, sums, stats, low.out(node), heads, width, parts)
