"""Lower compressed attention (entries of several positions), residuals of streams and attention to earlier outputs."""

from __future__ import annotations

import math

from ikcli.backends.cpu.lower_attention import NO_WINDOW, attention_sources, check_store, chunks, regions, unit_heads
from ikcli.backends.cpu.lower_sparse import RULES
from ikcli.backends.cpu.params_attention import (
    SPLITS_PER_THREAD,
    STAT_BYTES,
    STATS_BYTES,
    PooledCellsParams,
    PooledParams,
    PooledStoreParams,
    PoolParams,
)
from ikcli.backends.cpu.params_layers import (
    GatedStreamsParams,
    ResidualParams,
    StreamAddParams,
    StreamLevelParams,
    StreamMatchParams,
    StreamParams,
    StreamWeightsParams,
)
from ikcli.backends.cpu.program import CpuLowering, Ref
from ikcli.backends.weight_checks import check_f32
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, HeadSlice, Node, Per, Rows
from ikcli.graph.ops_pooled import Pool, PooledAttn, PooledCells, PooledStore
from ikcli.graph.ops_streams import (
    GatedStreams,
    ResidualAttn,
    StreamAdd,
    StreamLevel,
    StreamMatch,
    StreamMix,
    StreamPredict,
    StreamSum,
    StreamWeights,
)
from ikcli.native.kernel_cache import KernelKey

_TILE = 64  # positions and entries
_MIN_SPLIT = 256


def _in_window(cache: Cache) -> int:
    return int(cache.per is Per.WINDOW)


def _whole_vectors(node: Node, cols: int) -> None:
    if cols % 16:
        raise UnsupportedError(f"{node.name}: the CPU backend has kernels for multiples of 16 columns, not {cols}")


@RULES.add(Pool, "after cache bias width ratio")
def _pool(low: CpuLowering, node: Node, op: Pool) -> None:
    if op.cache.type is not GGMLType.F32:
        raise UnsupportedError(f"{node.name}: what is summed up to entries is kept as f32")
    check_f32(op.bias, "biases of positions")
    _whole_vectors(node, op.width)
    params = PoolParams(cache=Ref(op.cache), row_bytes=4 * op.cache.cols, window=_in_window(op.cache),
                        bias=low.weight(op.bias), parts=op.parts, width=op.width, ratio=op.ratio,
                        out=low.out(node))  # fmt: skip
    low.emit(KernelKey("attention_pooled", "make_pool"), node.rows, params, row_bytes=16 * op.cache.cols)


@RULES.add(PooledStore, "cache x ratio")
def _pooled_store(low: CpuLowering, node: Node, op: PooledStore) -> None:
    cache, cols = op.cache, op.x.cols
    check_store(cache, cols, 0)
    params = PooledStoreParams(x=low.out(op.x), stride=4 * cols, cols=cols, cache=Ref(cache),
                               row_bytes=row_n_bytes(cache.type, cache.cols), ratio=op.ratio)  # fmt: skip
    key = KernelKey("attention_pooled", "make_pooled_store", (TYPES[cache.type].name,))
    low.emit(key, node.rows, params, row_bytes=8 * cols)


@RULES.add(PooledCells, "x recent chosen window ratio most")
def _pooled_cells(low: CpuLowering, node: Node, op: PooledCells) -> None:
    chosen = op.chosen
    params = PooledCellsParams(out=low.out(node), out_bytes=4 * node.cols, in_window=_in_window(op.recent),
                               chosen=0 if chosen is None else low.out(chosen),
                               chosen_bytes=0 if chosen is None else 4 * chosen.cols, window=op.window,
                               ratio=op.ratio, most=op.most)  # fmt: skip
    low.emit(KernelKey("attention_pooled", "make_pooled_cells"), node.rows, params, row_bytes=4 * node.cols)


@RULES.add(PooledAttn, "q recent pooled cells sinks n_head scale window ratio")
def _pooled_attn(low: CpuLowering, node: Node, op: PooledAttn) -> None:
    check_f32(op.sinks, "sinks")
    k = HeadSlice(op.recent, 0, op.q.width, 0)
    sources = attention_sources(low, node, (op.q,), (k,), k)
    heads, n_chunks = unit_heads(op.n_head), chunks(op.q)
    rows = -(-heads // 16) * 16
    unit = 64 * n_chunks * (-(-heads // 8) * 8 + 1)
    tile = 2 * _TILE if n_chunks <= 16 else _TILE
    at, scratch_bytes = regions(
        64 * n_chunks * rows + unit, 64 * n_chunks * (tile + 1), 0, 4 * rows * (tile + 16),
        64 * n_chunks * rows + unit, STATS_BYTES,
    )  # fmt: skip
    _, k_at, v_at, s_at, o_at, stats_at = at
    slot_bytes, units = 2 * STAT_BYTES + 64 * n_chunks * rows, op.n_head // heads
    n_slots = SPLITS_PER_THREAD * low.n_threads
    tokens = low.max_rows[Rows.TOKENS] if low.batch_invariant else 1
    params = PooledParams(
        out=low.out(node), out_stride=4 * node.cols, first_head=0, units=units, unit_heads=heads, group=op.n_head,
        block=1, tile=tile, scale=op.scale, k_chunks=n_chunks, v_cols=op.q.width,
        scratch=low.buffer(low.n_threads * scratch_bytes), scratch_bytes=scratch_bytes, k_at=k_at, v_at=v_at,
        s_at=s_at, window=NO_WINDOW, chunk=NO_WINDOW, sinks=low.weight(op.sinks), slopes=0, cap=0.0, q=sources.q,
        k=sources.k, v=sources.v, v_chunk=0, o_at=o_at, stats_at=stats_at,
        slots=low.buffer(max(n_slots, units) * tokens * slot_bytes), slot_bytes=slot_bytes, q_unit=unit, o_unit=unit,
        units_per_task=1, min_split=_MIN_SPLIT, most_distance=0, batch_invariant=int(low.batch_invariant),
        cells=low.out(op.cells), cell_bytes=4 * op.cells.cols, recent=op.window, ratio=op.ratio, most=op.most,
        pooled=Ref(op.pooled),
    )  # fmt: skip
    low.emit(KernelKey("attention_pooled", "make_flash_pooled", (sources.k_types,)), node.rows, params)
    if low.n_threads > 1:
        low.emit(KernelKey("attention_pooled", "make_combine_pooled"), node.rows, params)


@RULES.add(StreamWeights, "x scale base n n_iter eps most")
def _stream_weights(low: CpuLowering, node: Node, op: StreamWeights) -> None:
    for w in (op.scale, op.base):
        check_f32(w, "weights of hyper-connections")
    params = StreamWeightsParams(x=low.out(op.x), out=low.out(node), cols=node.cols, scale=low.weight(op.scale),
                                 base=low.weight(op.base), n=op.n, n_iter=op.n_iter, eps=op.eps,
                                 most=op.most)  # fmt: skip
    low.emit(KernelKey("streams", "make_stream_weights"), node.rows, params, row_bytes=512 * node.cols)


@RULES.add(StreamSum, "x weights n")
def _stream_sum(low: CpuLowering, node: Node, op: StreamSum) -> None:
    _whole_vectors(node, node.cols)
    params = StreamParams(x=low.out(op.x), added=0, weights=low.out(op.weights), weight_cols=op.weights.cols,
                          out=low.out(node), n=op.n, cols=node.cols)  # fmt: skip
    low.emit(KernelKey("streams", "make_stream_sum"), node.rows, params, row_bytes=4 * op.x.cols)


@RULES.add(StreamMix, "x out weights n")
def _stream_mix(low: CpuLowering, node: Node, op: StreamMix) -> None:
    _whole_vectors(node, op.out.cols)
    params = StreamParams(x=low.out(op.x), added=low.out(op.out), weights=low.out(op.weights),
                          weight_cols=op.weights.cols, out=low.out(node), n=op.n, cols=op.out.cols)  # fmt: skip
    low.emit(KernelKey("streams", "make_stream_mix"), node.rows, params, row_bytes=12 * op.x.cols)


@RULES.add(GatedStreams, "x gate n")
def _gated_streams(low: CpuLowering, node: Node, op: GatedStreams) -> None:
    _whole_vectors(node, node.cols)
    params = GatedStreamsParams(x=low.out(op.x), gate=low.out(op.gate), out=low.out(node), n=op.n, cols=node.cols,
                                factor=1 / op.n)  # fmt: skip
    low.emit(KernelKey("streams", "make_gated_streams"), node.rows, params, row_bytes=24 * op.x.cols)


@RULES.add(StreamMatch, "key query value n")
def _stream_match(low: CpuLowering, node: Node, op: StreamMatch) -> None:
    _whole_vectors(node, op.value.cols)
    params = StreamMatchParams(key=low.out(op.key), query=low.out(op.query), value=low.out(op.value),
                               out=low.out(node), n=op.n, cols=op.value.cols,
                               scale=1 / math.sqrt(op.value.cols))  # fmt: skip
    low.emit(KernelKey("streams", "make_stream_match"), node.rows, params, row_bytes=16 * op.key.cols)


@RULES.add(StreamPredict, "x weights n")
def _stream_predict(low: CpuLowering, node: Node, op: StreamPredict) -> None:
    cols = node.cols // op.n
    _whole_vectors(node, cols)
    params = StreamParams(x=low.out(op.x), added=0, weights=low.out(op.weights), weight_cols=op.weights.cols,
                          out=low.out(node), n=op.n, cols=cols)  # fmt: skip
    low.emit(KernelKey("streams", "make_stream_predict"), node.rows, params, row_bytes=12 * node.cols)


@RULES.add(StreamAdd, "x out n weights first scale")
def _stream_add(low: CpuLowering, node: Node, op: StreamAdd) -> None:
    _whole_vectors(node, op.out.cols)
    params = StreamAddParams(x=low.out(op.x), out=low.out(node), cols=op.out.cols, added=low.out(op.out),
                             weights=0 if op.weights is None else low.out(op.weights), n=op.n,
                             first=op.first, scale=op.scale)  # fmt: skip
    low.emit(KernelKey("streams", "make_stream_add"), node.rows, params, row_bytes=8 * node.cols)


@RULES.add(StreamLevel, "x n least")
def _stream_level(low: CpuLowering, node: Node, op: StreamLevel) -> None:
    params = StreamLevelParams(x=low.out(op.x), out=low.out(node), cols=node.cols // op.n, n=op.n, least=op.least)
    low.emit(KernelKey("streams", "make_stream_level"), node.rows, params, row_bytes=12 * node.cols)


@RULES.add(ResidualAttn, "kept x w eps")
def _residual_attn(low: CpuLowering, node: Node, op: ResidualAttn) -> None:
    check_f32(op.w, "weights of the scores of earlier outputs")
    _whole_vectors(node, node.cols)
    scratch = 4 * (op.n_kept + 1)
    params = ResidualParams(kept=low.out(op.kept), x=low.out(op.x), w=low.weight(op.w), out=low.out(node), n=op.n_kept,
                            cols=node.cols, eps=op.eps, scratch=low.buffer(scratch * low.n_threads),
                            scratch_bytes=scratch)  # fmt: skip
    low.emit(KernelKey("streams", "make_residual_attn"), node.rows, params, row_bytes=8 * op.kept.cols)
