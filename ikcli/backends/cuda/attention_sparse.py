"""Lower sparse attention for the GPU: the scores of an indexer, the choice of positions or blocks, attention to them.

Scores are computed for as many tokens at a time as there is room for (`_SCORE_BYTES`). Absorbed MLA reads the chosen
cells alone (kernels/attn_mla_sparse.cu), and so do grouped heads of 128 columns where blocks were chosen
(kernels/attn_blocks.cu); `attn_any` computes every other shape, and f32 caches. Nothing depends on what is beside a
token, up to the parts of programs for generation, whose number is fixed.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ikcli.backends.cache_checks import check_columns
from ikcli.backends.cuda.attention import (
    DECODE_BLOCK,
    MLA_BLOCK,
    MLA_KINDS,
    MLA_ROPE,
    any_shape,
    cut_heads,
    decode_kind,
    decode_shared,
    is_absorbed,
    mla_shared,
    rows_of_any,
)
from ikcli.backends.cuda.attention_parts import combine_lists, parts_of_lists
from ikcli.backends.cuda.attention_rows import emit_listed, query_args, reads_rows, score_scale
from ikcli.backends.cuda.kv_layout import kernel_type
from ikcli.backends.cuda.lower import RULES, Arg, Counts, GpuLowering
from ikcli.backends.weight_checks import check_f32
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, HeadSlice, Node, Rows
from ikcli.graph.ops_sparse import EntryPositions, IndexTopBlocks, IndexTopK, SparseAttn

INDEX_WIDTH, INDEX_TILE, INDEX_TOKENS = 128, 256, 16  # of kernels/attn_index.cu
_INDEX_SHARED = 8 * 16 * (INDEX_WIDTH + 8) * 2
_SCORE_BYTES = 64 << 20
BLOCKS_WIDTH = 128  # of kernels/attn_blocks.cu
_PART_LEAST = 2 * MLA_BLOCK  # positions


def _up(n: int, by: int) -> int:
    return -(-n // by)


@RULES.add(IndexTopK, "q weights k n_head top_k ratio")
def index_top_k(low: GpuLowering, node: Node, op: IndexTopK) -> None:
    """Lower the choice of positions."""
    width, most = op.q.width, op.top_k
    _check_width(node, width, op.q)
    check_columns(op.k, 0, width)
    n_tokens, row = low.max_rows[Rows.TOKENS], _up(low.max_rows[Rows.KV] // op.ratio, INDEX_TILE) * INDEX_TILE
    row, beyond = max(row, INDEX_TILE), (most + 1) * op.ratio - 1  # positions of a query that sees all it may choose
    at_once = max(1, _SCORE_BYTES // (4 * row) // INDEX_TOKENS) * INDEX_TOKENS
    scores = low.buffer(4 * row * min(at_once, n_tokens))
    for first in range(0, n_tokens, at_once):
        low.emit("index_scores", partial(_score_grid, first, at_once, op.ratio), 256, _INDEX_SHARED, low.state,
                 *query_args(low, op.q), 0 if op.weights is None else low.out(op.weights), low.cache(op.k),
                 low.cells(op.k), np.int32(kernel_type(op.k.type)), np.int32(width), scores, row, np.int32(op.n_head),
                 np.int32(most),
                 np.int32(first), np.int32(op.ratio), when=partial(_scored, first, beyond))  # fmt: skip
        low.emit("index_choose", partial(_group, first, at_once), 1024, 0, low.state, scores, row, low.out(node),
                 np.int32(most), np.int32(first), np.int32(op.ratio), when=partial(_scored, first, 0))  # fmt: skip


@RULES.add(IndexTopBlocks, "q k n_head top_k block local")
def index_top_blocks(low: GpuLowering, node: Node, op: IndexTopBlocks) -> None:
    """Lower the choice of blocks of positions, for every head."""
    width, most, heads = op.q.width, op.top_k * op.block, op.n_head
    _check_width(node, width, op.q)
    check_columns(op.k, 0, width)
    blocks = _up(low.max_rows[Rows.KV], op.block)
    shared = 4 * (blocks + op.top_k)
    if shared > low.device.max_shared - 256:
        raise UnsupportedError(
            f"{node.name}: {blocks} blocks of {op.block} positions are too many for {low.device.name}; use a "
            "smaller -c, -ngl 0, or --no-dsa to attend to all positions"
        )
    n_tokens, row = low.max_rows[Rows.TOKENS], _up(low.max_rows[Rows.KV], INDEX_TILE) * INDEX_TILE
    at_once = max(1, _SCORE_BYTES // (4 * row * heads) // INDEX_TOKENS) * INDEX_TOKENS
    scores = low.buffer(4 * row * heads * min(at_once, n_tokens))
    for first in range(0, n_tokens, at_once):
        low.emit("index_block_scores", partial(_score_grid, first, at_once, 1), 256, 0, low.state,
                 *query_args(low, op.q), low.cache(op.k), low.cells(op.k), np.int32(kernel_type(op.k.type)),
                 np.int32(width), scores, row, np.int32(heads), np.int32(most), np.int32(first),
                 when=partial(_scored, first, most))  # fmt: skip
        low.emit("index_choose_blocks", partial(_choice_grid, first, at_once, heads), 1024, shared, low.state, scores,
                 row, low.out(node), np.int32(heads), np.int32(most), np.int32(op.block), np.int32(op.local),
                 np.int32(blocks), np.int32(first), when=partial(_scored, first, 0))  # fmt: skip


def _check_width(node: Node, width: int, q: HeadSlice) -> None:
    if width > INDEX_WIDTH or width % 16 or q.offset % 4 or q.head_stride % 4:
        raise UnsupportedError(
            f"{node.name}: the CUDA backend has indexers of up to {INDEX_WIDTH} columns, a multiple of 16, not of "
            f"{width}; use -ngl 0, or --no-dsa to attend to all positions"
        )


def _choice_grid(first: int, at_once: int, heads: int, c: Counts) -> tuple[int, int, int]:
    return _group(first, at_once, c), heads, 1


def _scored(first: int, most: int, c: Counts) -> bool:
    return c.n_tokens > first and (c.longest or c.n_kv) > most


def _group(first: int, at_once: int, c: Counts) -> int:
    return min(c.n_tokens - first, at_once)


def _score_grid(first: int, at_once: int, ratio: int, c: Counts) -> tuple[int, int, int]:
    return _up((c.longest or c.n_kv) // ratio, INDEX_TILE), _up(_group(first, at_once, c), INDEX_TOKENS), 1


@RULES.add(EntryPositions, "chosen ratio")
def entry_positions(low: GpuLowering, node: Node, op: EntryPositions) -> None:
    """Lower the lists of positions of chosen entries."""
    low.emit("index_positions", lambda c: c.n_tokens, 256, 0, low.state, low.out(op.chosen), low.out(node),
             np.int32(op.ratio), np.int32(op.chosen.cols))  # fmt: skip


@RULES.add(SparseAttn, "q k v n_head n_head_kv scale wide sinks selected lists block rest")
def sparse_attention(low: GpuLowering, node: Node, op: SparseAttn) -> None:
    """Lower attention to chosen positions."""
    assert op.selected is not None
    for part in (*op.k, op.v):
        if isinstance(part.source, Cache):
            check_columns(part.source, part.offset, part.width, part.head_stride)
    cache = op.k[0].source
    if isinstance(cache, Cache) and is_absorbed(op) and cache.type != GGMLType.F32:
        _mla(low, node, op, cache, op.selected)
    elif op.sinks is not None and reads_rows(op):
        check_f32(op.sinks, "sinks of attention")
        assert isinstance(cache, Cache)
        emit_listed(low, node, op.q, (cache, cache), op.v, None, low.out(op.selected), (op.selected.cols, 1, 0),
                    op.n_head, op.scale, low.weight(op.sinks))  # fmt: skip
    elif _reads_blocks(op):
        _blocks(low, node, op, op.selected)
    else:
        any_shape(low, node, op, lists=_lists(low, op, op.selected))


def _lists(low: GpuLowering, op: SparseAttn, selected: Node) -> tuple[Arg, ...]:
    """Return the arguments of lists of cells: address, lists of a token, their length, positions of a block.

    Those of an entry are negative.
    """
    span = -op.block if op.rest else op.block
    return low.out(selected), np.int32(op.lists), np.int32(selected.cols // op.lists), np.int32(span)


def _reads_blocks(op: SparseAttn) -> bool:
    """Return whether kernels read the chosen cells alone: a warp takes 16 adjacent ones."""
    q, k, v = op.q[0], op.k[0], op.v
    return (
        len(op.q) == len(op.k) == 1
        and (k.width, v.width) == (BLOCKS_WIDTH, BLOCKS_WIDTH)
        and op.block % 16 == 0
        and not op.rest
        and all(isinstance(p.source, Cache) and not p.source.transposed and p.source.cols % 8 == 0 for p in (k, v))
        and not any(x % 16 for p in (k, v) for x in (p.offset, p.head_stride))
        and not any(x % 4 for x in (q.offset, q.head_stride, q.node.cols))
        and (op.sinks, op.softcap) == (None, 0.0)
    )


def _blocks(low: GpuLowering, node: Node, op: SparseAttn, selected: Node) -> None:
    heads, most, width = op.n_head, selected.cols // op.lists, op.v.width
    tiles = _up(op.group, 16)
    parts_of, sums, stats = parts_of_lists(low, heads, width, tiles * op.n_head_kv, _up(most, 2 * DECODE_BLOCK))
    low.emit(f"attn_blocks_{width}_{decode_kind(op)}",
             lambda c: (c.n_tokens * tiles, op.n_head_kv, parts_of(c.n_tokens)), 128, decode_shared(width, width),
             low.state, *query_args(low, op.q[0]), *rows_of_any(low, op.k[0]), *rows_of_any(low, op.v), low.out(node),
             sums, stats, np.int32(heads), np.int32(op.n_head_kv), lambda c: np.int32(parts_of(c.n_tokens)),
             score_scale(op.scale), *_lists(low, op, selected))  # fmt: skip
    combine_lists(low, node, heads, width, parts_of, sums, stats)


def _mla(low: GpuLowering, node: Node, op: SparseAttn, cache: Cache, selected: Node) -> None:
    heads, most, kind = op.n_head, selected.cols, MLA_KINDS.get(cache.type, "any")
    if kind == "f16" and mla_shared("f16s", 16) <= low.device.max_shared:
        kind = "f16s"
    rows = 32 if heads > 16 else 16
    tiles, width = _up(heads, rows), op.v.width
    parts_of, sums, stats = parts_of_lists(low, heads, width, tiles, _up(most, _PART_LEAST))
    cut = cut_heads(op.q, MLA_ROPE)
    assert cut is not None
    low.emit(f"attn_mla_sparse_{kind}_r{rows}", lambda c: (c.n_tokens * tiles, parts_of(c.n_tokens), 1), 256,
             mla_shared(kind, rows), low.state, *query_args(low, cut[0]), *query_args(low, cut[1]), low.cache(cache),
             low.cells(cache), np.int32(kernel_type(cache.type)), low.out(node), sums, stats, np.int32(heads),
             lambda c: np.int32(parts_of(c.n_tokens)), score_scale(op.scale), low.out(selected),
             np.int32(most))  # fmt: skip
    combine_lists(low, node, heads, width, parts_of, sums, stats)
