"""Give the heads of an attention node a width that kernels have: zeros behind each, which change no score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ikcli.backends.cuda.activations import THREADS, parts_of, row_grid
from ikcli.backends.cuda.lower import Arg, GpuLowering, Ref
from ikcli.graph import Cache, HeadSlice, Node, Op, RowSpec
from ikcli.graph.ops_attention import Attention


@dataclass(frozen=True, slots=True)
class _Heads(Op):
    """The heads of a slice in another width."""

    name = "heads"

    part: HeadSlice
    n_head: int
    width: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.part.node.rows, self.n_head * self.width


@dataclass(frozen=True, slots=True)
class Widened:
    """Attention over wider heads: `node` and `op` take the place of those of the graph until `cut`."""

    node: Node
    op: Attention

    @classmethod
    def of(cls, low: GpuLowering, op: Attention, widths: Sequence[int]) -> Widened | None:
        """Emit copies of queries, keys and values; None where they come from caches, or are too wide."""
        parts = (*op.q, *op.k, op.v)
        width = next((w for w in widths if w >= max(p.width for p in parts)), 0)
        if not width or len(parts) != 3 or any(isinstance(p.source, Cache) for p in parts):
            return None
        zeros = low.constant(bytes(4 * width))
        q, k, v = (
            _wider(low, part, heads, width, zeros)
            for part, heads in zip(parts, (op.n_head, op.n_head_kv, op.n_head_kv), strict=True)
        )
        wide = replace(op, q=(q,), k=(k,), v=v)
        return cls(Node(wide, "widened"), wide)

    def cut(self, low: GpuLowering, node: Node) -> None:
        """Emit the copy of the columns that count into the value of `node`."""
        n_head, width = self.op.n_head, node.cols // self.op.n_head
        _copy(
            low, HeadSlice(self.node, 0, width, self.op.v.width), n_head, (low.out(self.node), 0), low.out(node), width
        )


def _wider(low: GpuLowering, part: HeadSlice, n_head: int, width: int, zeros: Ref) -> HeadSlice:
    node = Node(_Heads(part, n_head, width), "widened_heads")
    _copy(low, part, n_head, (zeros, width - part.width), low.out(node), width)
    return HeadSlice(node, 0, width, width)


def _copy(low: GpuLowering, part: HeadSlice, n_head: int, more: tuple[Ref, int], out: Ref, width: int) -> None:
    """Emit a copy of a slice's heads into heads of `width` columns; `more`: a row, and how much of it follows each."""
    source, n_more = part.node, more[1]
    sizes = (part.offset, source.cols, part.head_stride, part.width, width, n_more)
    unit = 4 if all(n % 4 == 0 for n in sizes) else 1
    rest: tuple[Arg, ...] = (more[0], 0, np.int32(0), np.int32(n_more))
    low.emit("layer_concat", row_grid(source.rows, parts_of(n_head * width, unit * THREADS)), THREADS, 0, low.state,
             *low.row_args(source.rows), low.out(source) + 4 * part.offset, source.cols, np.int32(part.head_stride),
             np.int32(part.width), *rest, out, n_head * width, np.int32(width), np.int32(n_head),
             np.int32(unit))  # fmt: skip
