"""Lower sparse attention: the choice of positions, and attention to them."""

from __future__ import annotations

from typing import Any

from ikcli.backends.cpu.lower_attention import (
    NO_WINDOW,
    RULES,
    attention_sources,
    chunks,
    regions,
    unit_heads,
    view_chunk,
)
from ikcli.backends.cpu.params_attention import (
    INDEX_SPAN,
    MAX_ROWS,
    SPLITS_PER_THREAD,
    STAT_BYTES,
    STATS_BYTES,
    EntryPositionsParams,
    IndexBlockParams,
    IndexParams,
    PrefixParams,
    SparseParams,
)
from ikcli.backends.cpu.program import CpuLowering
from ikcli.backends.weight_checks import check_f32
from ikcli.graph import HeadSlice, Node, Rows, Weight
from ikcli.graph.ops_sparse import EntryPositions, IndexTopBlocks, IndexTopK, PrefixAttn, SparseAttn
from ikcli.native.kernel_cache import KernelKey

_TILE = 64  # positions
_MIN_SPLIT = 256
_SHARED_TOKENS = 8  # most tokens whose scores are computed by all threads together
_COUNTS_BYTES = 8192  # of kernels/index_top_k.py


@RULES.add(IndexTopK, "q weights k n_head top_k ratio")
def lower_index_top_k(low: CpuLowering, node: Node, op: IndexTopK) -> None:
    """Lower the choice of positions."""
    k = HeadSlice(op.k, 0, op.q.width, 0)
    sources = attention_sources(low, node, (op.q,), (k,), k)
    shared = low.max_rows[Rows.TOKENS] <= _SHARED_TOKENS
    block = max(MAX_ROWS // op.n_head, 1) if op.n_head % 16 == 0 and not shared else 1
    block = min(block, low.max_rows[Rows.TOKENS])
    rows = -(-block * op.n_head // 16) * 16
    n_chunks, score_bytes = chunks(op.q), 64 * -(-low.max_rows[Rows.KV] // 16)
    q_bytes = 64 * n_chunks * rows
    # the tile of keys is also where Q lies before its transposition
    k_bytes, s_bytes = 64 * n_chunks * (_TILE + 1), 4 * rows * (_TILE + 16)
    at, scratch_bytes = regions(
        q_bytes, k_bytes, s_bytes, 4 * rows, _COUNTS_BYTES, 0 if shared else block * score_bytes
    )
    _, k_at, s_at, weights_at, counts_at, scores_at = at
    params = IndexParams(
        out=low.out(node), out_stride=4 * node.cols, first_head=0, units=1, unit_heads=op.n_head, group=op.n_head,
        block=block, tile=_TILE, scale=1.0, k_chunks=n_chunks, v_cols=0,
        scratch=low.buffer(low.n_threads * scratch_bytes), scratch_bytes=scratch_bytes, k_at=k_at, v_at=0, s_at=s_at,
        window=NO_WINDOW, chunk=NO_WINDOW, sinks=0, slopes=0, cap=0.0, q=sources.q, k=sources.k, v=sources.v,
        most=op.top_k, ratio=op.ratio, weights=0 if op.weights is None else low.out(op.weights),
        weight_bytes=4 * op.n_head,
        weights_at=weights_at, counts_at=counts_at, scores_at=scores_at, score_bytes=score_bytes,
        scores=low.buffer(low.max_rows[Rows.TOKENS] * score_bytes) if shared else 0,
    )  # fmt: skip
    if shared:
        low.emit(KernelKey("index_top_k", "make_index_scores", (sources.k_types,)), node.rows, params)
        low.emit(KernelKey("index_top_k", "make_index_choice"), node.rows, params)
    else:
        low.emit(KernelKey("index_top_k", "make_index_top_k", (sources.k_types,)), node.rows, params)


@RULES.add(IndexTopBlocks, "q k n_head top_k block local")
def lower_index_top_blocks(low: CpuLowering, node: Node, op: IndexTopBlocks) -> None:
    """Lower the choice of blocks: scores of all blocks, then the choice."""
    k = HeadSlice(op.k, 0, op.q.width, 0)
    sources = attention_sources(low, node, (op.q,), (k,), k)
    tokens = low.max_rows[Rows.TOKENS]
    block = min(max(MAX_ROWS // op.n_head, 1), tokens)
    rows = -(-block * op.n_head // 16) * 16
    n_chunks, score_bytes = chunks(op.q), 64 * -(-low.max_rows[Rows.KV] // (16 * op.block))
    at, scratch_bytes = regions(
        64 * n_chunks * rows, 64 * n_chunks * (_TILE + 1), 4 * rows * (_TILE + 16), 4 * rows, _COUNTS_BYTES,
        4 * op.top_k,
    )  # fmt: skip
    _, k_at, s_at, best_at, counts_at, chosen_at = at
    params = IndexBlockParams(
        out=low.out(node), out_stride=4 * node.cols, first_head=0, units=1, unit_heads=op.n_head, group=op.n_head,
        block=block, tile=_TILE, scale=1.0, k_chunks=n_chunks, v_cols=0,
        scratch=low.buffer(low.n_threads * scratch_bytes), scratch_bytes=scratch_bytes, k_at=k_at, v_at=0, s_at=s_at,
        window=NO_WINDOW, chunk=NO_WINDOW, sinks=0, slopes=0, cap=0.0, q=sources.q, k=sources.k, v=sources.v,
        most=op.top_k, span=op.block, local=op.local, task_span=-(-INDEX_SPAN // op.block) * op.block,
        best_at=best_at, counts_at=counts_at, chosen_at=chosen_at,
        scores=low.buffer(tokens * op.n_head * score_bytes), score_bytes=score_bytes,
    )  # fmt: skip
    low.emit(KernelKey("index_blocks", "make_block_scores", (sources.k_types,)), node.rows, params)
    low.emit(KernelKey("index_blocks", "make_block_choice"), node.rows, params)


@RULES.add(EntryPositions, "chosen ratio")
def lower_entry_positions(low: CpuLowering, node: Node, op: EntryPositions) -> None:
    """Lower the list of the positions of chosen entries."""
    params = EntryPositionsParams(out=low.out(node), out_bytes=4 * node.cols, chosen=low.out(op.chosen),
                                  chosen_bytes=4 * op.chosen.cols, ratio=op.ratio, most=op.chosen.cols)  # fmt: skip
    low.emit(KernelKey("attention_pooled", "make_entry_positions"), node.rows, params, row_bytes=4 * node.cols)


@RULES.add(SparseAttn, "q k v n_head n_head_kv scale wide sinks selected lists block rest")
def lower_sparse_attn(low: CpuLowering, node: Node, op: SparseAttn) -> None:
    """Lower attention to chosen positions, a token per task."""
    assert op.selected is not None
    n_bytes = 4 * op.selected.cols
    _listed_attention(
        low, node, "sparse", SparseParams, op.q, op.k, op.v, group=op.group, n_head=op.n_head, scale=op.scale,
        sinks=op.sinks, cells=low.out(op.selected), cell_bytes=n_bytes,
        list_bytes=n_bytes // op.lists if op.lists > 1 else 0, most=op.selected.cols // op.lists, span=op.block,
        own=int(not op.rest),
    )  # fmt: skip


@RULES.add(PrefixAttn, "q k v prefix cells n_head scale")
def lower_prefix_attn(low: CpuLowering, node: Node, op: PrefixAttn) -> None:
    """Lower attention to rows before all positions and to listed ones, a token per task."""
    check_f32(op.prefix, "rows before all positions")
    _listed_attention(
        low, node, "prefixed", PrefixParams, op.q, (op.k,), op.v, group=op.n_head, n_head=op.n_head, scale=op.scale,
        sinks=None, cells=low.out(op.cells), cell_bytes=4 * op.cells.cols, list_bytes=0, most=op.cells.cols, span=1,
        own=1,
        prefix=low.weight(op.prefix), prefix_bytes=4 * op.prefix.ne0, n_prefix=op.prefix.ne1,
    )  # fmt: skip


def _listed_attention(
    low: CpuLowering,
    node: Node,
    kind: str,
    params_type: type[SparseParams],
    q: tuple[HeadSlice, ...],
    k: tuple[HeadSlice, ...],
    v: HeadSlice,
    *,
    group: int,
    n_head: int,
    scale: float,
    sinks: Weight | None,
    **own: Any,
) -> None:
    """Emit the kernels of attention to listed positions; `group`: heads of a KV head, `own`: parameters of the kind."""
    sources = attention_sources(low, node, q, k, v)
    if sinks is not None:
        check_f32(sinks, "sinks of attention")
    heads = unit_heads(group)
    rows, k_chunks, v_chunks = -(-heads // 16) * 16, chunks(*k), chunks(v)
    view = view_chunk(k, v, False)
    q_unit, o_unit = (64 * n * (-(-heads // 8) * 8 + 1) for n in (k_chunks, v_chunks))
    tile = 2 * _TILE if k_chunks + v_chunks <= 32 else _TILE
    at, scratch_bytes = regions(
        64 * k_chunks * rows + q_unit, 64 * k_chunks * (tile + 1), 0 if view >= 0 else 64 * v_chunks * (tile + 1),
        4 * rows * (tile + 16), 64 * v_chunks * rows + o_unit, STATS_BYTES,
    )  # fmt: skip
    _, k_at, v_at, s_at, o_at, stats_at = at
    slot_bytes, units = 2 * STAT_BYTES + 64 * v_chunks * rows, n_head // heads
    n_slots = SPLITS_PER_THREAD * low.n_threads
    tokens = low.max_rows[Rows.TOKENS] if low.batch_invariant else 1
    params = params_type(
        out=low.out(node), out_stride=4 * node.cols, first_head=0, units=units, unit_heads=heads, group=group,
        block=1, tile=tile, scale=scale, k_chunks=k_chunks, v_cols=v.width,
        scratch=low.buffer(low.n_threads * scratch_bytes), scratch_bytes=scratch_bytes, k_at=k_at, v_at=v_at,
        s_at=s_at, window=NO_WINDOW, chunk=NO_WINDOW, sinks=low.weight(sinks) if sinks is not None else 0, slopes=0,
        cap=0.0, q=sources.q, k=sources.k, v=sources.v, v_chunk=max(view, 0), o_at=o_at, stats_at=stats_at,
        slots=low.buffer(max(n_slots, units) * tokens * slot_bytes), slot_bytes=slot_bytes, q_unit=q_unit,
        o_unit=o_unit, units_per_task=1, min_split=_MIN_SPLIT, most_distance=0,
        batch_invariant=int(low.batch_invariant), **own,
    )  # fmt: skip
    types = (sources.k_types, "view" if view >= 0 else sources.v_type)
    more = ("s",) if sinks is not None else ()
    low.emit(KernelKey("attention_sparse", f"make_flash_{kind}", (*types, *more)), node.rows, params)
    if low.n_threads > 1:
        low.emit(KernelKey("attention_sparse", f"make_combine_{kind}", more), node.rows, params)
