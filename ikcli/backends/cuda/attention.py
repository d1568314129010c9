"""Lower the KV cache and attention ops for the GPU (kv_store, kv_rows, flash_attn, attn) and choose their kernels.

Five kinds of attention kernels (kernels/attn_*.cu), chosen by shape and, at capture, by the counts of the bucket:
    mla       absorbed MLA: keys are rows of 576 columns, values their last 512
    decode    few query rows of grouped heads, directly on caches of any type
    prefill   many query rows on 16-bit keys and values; other types are converted to compact f16 rows first
    rows      a window of rows that all heads share, key and value at once (attention_rows.py)
    any       every other shape, in float32
Where queries see later positions too (patches of an image, images in a text), prefill kernels of their own and `any`
compute it (kernels/attn_seen.cuh); micro-batches of a text alone take the usual kernels.
Cached positions are divided into parts when query rows alone would not fill the GPU; attn_combine merges the parts.
Scores are never stored, so `attn` (`-fa off`) is the same as `flash_attn` and heads_per_step has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ikcli.backends.cache_checks import check_columns, check_store
from ikcli.backends.cuda.attention_parts import Parts, Shape, count_tiles
from ikcli.backends.cuda.attention_rows import (
    IN_CELLS,
    IN_ROWS,
    cache_place,
    emit_window,
    query_args,
    score_scale,
    sees_window,
)
from ikcli.backends.cuda.attention_widths import Widened
from ikcli.backends.cuda.kv_layout import FLOATS, KERNEL_TYPES, kernel_type
from ikcli.backends.cuda.lower import N_EXACT, RULES, Arg, Counts, GpuLowering, Ref
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Cache, HeadSlice, Node, Per, Rows
from ikcli.graph.ops_attention import Attention, Attn, FlashAttn, KvRows, KvStore
from ikcli.graph.ops_rows import Hadamard

MLA_K, MLA_V, MLA_ROPE = 576, 512, 64
MLA_BLOCK, DECODE_BLOCK = 32, 64  # positions per step of the kernels
PREFILL_LEAST = 1024  # positions of a part of prefill kernels, because of what merging costs
HEADS: dict[tuple[int, int], tuple[int, int]] = {
    (64, 64): (64, 0), (80, 80): (80, 0), (96, 96): (96, 0), (128, 128): (128, 0), (192, 128): (64, 128),
    (256, 256): (256, 0),
}  # fmt: skip
"""Head sizes (K, V) of decode and prefill kernels -> columns of a key's two parts in prefill kernels."""
SEEN_RANGE, SEEN_LATER = 1, 2  # bits of the parameter `seen` (kernels/attn_seen.cuh)
SEEN_KINDS = {"f16": (64, 80, 96, 128, 256), "bf16": (128, 256)}
"""Widths of heads of the kernels whose queries see later positions, by the type of rows."""
_THREADS = 256
When = Callable[[Counts], bool]
View = tuple[int, int]  # window, chunk of what queries see
_ALL: View = (0, 0)


def _up(n: int, by: int) -> int:
    return -(-n // by)


def _is_block_type(type_: GGMLType) -> bool:
    return type_ not in FLOATS


NO_LISTS: tuple[Arg, ...] = (0, np.int32(0), np.int32(0), np.int32(1))  # of chosen cells (attn_lists.cuh)


# --- the cache --------------------------------------------------------------------------------------------------------
@RULES.add(KvStore, "cache x offset n_cols cache_offset")
def kv_store(low: GpuLowering, node: Node, op: KvStore) -> None:
    """Lower the store of columns of a value into the cells of the micro-batch."""
    emit_store(low, op.cache, op.x, op.offset, op.n_cols, op.cache_offset)


def emit_store(
    low: GpuLowering, cache: Cache, x: Node, offset: int, cols: int, cache_offset: int, every: int = 1
) -> None:
    """Emit the store of columns of x; `every`: only of tokens that complete so many positions."""
    type_, traits = kernel_type(cache.type), TYPES[cache.type]
    source = low.out(x) + 4 * offset
    if not _is_block_type(cache.type):
        size = traits.type_size
        cell, col = (size, size * low.cells(cache)) if cache.transposed else (size * cache.cols, size)
        low.emit("kv_store_float", lambda c: _up(c.n_tokens * cols, _THREADS), _THREADS, 0, low.state, source, x.cols,
                 np.int32(cols), low.cache(cache) + cache_offset * col, cell, col, np.int32(type_),
                 cache_place(cache), np.int32(every))  # fmt: skip
        return
    if cache.transposed:
        raise UnsupportedError(
            f"a transposed V cache cannot be of type {traits.name}; use f16 or flash attention (-fa)"
        )
    check_store(cache, cols, cache_offset)
    if cache.type == GGMLType.Q8_KV:
        low.emit("kv_store_rows", lambda c: _up(c.n_tokens, 8), _THREADS, 0, low.state, source, x.cols, np.int32(cols),
                 low.cache(cache), low.cells(cache), cache_place(cache), np.int32(every))  # fmt: skip
        return
    blocks = cols // 32
    low.emit("kv_store_blocks", lambda c: _up(c.n_tokens * blocks, 8), _THREADS, 0, low.state, source, x.cols,
             np.int32(blocks), low.cache(cache), low.cells(cache), np.int32(cache.cols // 32),
             np.int32(cache_offset // 32), np.int32(type_), cache_place(cache), np.int32(every))  # fmt: skip


@RULES.add(KvRows, "cache offset n_cols")
def kv_rows(low: GpuLowering, node: Node, op: KvRows) -> None:
    """Lower the read of cached columns as compact f32 rows."""
    check_columns(op.cache, op.offset, node.cols)
    if op.cache.per is Per.WINDOW:
        raise UnsupportedError(f"{node.name}: a cache of windows does not have all positions; add --swa-full")
    _emit_rows(low, op.cache, op.offset, node.cols, "f32", low.out(node), None, _ALL)


def _emit_rows(
    low: GpuLowering, source: Cache | Node, offset: int, cols: int, to: str, out: Ref, when: When | None, view: View
) -> None:
    """Emit a conversion to rows of type `to`: columns offset.. of every cached position that queries see.

    The source is a cache or compact rows of a node.
    """
    if isinstance(source, Node):
        at, type_, blocks, row, col = low.out(source), KERNEL_TYPES[GGMLType.F32], 0, 4 * source.cols, 4
    else:
        size, quantized = TYPES[source.type].type_size, _is_block_type(source.type)
        at, type_, blocks = low.cache(source), kernel_type(source.type), source.cols // 32 if quantized else 0
        row, col = (size, size * low.cells(source)) if source.transposed else (size * source.cols, size)
    groups = _up(cols, 16)
    low.emit(f"kv_rows_{to}", lambda c: _up(c.n_kv * groups, _THREADS), _THREADS, 0, low.state, at,
             low.cells(source) if isinstance(source, Cache) else low.n_cells, np.int32(blocks), row, col,
             np.int32(type_), cache_place(source), np.int32(offset), np.int32(cols), out, *map(np.int32, view),
             when=when)  # fmt: skip


# --- attention --------------------------------------------------------------------------------------------------------
_FIELDS = "q k v n_head n_head_kv scale window chunk sinks softcap wide half both ranged"


@RULES.add(FlashAttn, _FIELDS)
@RULES.add(Attn, f"{_FIELDS} heads_per_step")
def attention(low: GpuLowering, node: Node, op: Attention) -> None:
    """Lower attention within each segment."""
    for part in (*op.k, op.v):
        if isinstance(part.source, Cache):
            check_columns(part.source, part.offset, part.width, part.head_stride)
    if op.sinks is not None and op.sinks.type != GGMLType.F32:
        raise UnsupportedError(f"{op.sinks.name}: sinks of attention must be f32 numbers")
    seen = _seen(low, op)
    if not seen and is_absorbed(op):
        _mla(low, node, op)
    elif sees_window(op):
        emit_window(low, node, op)
    elif (tiled := _tiled(op)) is not None and (not seen or _has_seen_kernels(op, tiled)):
        _heads(low, node, op, tiled, seen)
    elif seen and (wide := Widened.of(low, op, SEEN_KINDS["f16"])) is not None:
        found = _tiled(wide.op)
        assert found is not None
        _heads(low, wide.node, wide.op, found, seen)
        wide.cut(low, node)
    else:
        any_shape(low, node, op, seen)


def _seen(low: GpuLowering, op: Attention) -> int:
    """Return the bits of what queries see beside the usual mask; programs for generation compute no images."""
    return SEEN_RANGE * (op.ranged and not low.batch_invariant) | SEEN_LATER * op.both


def _seen_arg(seen: int) -> Arg:
    """Return the argument `seen` of kernels: ranges are sent to the GPU only if they say something."""
    return lambda c: np.int32(seen if c.ranged else seen & ~SEEN_RANGE)


def reads_places(nodes: Sequence[Node], batch_invariant: bool) -> bool:
    """Return whether a program of these nodes reads the ranges of positions that come with tokens."""
    return not batch_invariant and any(isinstance(n.op, Attention) and n.op.ranged for n in nodes)


def _is_bf16(slices: Iterable[HeadSlice]) -> bool:
    return any(isinstance(p.source, Cache) and p.source.type == GGMLType.BF16 for p in slices)


def _has_seen_kernels(op: Attention, tiled: _Tiled) -> bool:
    return tiled.k[1] is None and tiled.k_width in SEEN_KINDS["bf16" if _is_bf16((*op.k, op.v)) else "f16"]


def is_absorbed(op: Attention) -> bool:
    k, v = op.k, op.v
    return (
        len(k) == 1
        and isinstance(k[0].source, Cache)
        and op.n_head_kv == 1
        and (k[0].source.cols, k[0].offset, k[0].width, v.width) == (MLA_K, 0, MLA_K, MLA_V)
        and ((v.source == k[0].source and v.offset == MLA_ROPE) or _same_latent(op))
        and cut_heads(op.q, MLA_ROPE) is not None
        and _in_fours(op.q)
        and (op.window, op.chunk, op.sinks, op.softcap) == (0, 0, None, 0.0)
    )


def _in_fours(q: tuple[HeadSlice, ...]) -> bool:
    """Return whether kernels can read queries in vectors of four."""
    return not any(x % 4 for p in q for x in (p.offset, p.head_stride, p.node.cols))


def _same_latent(op: Attention) -> bool:
    """Return whether V is the transposed copy of K's rows in the same type, so that one copy serves both."""
    k, v = op.k[0].source, op.v
    return (
        isinstance(v.source, Cache)
        and isinstance(k, Cache)
        and (v.source.kind, k.kind, v.source.type, v.offset) == ("kv_t", "kv", k.type, 0)
        and k.type in FLOATS
        and not any(isinstance(p.node.op, Hadamard) for p in op.q)  # rotated rows are not what the copy holds
    )


def cut_heads(parts: tuple[HeadSlice, ...], at: int) -> tuple[HeadSlice, HeadSlice] | None:
    """Cut a head into two slices, the first of `at` columns; None if a slice would need two sources."""
    first = parts[0]
    if len(parts) == 2 and first.width == at:
        return first, parts[1]
    if len(parts) == 1 and first.width > at:
        return replace(first, width=at), replace(first, offset=first.offset + at, width=first.width - at)
    return None


def _view(low: GpuLowering, op: Attention) -> tuple[Arg, Arg, Arg, Arg]:
    """Return the arguments for the attention mask and the scores: window, chunk, sinks, softcap."""
    return np.int32(op.window), np.int32(op.chunk), _sinks(low, op), np.float32(op.softcap)


def _sinks(low: GpuLowering, op: Attention) -> Arg:
    return 0 if op.sinks is None else low.weight(op.sinks)


# ... absorbed MLA
MLA_KINDS = {GGMLType.F32: "f16", GGMLType.F16: "f16", GGMLType.BF16: "bf16", GGMLType.Q8_0: "q8"}


def mla_shared(kind: str, rows: int) -> int:
    """Return the shared memory of `attn_mla_<kind>_r<rows>`: MlaLayout of kernels/attn_mla.cuh."""
    stages = {"any": 1, "q8": 4, "f16": 2, "bf16": 2}.get(kind, 4 if rows == 16 else 3)
    at = stages * MLA_BLOCK * (MLA_K + 18 * 2 if kind == "q8" else MLA_K * 2)
    return at + 4 * rows * MLA_BLOCK * 4 + rows * (MLA_BLOCK + 8) * 2 + rows * 4 + 16


def _mla(low: GpuLowering, node: Node, op: Attention) -> None:
    cache, heads = op.k[0].source, op.n_head
    assert isinstance(cache, Cache)
    kind = MLA_KINDS.get(cache.type, "any")
    if kind in ("f16", "bf16") and mla_shared(kind + "s", 16) <= low.device.max_shared:
        kind += "s"  # three stages and more

    def rows_of(c: Counts) -> int:
        """Return the rows of a tile: 32 if a segment has more than 16 on average."""
        return 32 if _up(c.n_tokens * heads, max(1, min(c.n_segments, c.n_tokens))) > 16 else 16

    def shapes(c: Counts) -> Shape:
        return Shape(rows_of(c), MLA_BLOCK, 1)

    data, place = low.cache(cache), IN_CELLS
    if cache.type == GGMLType.F32:
        data, place = _compact(low, cache, 0, MLA_K, "f16", None, _ALL), IN_ROWS
    cut = cut_heads(op.q, MLA_ROPE)
    assert cut is not None
    parts = Parts.of(low, node, op, shapes)
    for rows in (16, 32):
        low.emit(f"attn_mla_{kind}_r{rows}", partial(_mla_grid, parts, rows), _THREADS, mla_shared(kind, rows),
                 low.state, *query_args(low, cut[0]), *query_args(low, cut[1]), data, low.n_cells,
                 np.int32(kernel_type(cache.type)), np.int32(place), *parts.refs, np.int32(heads), *parts.args,
                 score_scale(op.scale), when=partial(_same, rows_of, rows))  # fmt: skip
    parts.combine(low)


def _mla_grid(parts: Parts, rows: int, c: Counts) -> tuple[int, int, int]:
    return parts.tiles(c, rows), parts.count(c), 1


def _many(few: When, rows_of: Callable[[Counts], int], rows: int, beyond: When, wanted: bool, c: Counts) -> bool:
    return not few(c) and rows_of(c) == rows and beyond(c) == wanted


def _same(rows_of: Callable[[Counts], int], rows: int, c: Counts) -> bool:
    return rows_of(c) == rows


# ... grouped heads
@dataclass(frozen=True, slots=True)
class _Tiled:
    """A node that prefill kernels support: slices of q and k cut where the kernel's two parts meet."""

    q: tuple[HeadSlice, HeadSlice | None]
    k: tuple[HeadSlice, HeadSlice | None]
    direct: bool  # a decode kernel can read q, k and v as they are
    k_width: int


def _tiled(op: Attention) -> _Tiled | None:
    q, k, v = op.q, op.k, op.v
    width = sum(p.width for p in k)
    parts = HEADS.get((width, v.width))
    if parts is None or any(p.offset % 16 or p.head_stride % 16 for p in (*k, v)) or not _in_fours(q):
        return None
    if any(isinstance(p.source, Cache) and (p.source.transposed or p.source.cols % 8) for p in (*k, v)):
        return None
    direct = len(q) == len(k) == 1
    if parts[1] == 0:
        return _Tiled((q[0], None), (k[0], None), direct, width) if direct else None
    cut_q, cut_k = cut_heads(q, parts[0]), cut_heads(k, parts[0])
    return None if cut_q is None or cut_k is None else _Tiled(cut_q, cut_k, direct, width)


def decode_shared(k_width: int, v_width: int) -> int:
    """Return the shared memory of decode kernels: DecodeLayout of kernels/attn_decode.cuh."""
    return (80 * (k_width + 8) + 64 * (v_width + 8)) * 2


def prefill_block(k_width: int, wide: bool = False) -> int:
    """Return the positions per step of prefill kernels; `wide` ones have two tiles in shared memory."""
    return 32 if wide or k_width == 256 else 64


def prefill_shared(rows: int, k_width: int, v_width: int) -> int:
    """Return the shared memory of prefill kernels: PrefillLayout of kernels/attn_prefill.cuh."""
    block = prefill_block(k_width)
    return ((rows + block) * (k_width + 8) + block * (v_width + 8)) * 2


def _heads(low: GpuLowering, node: Node, op: Attention, tiled: _Tiled, seen: int = 0) -> None:
    v, group, most = op.v, op.group, low.max_rows[Rows.TOKENS]
    on_sm = low.device.shared_per_sm

    def beyond(c: Counts) -> bool:
        """Return whether a query sees more than the positions before it."""
        return seen > SEEN_RANGE or (seen == SEEN_RANGE and c.ranged)

    def few(c: Counts) -> bool:
        """Return whether decode kernels apply: at most one tile of 16 rows per segment on average, or few tokens."""
        return (
            tiled.direct
            and not beyond(c)
            and (c.n_tokens <= N_EXACT or c.n_tokens * group <= 16 * min(c.n_segments, c.n_tokens))
        )

    wide = tiled.k_width < 256 and 2 * (prefill_shared(128, tiled.k_width, v.width) + 1024) <= on_sm

    def rows_of(c: Counts) -> int:
        """Return the rows of a tile of prefill kernels: half as many where that fills more of the GPU."""
        per_segment = _up(c.n_tokens * group, max(1, min(c.n_segments, c.n_tokens)))
        if beyond(c) and not wide and tiled.k_width < 256:
            return 64
        return 64 if per_segment <= 64 or op.n_head_kv * count_tiles(c, group, 128) <= low.device.n_sm else 128

    def shapes(c: Counts) -> Shape:
        if few(c):
            by_registers = 2 if tiled.k_width > 128 or decode_kind(op) in ("any", "q8") else 3
            return Shape(
                16, DECODE_BLOCK, min(by_registers, max(1, on_sm // (decode_shared(tiled.k_width, v.width) + 1024)))
            )
        rows, shared = rows_of(c), prefill_shared(rows_of(c), tiled.k_width, v.width)
        blocks = min(2 if rows == 64 or wide else 1, max(1, on_sm // (shared + 1024)))
        block = prefill_block(tiled.k_width, wide and rows == 128)
        return Shape(rows, block, blocks, PREFILL_LEAST // block)

    parts = Parts.of(low, node, op, shapes)
    if tiled.direct and seen <= SEEN_RANGE:
        _decode(low, op, tiled, parts, few if most > N_EXACT or seen else None)
    for rows in (64, 128):
        is_wide = wide and rows == 128
        if seen <= SEEN_RANGE and (not tiled.direct or most > N_EXACT):
            _prefill(low, op, tiled, parts, rows, is_wide, partial(_many, few, rows_of, rows, beyond, False), few)
        if seen and (rows == 64 or is_wide or tiled.k_width == 256):
            when = partial(_many, few, rows_of, rows, beyond, True)
            _prefill(low, op, tiled, parts, rows, is_wide, when, few, seen)
    parts.combine(low, _sinks(low, op))


_DECODE_KINDS = {GGMLType.F16: "f16", GGMLType.BF16: "bf16", GGMLType.Q8_0: "q8"}


def decode_kind(op: Attention) -> str:
    """Return the kind of decode kernel; the usual types of K and V have specialized ones."""
    types = {p.source.type if isinstance(p.source, Cache) else GGMLType.F32 for p in (op.k[0], op.v)}
    return _DECODE_KINDS.get(types.pop(), "any") if len(types) == 1 else "any"


def _decode(low: GpuLowering, op: Attention, tiled: _Tiled, parts: Parts, when: When | None) -> None:
    k, v, n_head, n_head_kv = op.k[0], op.v, op.n_head, op.n_head_kv
    low.emit(
        f"attn_decode_{tiled.k_width}_{decode_kind(op)}",
        lambda c: (parts.tiles(c, 16), n_head_kv, parts.count(c)), 128,
        decode_shared(tiled.k_width, v.width), low.state, *query_args(low, op.q[0]),
        *rows_of_any(low, k), *rows_of_any(low, v), *parts.refs, np.int32(n_head), np.int32(n_head_kv),
        *parts.args, score_scale(op.scale), *_view(low, op), when=when,
    )  # fmt: skip


def rows_of_any(low: GpuLowering, part: HeadSlice) -> tuple[Arg, ...]:
    """Return address, blocks (elements) per row, type, first column, columns per head, place, cells."""
    source = part.source
    if isinstance(source, Node):
        at, per_row, type_ = low.out(source), source.cols, KERNEL_TYPES[GGMLType.F32]
    else:
        per_row = source.cols // 32 if _is_block_type(source.type) else source.cols
        at, type_ = low.cache(source), kernel_type(source.type)
    numbers = (np.int32(x) for x in (per_row, type_, part.offset, part.head_stride))
    return at, *numbers, cache_place(source), low.cells(source) if isinstance(source, Cache) else low.n_cells


def _prefill(
    low: GpuLowering, op: Attention, tiled: _Tiled, parts: Parts, rows: int, wide: bool, when: When, few: When,
    seen: int = 0,
) -> None:  # fmt: skip
    """Emit a prefill kernel; `wide`: 32 rows per warp instead of 16. `seen`: what queries see beside the usual."""
    v, n_head, n_head_kv = op.v, op.n_head, op.n_head_kv
    slices = [*(p for p in tiled.k if p is not None), v]
    bf16 = _is_bf16(slices)
    rows_16 = _Rows16(low, slices, n_head_kv, "bf16" if bf16 else "f16", lambda c: not few(c), (op.window, op.chunk))
    k = [rows_16.args(p if p is not None else tiled.k[0]) for p in tiled.k]
    q = [query_args(low, p if p is not None else tiled.q[0]) for p in tiled.q]
    form = f"r{rows}{'w' if wide else ''}{'_seen' if seen else ''}"
    low.emit(
        f"attn_prefill_{tiled.k_width}_{'bf16' if bf16 else 'f16'}_{form}",
        lambda c: (n_head_kv, parts.tiles(c, rows), parts.count(c)), rows if wide else 2 * rows,
        prefill_shared(rows, tiled.k_width, v.width), low.state, *q[0], *q[1], *k[0], *k[1], *rows_16.args(v),
        *parts.refs, np.int32(n_head), np.int32(n_head_kv), *parts.args, score_scale(op.scale), *_view(low, op),
        *([_seen_arg(seen)] if seen else []), when=when,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Rows16:
    """Keys and values as 16-bit rows: caches of that type in place, everything else converted once per source."""

    low: GpuLowering
    slices: list[HeadSlice]
    n_head_kv: int
    to: str
    when: When
    view: View

    def args(self, part: HeadSlice) -> tuple[Arg, ...]:
        """Return address, bytes per row and per head, compact."""
        source = part.source
        if isinstance(source, Cache) and TYPES[source.type].name == self.to:
            return (self.low.cache(source) + 2 * part.offset, 2 * source.cols, np.int32(2 * part.head_stride),
                    cache_place(source))  # fmt: skip
        first, stop = self._columns(source)
        out = _compact(self.low, source, first, stop - first, self.to, self.when, self.view)
        return out + 2 * (part.offset - first), 2 * (stop - first), np.int32(2 * part.head_stride), np.int32(IN_ROWS)

    def _columns(self, source: Node | Cache) -> tuple[int, int]:
        """Return the range of columns that slices of this source cover."""
        mine = [p for p in self.slices if p.source is source or p.source == source]
        ends = [p.offset + (self.n_head_kv - 1) * p.head_stride + p.width for p in mine]
        return min(p.offset for p in mine), max(ends)


def _compact(
    low: GpuLowering, source: Node | Cache, first: int, cols: int, to: str, when: When | None, view: View
) -> Ref:
    """Return columns of every cached position as f16, bf16 or f32 rows, converted once for all nodes."""

    def make() -> Ref:
        out = low.buffer((4 if to == "f32" else 2) * cols * low.max_rows[Rows.KV])
        _emit_rows(low, source, first, cols, to, out, when, view)
        return out

    return low.shared(("kv rows", source, first, cols, to, when is None, view), make)


# ... every other shape
def any_shape(low: GpuLowering, node: Node, op: Attention, seen: int = 0, lists: tuple[Arg, ...] = NO_LISTS) -> None:
    """Emit the kernel for every shape; `lists`: the cells that tokens see (attention_sparse.py)."""
    q, k, v, n_head, n_head_kv = op.q, op.k, op.v, op.n_head, op.n_head_kv
    if max(len(q), len(k)) > 2:
        raise UnsupportedError(f"{node.name}: heads are made of one or two parts")
    shared = 16 * (sum(p.width for p in q) + v.width + 64)
    if shared > low.device.max_shared:
        raise UnsupportedError(
            f"{node.name}: heads of {v.width} columns are too large for {low.device.name}; use -ngl 0"
        )
    queries = [(*query_args(low, p), np.int32(p.width)) for p in q]
    view = op.window, op.chunk
    keys = [(*_rows_f32(low, p, n_head_kv, view), np.int32(p.width)) for p in k]
    none: tuple[Arg, ...] = (0, 0, np.int32(0), np.int32(0))
    low.emit("attn_any", lambda c: _up(c.n_tokens * n_head, 4), 128, shared, low.state, *queries[0],
             *(queries[1] if len(q) > 1 else none), *keys[0], *(keys[1] if len(k) > 1 else none),
             *_rows_f32(low, v, n_head_kv, view), np.int32(v.width), low.out(node), np.int32(n_head),
             np.int32(n_head_kv), np.float32(op.scale), *_view(low, op), _seen_arg(seen), *lists)  # fmt: skip


def _rows_f32(low: GpuLowering, part: HeadSlice, n_head_kv: int, view: View) -> tuple[Arg, ...]:
    """Return address, elements per row and per head of compact f32 rows."""
    if isinstance(part.source, Node):
        return low.out(part.source) + 4 * part.offset, part.source.cols, np.int32(part.head_stride)
    cols = (n_head_kv - 1) * part.head_stride + part.width
    return _compact(low, part.source, part.offset, cols, "f32", None, view), cols, np.int32(part.head_stride)
