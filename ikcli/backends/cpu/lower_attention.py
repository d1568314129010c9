"""Lower the KV cache and attention ops: hadamard, kv_store, kv_rows, flash_attn, attn.

Scratch is one region per thread. The scores that attention without flash materialises are an ordinary buffer, so that
the memory report shows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.backends.cache_checks import check_columns, check_store
from ikcli.backends.cpu.cell_places import CELLS, IN_CELLS, IN_ROWS, IN_WINDOW, WINDOW_CELLS
from ikcli.backends.cpu.params_attention import (
    BLOCK_SPACE,
    MAX_ROWS,
    SPLITS_PER_THREAD,
    STAT_BYTES,
    STATS_BYTES,
    AttentionPart,
    FlashParams,
    FullParams,
    KvRowsParams,
    KvStoreParams,
    KvStoreTransposedParams,
)
from ikcli.backends.cpu.params_layers import HadamardParams
from ikcli.backends.cpu.program import CpuLowering, Ref
from ikcli.backends.cpu.tile_modes import makes_integers
from ikcli.backends.rules import Rules
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, HeadSlice, Node, Per, Rows
from ikcli.graph.ops_attention import Attention, Attn, FlashAttn, KvRows, KvStore
from ikcli.graph.ops_rows import Hadamard
from ikcli.native import isa
from ikcli.native.kernel_cache import KernelKey
from ikcli.settings.run import KV_TYPES

FEW_ROWS = 8  # largest task of kernels/attention_few.py
MOST_FEW_ROWS = 16  # ... of attention_stream.py with 512-bit vectors
SCORE_TILE = 96  # positions of a tile of stored scores: kernels/attention_full.py
NO_WINDOW = 2**31  # positions
RULES: Rules[CpuLowering] = Rules("the CPU backend", "it needs a newer ik")
_MIN_SPLIT = {True: 64, False: 256}  # fewest positions of a part, for few rows and many


def _type_name(type_: GGMLType) -> str:
    name = TYPES[type_].name
    if name not in KV_TYPES:
        raise UnsupportedError(f"the CPU backend has no KV cache of type {name}; choose one of {', '.join(KV_TYPES)}")
    return name


@RULES.add(Hadamard, "x n_head head_dim offset blocks")
def lower_hadamard(low: CpuLowering, node: Node, op: Hadamard) -> None:
    """Lower the rotation of heads in power-of-two blocks."""
    params = HadamardParams(x=low.out(op.x), out=low.out(node), heads=op.n_head, dim=op.head_dim, offset=op.offset,
                            n_blocks=len(op.blocks), sizes=tuple(op.blocks))  # fmt: skip
    low.emit(KernelKey("hadamard", "make_hadamard"), node.rows, params, row_bytes=16 * node.cols)


@RULES.add(KvStore, "cache x offset n_cols cache_offset")
def lower_kv_store(low: CpuLowering, node: Node, op: KvStore) -> None:
    """Lower the store of columns of a value into the cache."""
    cache, x, cols, cache_offset = op.cache, op.x, op.n_cols, op.cache_offset
    type_ = _type_name(cache.type)
    source = low.out(x) + 4 * op.offset
    if cache.transposed:
        if cache.per is Per.WINDOW:
            raise UnsupportedError(f"{node.name}: transposed caches keep all positions; use flash attention (-fa)")
        if TYPES[cache.type].block_size > 1:
            raise UnsupportedError(f"a transposed V cache cannot be of type {type_}; use f16 or flash attention (-fa)")
        first = cache_offset * low.n_cells * TYPES[cache.type].type_size
        key = KernelKey("kv", "make_kv_store_transposed", (type_,))
        transposed = KvStoreTransposedParams(x=source, stride=4 * x.cols, cols=cols, cache=Ref(cache, first),
                                             n_cells=low.n_cells)  # fmt: skip
        low.emit(key, node.rows, transposed)
        return
    check_store(cache, cols, cache_offset)
    row_bytes = row_n_bytes(cache.type, cache.cols)
    key = KernelKey("kv", "make_kv_store", (type_,))
    # making blocks takes longer than moving bytes
    moved = (8 if TYPES[cache.type].block_size == 1 else 64) * cols
    cells = WINDOW_CELLS if cache.per is Per.WINDOW else CELLS
    params = KvStoreParams(x=source, stride=4 * x.cols, cols=cols, cache=Ref(cache), row_bytes=row_bytes,
                           first=cache_offset, cells=cells)  # fmt: skip
    low.emit(key, node.rows, params, row_bytes=moved)


@RULES.add(KvRows, "cache offset n_cols")
def lower_kv_rows(low: CpuLowering, node: Node, op: KvRows) -> None:
    """Lower the read of cached columns as compact f32 rows."""
    cache = op.cache
    if cache.per is Per.WINDOW:
        raise UnsupportedError(f"{node.name}: the CPU backend reads windows of a cache in attention only")
    check_columns(cache, op.offset, node.cols)
    key = KernelKey("kv", "make_kv_rows", (_type_name(cache.type),))
    row_bytes = row_n_bytes(cache.type, cache.cols)
    params = KvRowsParams(cache=Ref(cache), row_bytes=row_bytes, first=op.offset, cols=node.cols, out=low.out(node))
    low.emit(key, node.rows, params)


_ABSENT = AttentionPart(at=0, row_bytes=0, offset=0, head_stride=0, width=0, place=0)


def _part(low: CpuLowering, x: HeadSlice | None, cross: bool = False) -> tuple[str, AttentionPart]:
    """Return (element type, parameters) of a part; `cross`: rows of caches are those of an encoder."""
    if x is None:
        return "", _ABSENT
    if isinstance(x.source, Node):
        type_, at, row_bytes, place = "f32", low.out(x.source), 4 * x.source.cols, IN_ROWS
    else:
        cache = x.source
        if cache.transposed and cache.per is Per.WINDOW:
            raise UnsupportedError("transposed caches keep all positions; use flash attention (-fa)")
        check_columns(cache, x.offset, x.width, x.head_stride)
        type_, at = _type_name(cache.type), Ref(cache)
        row_bytes = row_n_bytes(cache.type, low.n_cells if cache.transposed else cache.cols)
        place = IN_WINDOW if cross or cache.per is Per.WINDOW else IN_CELLS
    return type_, AttentionPart(at=at, row_bytes=row_bytes, offset=x.offset, head_stride=x.head_stride, width=x.width,
                       place=place)  # fmt: skip


def chunks(*parts: HeadSlice) -> int:
    """Return the columns in units of 16, every part padded."""
    return sum(-(-p.width // 16) for p in parts)


def unit_heads(group: int, limit: int = MAX_ROWS) -> int:
    """Return the heads that one task handles: a divisor of the heads that share a KV head."""
    return max(d for d in range(1, min(group, limit) + 1) if group % d == 0)


def view_chunk(k: tuple[HeadSlice, ...], v: HeadSlice, pairs: bool) -> int:
    """Return the first chunk of the K tile in which V lies, or -1 if V is not a part of K's row.

    Tiles of pairs can share V only if it is the end of the row, behind other columns, in chunks of 32.
    """
    shift = v.offset - k[0].offset
    inside = shift >= 0 and shift % 16 == 0 and shift + v.width <= k[0].width
    same = len(k) == 1 and k[0].source is v.source and k[0].head_stride == v.head_stride
    if pairs and (shift == 0 or shift % 32 or v.width % 32 or shift + v.width < k[0].width):
        return -1
    return shift // 16 if same and inside else -1


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of q, k and v of an attention node: element types and parts.

    Also holds the features beyond causal attention, as letters (kernels/attention_tasks.py).
    """

    k_types: str
    v_type: str
    more: str
    q: tuple[AttentionPart, AttentionPart]
    k: tuple[AttentionPart, AttentionPart]
    v: AttentionPart

    @classmethod
    def of(cls, low: CpuLowering, node: Node, op: Attention) -> Sources:
        letters = {"w": op.window or op.chunk, "s": op.sinks, "c": op.softcap, "b": op.both, "d": op.slopes,
                   "t": op.biases, "r": op.ranged and not low.batch_invariant, "x": op.cross}  # fmt: skip
        if op.sinks is not None and op.sinks.type is not GGMLType.F32:
            raise UnsupportedError(f"{op.sinks.name}: sinks are of type f32, not {TYPES[op.sinks.type].name}")
        more = "".join(x for x, used in letters.items() if used)
        return attention_sources(low, node, op.q, op.k, op.v, more)

    def key(self, module: str, factory: str, *args: int | str, letters: str = "wscbdtrx") -> KernelKey:
        """Return the key of a kernel, specialized for those of these letters that the node needs."""
        more = "".join(x for x in self.more if x in letters)
        return KernelKey(module, factory, (*args, more) if more else args)


def attention_sources(
    low: CpuLowering, node: Node, q: Sequence[HeadSlice], k: Sequence[HeadSlice], v: HeadSlice, more: str = ""
) -> Sources:
    """Return the sources of heads of one or two parts; raise UnsupportedError for others."""
    if max(len(q), len(k)) > 2 or any(p.width % 16 for p in (*q[:-1], *k[:-1])) or chunks(*q) != chunks(*k):
        raise UnsupportedError(
            f"{node.name}: heads are made of one or two parts, the first of a multiple of 16 columns"
        )
    (_, q0), (_, q1), (t0, k0), (t1, k1), (v_type, v_part) = (
        _part(low, x, "x" in more) for x in (*q, *[None] * (2 - len(q)), *k, *[None] * (2 - len(k)), v)
    )
    return Sources("+".join(filter(None, (t0, t1))), v_type, more, (q0, q1), (k0, k1), v_part)


_STREAMED = {"f32": 16, "f16": 16, "bf16": 16, "q8_0": 32}  # columns of a step: kernels/attention_stream.py


def _is_streamed(*parts: HeadSlice) -> bool:
    """Return whether K and V are rows of caches that the kernel for one token reads in place."""
    for p in parts:
        step = _STREAMED.get(_type_name(p.source.type)) if isinstance(p.source, Cache) else None
        if step is None or any(c % step for c in (p.offset, p.width, p.head_stride)):
            return False
    return True


def _fits_integers(k: Sequence[HeadSlice], v: HeadSlice, half: bool = False) -> bool:
    """Return whether kernels/attention_pairs.py loses nothing significant: no cache holds more than f16 does.

    Rows computed from the cache, in f32, are as precise as the cache itself; without a cache, `half` must allow it.
    """
    types = {p.source.type for p in (*k, v) if isinstance(p.source, Cache)}
    return makes_integers() and (half or bool(types)) and GGMLType.F32 not in types


def _staging(sources: Sources, k: Sequence[HeadSlice], v: HeadSlice) -> str:
    """Return how kernels/attention_pairs.py reads rows: "codes" of q8_0, "direct" 16-bit floats, or through "f32"."""
    columns = [c for p in (*k, v) for c in (p.offset, p.width, p.head_stride)]
    types = {sources.k_types, sources.v_type}
    if types == {"q8_0"} and not any(c % 32 for c in columns):
        return "codes"
    return "direct" if types <= {"f16", "bf16"} and not any(c % 16 for c in columns) else "f32"


def _most_streamed(k_type: str, k: Sequence[HeadSlice], v: HeadSlice) -> int:
    """Return the most heads per KV head for which the kernel for one token is used."""
    if len(k) > 1 or not _is_streamed(*k, v):
        return 0
    wide = isa.current().name == "avx512" and k_type != "q8_0" and not _fits_integers(k, v)
    return MOST_FEW_ROWS if wide else FEW_ROWS


def regions(*sizes: int) -> tuple[list[int], int]:
    """Return (offsets, total) of regions placed one after the other.

    The total is rounded up to keep threads off each other's cache lines.
    """
    at = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return at[:-1], -(-max(at[-1], 4096) // 128) * 128 + 64


def bias_tables(biases: Sequence[Sequence[float]]) -> npt.NDArray[np.float32]:
    """Return what kernels read biases from: [heads, 2, distances], by key - query and by query - key.

    Both are padded by 16 outer values at either end, so that 16 distances in a row can be loaded from any place.
    """
    rows = np.pad(np.asarray(biases, np.float32), ((0, 0), (16, 16)), mode="edge")
    return np.ascontiguousarray(np.stack([rows, rows[:, ::-1]], axis=1))


_FIELDS = "q k v n_head n_head_kv scale window chunk sinks softcap wide half"


@RULES.add(FlashAttn, _FIELDS + " both slopes ranged biases cross")
def lower_flash_attn(low: CpuLowering, node: Node, op: FlashAttn) -> None:
    """Lower flash attention: one pass, then merge the parts of split tasks."""
    k, v, n_head, group = op.k, op.v, op.n_head, op.group
    if isinstance(v.source, Cache) and v.source.transposed:
        raise UnsupportedError("flash attention reads V row by row: the V cache cannot be transposed")
    sources = Sources.of(low, node, op)
    heads = unit_heads(group)
    block = 1 if low.batch_invariant else max(1, MAX_ROWS // heads)
    n_rows, units = min(block, low.max_rows[Rows.TOKENS]) * heads, n_head // heads
    k_chunks, v_chunks = chunks(*k), chunks(v)
    stream = n_rows == heads <= _most_streamed(sources.k_types, k, v)
    few = stream or n_rows <= FEW_ROWS
    pairs = not stream and n_rows > 1 and not op.wide and _fits_integers(k, v, op.half)
    if few and (len(k) > 1 or k_chunks % 2 or v_chunks % 2):
        pairs = False  # there are no pairs of such columns for few rows
    view = view_chunk(k, v, pairs)
    rows, per_task = -(-n_rows // 16) * 16, units if few else 1
    m = 1 << (heads - 1).bit_length()  # rows of the kernel that streams
    tile = 64 if stream or (few and pairs) else 32 if few else 128 if k_chunks + v_chunks <= 32 else 64
    # Q, K tile (also Q before its transposition), V tile, scores, output (read 16 rows at a time), statistics
    q_unit, o_unit = (64 * chunks * (-(-n_rows // 8) * 8 + 1) for chunks in (k_chunks, v_chunks))
    if stream and sources.k_types == "q8_0":
        q_unit = max(q_unit, 64 + 192 * -(-k_chunks // 4) * m)  # kernels/attention_q8.py
    q_bytes, o_bytes = 64 * k_chunks * rows + per_task * q_unit, 64 * v_chunks * rows + per_task * o_unit
    k_bytes = 64 * k_chunks * m if stream else 64 * k_chunks * (tile + 1)
    v_bytes = 0 if stream or view >= 0 else 64 * v_chunks * (tile + 1)
    s_bytes = 4 * max(rows, per_task * m if stream else 0) * (tile + 16)
    if pairs:  # K in pairs of columns, 16 rows of f32, 3 numbers per position, 2 per row; V in pairs of positions
        k_bytes = 64 * ((k_chunks + 1) // 2) * (tile + 1) + 16 * 64 * max(k_chunks, v_chunks) + BLOCK_SPACE
        k_bytes += 12 * tile + 8 * rows
        v_bytes = 64 * v_chunks * (tile // 2 + 1)
        s_bytes *= 2 if view >= 0 else 1
    at, scratch_bytes = regions(q_bytes, k_bytes, v_bytes, s_bytes, o_bytes, per_task * STATS_BYTES)
    _, k_at, v_at, s_at, o_at, stats_at = at
    slot_bytes = 2 * STAT_BYTES + 64 * v_chunks * rows
    scratch = low.buffer(low.n_threads * scratch_bytes)
    n_slots = SPLITS_PER_THREAD * low.n_threads * per_task
    slots = low.buffer(max(n_slots, units) * low.max_rows[Rows.TOKENS] * slot_bytes if low.batch_invariant
                       else n_slots * slot_bytes)  # fmt: skip
    slopes = low.constant(np.asarray(op.slopes, np.float32).tobytes()) if op.slopes else 0
    most = len(op.biases[0]) // 2 if op.biases else 0
    if op.biases:
        slopes = low.constant(bias_tables(op.biases).tobytes())
    params = FlashParams(
        out=low.out(node), out_stride=4 * node.cols, first_head=0, units=units, unit_heads=heads, group=group,
        block=block, tile=tile, scale=op.scale, k_chunks=k_chunks, v_cols=v.width, scratch=scratch,
        scratch_bytes=scratch_bytes, k_at=k_at, v_at=v_at, s_at=s_at, window=op.window or NO_WINDOW,
        chunk=op.chunk or NO_WINDOW, sinks=low.weight(op.sinks) if op.sinks else 0, slopes=slopes, cap=op.softcap,
        q=sources.q, k=sources.k, v=sources.v, v_chunk=max(view, 0), o_at=o_at, stats_at=stats_at, slots=slots,
        slot_bytes=slot_bytes, q_unit=q_unit, o_unit=o_unit, units_per_task=per_task, min_split=_MIN_SPLIT[few],
        batch_invariant=int(low.batch_invariant), most_distance=most,
    )  # fmt: skip
    types = (sources.k_types, "view" if view >= 0 else sources.v_type)
    if stream:
        key = sources.key("attention_stream", "make_flash_stream", sources.k_types, sources.v_type, m)
    elif few and pairs:
        key = sources.key("attention_few_pairs", "make_flash_few_pairs", *types, _staging(sources, k, v))
    elif few:
        key = sources.key("attention_few", "make_flash_few", *types)
    elif pairs:
        key = sources.key("attention_pairs", "make_flash_pairs", *types, _staging(sources, k, v))
    else:
        key = sources.key("attention", "make_flash_attn", *types)
    low.emit(key, node.rows, params)
    if low.n_threads > 1:
        # never left to one thread: it finds the parts by the number of threads
        low.emit(sources.key("attention", "make_combine", letters="wbrx"), node.rows, params)


@RULES.add(Attn, _FIELDS + " heads_per_step")
def lower_attn(low: CpuLowering, node: Node, op: Attn) -> None:
    """Lower attention with stored scores, some heads at a time: K*Q, soft-max, times V."""
    n_head = op.n_head
    step = op.heads_per_step or n_head
    scores_cols = -(-low.max_rows[Rows.KV] // 16) * 16
    max_tokens = low.max_rows[Rows.TOKENS]
    scores = low.buffer(4 * min(step, n_head) * max_tokens * scores_cols)
    for first in range(0, n_head, step):
        _attn_step(low, node, op, first, min(step, n_head - first), scores, scores_cols)


def _attn_step(low: CpuLowering, node: Node, op: Attn, first: int, n_heads: int, scores: Ref, scores_cols: int) -> None:
    """Lower the heads [first, first + n_heads)."""
    v, group, sources = op.v, op.group, Sources.of(low, node, op)
    heads = unit_heads(math.gcd(group, n_heads, first or group))
    block = max(1, MAX_ROWS // heads)
    rows = -(-min(block, low.max_rows[Rows.TOKENS]) * heads // 16) * 16
    k_chunks, tile = chunks(*op.k), SCORE_TILE
    # Q or P; K tile; transposed K tile or V tile; products (with 16 spare rows)
    q_bytes, k_bytes = 64 * (rows + 1) * max(k_chunks, tile // 16), 64 * k_chunks * (tile + 1)
    v_bytes, product_bytes = 4 * tile * max(16 * k_chunks, SCORE_TILE), 4 * (rows + 16) * tile
    (_, k_at, v_at, s_at), scratch_bytes = regions(q_bytes, k_bytes, v_bytes, product_bytes)
    scratch = low.buffer(low.n_threads * scratch_bytes)
    params = FullParams(
        out=low.out(node), out_stride=4 * node.cols, first_head=first, units=n_heads // heads, unit_heads=heads,
        group=group, block=block, tile=tile, scale=op.scale, k_chunks=k_chunks, v_cols=v.width, scratch=scratch,
        scratch_bytes=scratch_bytes, k_at=k_at, v_at=v_at, s_at=s_at, window=op.window or NO_WINDOW,
        chunk=op.chunk or NO_WINDOW, sinks=low.weight(op.sinks) if op.sinks else 0, slopes=0, cap=op.softcap,
        q=sources.q, k=sources.k, v=sources.v, score_rows=low.max_rows[Rows.TOKENS], scores=scores,
        score_bytes=4 * scores_cols,
    )  # fmt: skip
    transposed = isinstance(v.source, Cache) and v.source.transposed
    for key in (
        sources.key("attention_full", "make_kq", sources.k_types, letters="w"),
        sources.key("attention_full", "make_soft_max"),
        sources.key("attention_full", "make_kqv", sources.v_type, int(transposed), letters="w"),
    ):
        low.emit(key, node.rows, params)
