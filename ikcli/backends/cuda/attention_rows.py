"""Emit attention to listed rows, which all heads share, and describe the operands of attention kernels to them.

Kernels are in `kernels/attn_pooled.cu`. A token reads only the rows in its list. Lists are divided into parts where
heads and tokens would not fill the GPU; a token's parts depend on its own list.
"""

from __future__ import annotations

import numpy as np

from ikcli.backends.cache_checks import check_columns
from ikcli.backends.cuda.attention_parts import combine_lists, parts_of_lists
from ikcli.backends.cuda.kv_layout import kernel_type
from ikcli.backends.cuda.lower import Arg, GpuLowering, Ref
from ikcli.backends.cuda.upload import device_row_bytes
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, HeadSlice, Node, Per, Rows, Weight
from ikcli.graph.ops_attention import Attention

ROWS_WIDTH, ROWS_VALUES, ROWS_TILE = 576, 512, 32  # of kernels/attn_pooled.cu
_LOG2E = 1.4426950408889634
IN_CELLS, IN_ROWS, IN_WINDOW = range(3)  # where rows are (attn_tiles.cuh: row_base)


def _up(n: int, by: int) -> int:
    return -(-n // by)


def cache_place(source: Node | Cache) -> np.int32:
    """Return where kernels find rows of a source."""
    if isinstance(source, Node):
        return np.int32(IN_ROWS)
    return np.int32(IN_WINDOW if source.per is Per.WINDOW else IN_CELLS)


def query_args(low: GpuLowering, part: HeadSlice) -> tuple[Arg, Arg, Arg]:
    """Return address, elements per token and per head of a query slice."""
    return low.out(part.node) + 4 * part.offset, part.node.cols, np.int32(part.head_stride)


def score_scale(scale: float) -> np.float32:
    """Return the scale of scores in base 2."""
    return np.float32(np.float32(scale) * _LOG2E)


def row_floats(w: Weight) -> int:
    """Return the values between rows of a float32 weight on the device."""
    return device_row_bytes(w.type, w.ne0) // 4


def sees_window(op: Attention) -> bool:
    """Return whether queries see a window of rows that are key and value of all heads, as in DeepSeek V4.

    With sinks, the window may be all positions.
    """
    window = op.window > 0 and len(op.q) == 1
    return (window or (op.window == 0 and op.sinks is not None)) and reads_rows(op)


def reads_rows(op: Attention) -> bool:
    """Return whether rows of a cache are key and value of all heads."""
    k, cache = op.k[0], op.k[0].source
    return (
        isinstance(cache, Cache)
        and len(op.k) == op.n_head_kv == 1
        and op.v.source == cache
        and not cache.transposed
        and cache.type is not GGMLType.F32  # which `attn_any` does not round
        and (k.offset, k.width) == (0, cache.cols)
        and _fits(op.q, k.width, op.v)
        and not (op.chunk or op.softcap or op.both or op.ranged)
    )


def emit_window(low: GpuLowering, node: Node, op: Attention) -> None:
    """Emit attention to a window of rows, or to all; layers with windows of one size share lists."""
    cache = op.k[0].source
    assert isinstance(cache, Cache)
    window = op.window or low.max_rows[Rows.KV]

    def make() -> Ref:
        out = low.buffer(4 * window * low.max_rows[Rows.TOKENS])
        emit_cells(low, out, None, cache, (window, 1, 0))
        return out

    cells = low.shared(("cells", int(cache_place(cache)), window), make)
    emit_listed(low, node, op.q, (cache, cache), op.v, None, cells, (window, 1, 0), op.n_head, op.scale,
                0 if op.sinks is None else low.weight(op.sinks))  # fmt: skip


def emit_cells(low: GpuLowering, out: Ref, chosen: Node | None, recent: Cache, seen: tuple[int, int, int]) -> None:
    """Emit the lists of rows that queries see; `seen`: window, positions of an entry, most entries."""
    low.emit("pooled_cells", lambda c: c.n_tokens, 256, 0, low.state, 0 if chosen is None else low.out(chosen), out,
             cache_place(recent), *map(np.int32, seen))  # fmt: skip


def _fits(q: tuple[HeadSlice, ...], width: int, v: HeadSlice) -> bool:
    return (
        len(q) <= 2
        and width <= ROWS_WIDTH
        and v.width <= ROWS_VALUES
        and not (width % 16 or v.width % 16 or v.offset % 8)
        and not any(x % 4 for p in q for x in (p.offset, p.width, p.head_stride, p.node.cols))
    )


def emit_listed(
    low: GpuLowering,
    node: Node,
    q: tuple[HeadSlice, ...],
    caches: tuple[Cache, Cache],
    v: HeadSlice,
    prefix: Weight | None,
    cells: Ref,
    seen: tuple[int, int, int],
    heads: int,
    scale: float,
    sinks: Arg,
) -> None:
    """Emit attention to the rows in `cells`; `seen`: window, positions of an entry, most entries of a list."""
    recent, pooled = caches
    width = recent.cols
    if not _fits(q, width, v):
        raise UnsupportedError(
            f"{node.name}: the CUDA backend attends to listed rows of up to {ROWS_WIDTH} columns, {ROWS_VALUES} of "
            f"them values, multiples of 16, not of {width} and {v.width}; use -ngl 0"
        )
    for cache in caches:
        check_columns(cache, 0, width, v.offset)
    tiles = _up(heads, 16)
    longest = seen[0] + seen[2] + (0 if prefix is None else prefix.ne1)
    parts_of, sums, stats = parts_of_lists(low, heads, v.width, tiles, _up(longest, 2 * ROWS_TILE))
    kind = "f16" if recent.type is GGMLType.F16 else "any"
    before: tuple[Arg, ...] = (0, np.int32(0), np.int32(0))
    if prefix is not None:
        before = low.weight(prefix), np.int32(prefix.ne1), np.int32(row_floats(prefix))
    first, second = query_args(low, q[0]), query_args(low, q[-1])
    low.emit(f"attn_rows_{kind}", lambda c: (c.n_tokens * tiles, parts_of(c.n_tokens), 1), 256,
             2 * (16 + ROWS_TILE) * (width + 8), low.state, *first, np.int32(q[0].width), *second, low.cache(recent),
             low.cells(recent), low.cache(pooled), low.cells(pooled), np.int32(kernel_type(recent.type)), *before,
             np.int32(width), np.int32(v.offset), np.int32(v.width), cells, *map(np.int32, seen),
             low.out(node), sums, stats, np.int32(heads), lambda c: np.int32(parts_of(c.n_tokens)),
             score_scale(scale), sinks)  # fmt: skip
    combine_lists(low, node, heads, v.width, parts_of, sums, stats, sinks)
