"""Lower compressed attention for the GPU: entries of several positions, lists of rows, attention to listed rows.

Kernels are in `kernels/attn_pooled.cu`. All heads share rows, and a token reads only those in its list. Lists are
divided into parts where heads and tokens would not fill the GPU; a token's parts depend on its own list.
"""

from __future__ import annotations

import numpy as np

from ikcli.backends.cache_checks import check_columns
from ikcli.backends.cuda.attention import cache_place, emit_store, query_args, score_scale
from ikcli.backends.cuda.attention_sparse import combine_lists, parts_of_lists
from ikcli.backends.cuda.kv_layout import kernel_type
from ikcli.backends.cuda.lower import RULES, Arg, GpuLowering
from ikcli.backends.cuda.upload import device_row_bytes
from ikcli.backends.weight_checks import check_f32
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, HeadSlice, Node, Weight
from ikcli.graph.ops_pooled import Pool, PooledAttn, PooledCells, PooledStore
from ikcli.graph.ops_sparse import PrefixAttn

ROWS_WIDTH, ROWS_VALUES, ROWS_TILE = 576, 512, 32  # of kernels/attn_pooled.cu


def _up(n: int, by: int) -> int:
    return -(-n // by)


@RULES.add(Pool, "after cache bias width ratio")
def pool(low: GpuLowering, node: Node, op: Pool) -> None:
    """Lower the sums of positions that become entries."""
    if op.cache.type is not GGMLType.F32:
        raise UnsupportedError(f"{node.name}: what is summed up to entries is kept as f32")
    check_f32(op.bias, "biases of positions")
    low.emit("pool_entries", lambda c: (c.n_tokens, _up(op.width, 128), 1), 128, 0, low.state, low.cache(op.cache),
             cache_place(op.cache), low.weight(op.bias), np.int32(_row_floats(op.bias)), low.out(node),
             np.int32(op.width), np.int32(op.parts), np.int32(op.ratio))  # fmt: skip


def _row_floats(w: Weight) -> int:
    return device_row_bytes(w.type, w.ne0) // 4


@RULES.add(PooledStore, "cache x ratio")
def pooled_store(low: GpuLowering, node: Node, op: PooledStore) -> None:
    """Lower the store of the rows of tokens that complete an entry."""
    emit_store(low, op.cache, op.x, 0, op.x.cols, 0, op.ratio)


@RULES.add(PooledCells, "x recent chosen window ratio most")
def pooled_cells(low: GpuLowering, node: Node, op: PooledCells) -> None:
    """Lower the lists of rows that queries attend to."""
    low.emit("pooled_cells", lambda c: c.n_tokens, 256, 0, low.state, 0 if op.chosen is None else low.out(op.chosen),
             low.out(node), cache_place(op.recent), np.int32(op.window), np.int32(op.ratio),
             np.int32(op.most))  # fmt: skip


@RULES.add(PooledAttn, "q recent pooled cells sinks n_head scale window ratio")
def pooled_attention(low: GpuLowering, node: Node, op: PooledAttn) -> None:
    """Lower attention to positions and entries."""
    check_f32(op.sinks, "sinks of attention")
    _rows(low, node, (op.q,), (op.recent, op.pooled), HeadSlice(op.recent, 0, op.q.width, 0), None, op.cells,
          (op.window, op.ratio, op.most), op.n_head, op.scale, low.weight(op.sinks))  # fmt: skip


@RULES.add(PrefixAttn, "q k v prefix cells n_head scale")
def prefix_attention(low: GpuLowering, node: Node, op: PrefixAttn) -> None:
    """Lower attention to rows before all positions and to listed positions."""
    check_f32(op.prefix, "rows before all positions")
    cache = op.k.source
    assert isinstance(cache, Cache)
    if (op.k.offset, op.k.width) != (0, cache.cols):
        raise UnsupportedError(f"{node.name}: the CUDA backend has keys that are whole rows of the cache; use -ngl 0")
    _rows(low, node, op.q, (cache, cache), op.v, op.prefix, op.cells, (op.cells.cols, 1, 0), op.n_head, op.scale, 0)


def _rows(
    low: GpuLowering,
    node: Node,
    q: tuple[HeadSlice, ...],
    caches: tuple[Cache, Cache],
    v: HeadSlice,
    prefix: Weight | None,
    cells: Node,
    seen: tuple[int, int, int],
    heads: int,
    scale: float,
    sinks: Arg,
) -> None:
    """Emit attention to the rows in `cells`; `seen`: window, positions of an entry, most entries of a list."""
    recent, pooled = caches
    width = recent.cols
    misplaced = [x for p in q for x in (p.offset, p.width, p.head_stride, p.node.cols) if x % 4]
    if (
        len(q) > 2
        or width > ROWS_WIDTH
        or v.width > ROWS_VALUES
        or width % 16
        or v.width % 16
        or v.offset % 8
        or misplaced
    ):
        raise UnsupportedError(
            f"{node.name}: the CUDA backend attends to listed rows of up to {ROWS_WIDTH} columns, {ROWS_VALUES} of "
            f"them values, multiples of 16, not of {width} and {v.width}; use -ngl 0"
        )
    for cache in caches:
        check_columns(cache, 0, width, v.offset)
    tiles = _up(heads, 16)
    longest = cells.cols + (0 if prefix is None else prefix.ne1)
    parts_of, sums, stats = parts_of_lists(low, heads, v.width, tiles, _up(longest, 2 * ROWS_TILE))
    kind = "f16" if recent.type is GGMLType.F16 else "any"
    before: tuple[Arg, ...] = (0, np.int32(0), np.int32(0))
    if prefix is not None:
        before = low.weight(prefix), np.int32(prefix.ne1), np.int32(_row_floats(prefix))
    first, second = query_args(low, q[0]), query_args(low, q[-1])
    low.emit(f"attn_rows_{kind}", lambda c: (c.n_tokens * tiles, parts_of(c.n_tokens), 1), 256,
             2 * (16 + ROWS_TILE) * (width + 8), low.state, *first, np.int32(q[0].width), *second, low.cache(recent),
             low.cells(recent), low.cache(pooled), low.cells(pooled), np.int32(kernel_type(recent.type)), *before,
             np.int32(width), np.int32(v.offset), np.int32(v.width), low.out(cells), *map(np.int32, seen),
             low.out(node), sums, stats, np.int32(heads), lambda c: np.int32(parts_of(c.n_tokens)),
             score_scale(scale), sinks)  # fmt: skip
    combine_lists(low, node, heads, v.width, parts_of, sums, stats, sinks)
