"""Lower compressed attention for the GPU: entries of several positions, lists of rows, attention to listed rows.

Kernels are in `kernels/attn_pooled.cu`; `attention_rows.py` emits those of lists.
"""

from __future__ import annotations

import numpy as np

from ikcli.backends.cuda.attention import emit_store
from ikcli.backends.cuda.attention_rows import cache_place, emit_cells, emit_listed, row_floats
from ikcli.backends.cuda.lower import RULES, GpuLowering
from ikcli.backends.weight_checks import check_f32
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Cache, HeadSlice, Node
from ikcli.graph.ops_pooled import Pool, PooledAttn, PooledCells, PooledStore
from ikcli.graph.ops_sparse import PrefixAttn

_COLUMNS = 128  # of a block of pool_entries


@RULES.add(Pool, "after cache bias width ratio")
def pool(low: GpuLowering, node: Node, op: Pool) -> None:
    """Lower the sums of positions that become entries."""
    if op.cache.type is not GGMLType.F32:
        raise UnsupportedError(f"{node.name}: what is summed up to entries is kept as f32")
    check_f32(op.bias, "biases of positions")
    low.emit("pool_entries", lambda c: (c.n_tokens, -(-op.width // _COLUMNS), 1), _COLUMNS, 0, low.state,
             low.cache(op.cache), cache_place(op.cache), low.weight(op.bias), np.int32(row_floats(op.bias)),
             low.out(node), np.int32(op.width), np.int32(op.parts), np.int32(op.ratio))  # fmt: skip


@RULES.add(PooledStore, "cache x ratio")
def pooled_store(low: GpuLowering, node: Node, op: PooledStore) -> None:
    """Lower the store of the rows of tokens that complete an entry."""
    emit_store(low, op.cache, op.x, 0, op.x.cols, 0, op.ratio)


@RULES.add(PooledCells, "x recent chosen window ratio most")
def pooled_cells(low: GpuLowering, node: Node, op: PooledCells) -> None:
    """Lower the lists of rows that queries attend to."""
    emit_cells(low, low.out(node), op.chosen, op.recent, (op.window, op.ratio, op.most))


@RULES.add(PooledAttn, "q recent pooled cells sinks n_head scale window ratio")
def pooled_attention(low: GpuLowering, node: Node, op: PooledAttn) -> None:
    """Lower attention to positions and entries."""
    check_f32(op.sinks, "sinks of attention")
    emit_listed(low, node, (op.q,), (op.recent, op.pooled), HeadSlice(op.recent, 0, op.q.width, 0), None,
                low.out(op.cells), (op.window, op.ratio, op.most), op.n_head, op.scale,
                low.weight(op.sinks))  # fmt: skip


@RULES.add(PrefixAttn, "q k v prefix cells n_head scale")
def prefix_attention(low: GpuLowering, node: Node, op: PrefixAttn) -> None:
    """Lower attention to rows before all positions and to listed positions."""
    check_f32(op.prefix, "rows before all positions")
    cache = op.k.source
    assert isinstance(cache, Cache)
    if (op.k.offset, op.k.width) != (0, cache.cols):
        raise UnsupportedError(f"{node.name}: the CUDA backend has keys that are whole rows of the cache; use -ngl 0")
    emit_listed(low, node, op.q, (cache, cache), op.v, op.prefix, low.out(op.cells), (op.cells.cols, 1, 0), op.n_head,
                op.scale, 0)  # fmt: skip
