"""Divide attention between blocks of the GPU: tiles of query rows, parts of the cached positions.

A node with too few query rows to fill the GPU is computed in parts over ranges of positions. attn_combine merges their
un-normalised sums and (maximum, denominator) pairs (kernels/attn_tiles.cuh, attn_mla.cu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ikcli.backends.cuda.lower import N_EXACT, Arg, Counts, GpuLowering, Ref
from ikcli.graph import Node, Rows
from ikcli.graph.ops_attention import Attention

PART_LEAST = 2  # blocks of a part (attn_tiles.cuh)


def _up(n: int, by: int) -> int:
    return -(-n // by)


def count_tiles(c: Counts, group: int, rows: int, of_segment: int = 1) -> int:
    """Return an upper bound of the tiles of `rows` (token, head) rows.

    A tile holds rows of one segment, or of one of 2.
    """
    segments = min(of_segment * max(c.n_segments, 1), c.n_tokens)
    return min(c.n_tokens * _up(group, rows), (c.n_tokens * group + segments * (rows - 1)) // rows)


class Shape(NamedTuple):
    """The shape of a kernel: rows of a tile, positions of a block, blocks per SM.

    Also the least blocks of a part, unless parts are fixed.
    """

    rows: int
    block: int
    per_sm: int
    least: int = PART_LEAST


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Division of cached positions into parts for one attention node.

    Parts of equal size fill the GPU once. In batch-invariant programs, up to N_EXACT tokens have parts whose size
    depends on the position of a token alone (kernels: `part_size`): as many, `most`, as fill the GPU for one token. So
    they follow the cached positions, not the capacity of the cache.
    """

    n_head: int
    n_head_kv: int
    width: int  # of a value
    n_sm: int
    n_cells: int
    seen: int  # the most positions that a query sees
    moves: bool  # ... the last ones
    most: int  # 0: never fixed
    most_rows: int  # rows of partial results that there is memory for

    @classmethod
    def of(cls, low: GpuLowering, op: Attention, shapes: Callable[[Counts], Shape]) -> SplitPlan:
        """Return the plan for a node; `shapes`: the shape of the kernel for given counts."""
        longest, most = low.max_rows[Rows.KV], low.max_rows[Rows.TOKENS]
        limits = [n for n in (op.window, op.chunk) if n]
        plan = cls(op.n_head, op.n_head_kv, op.v.width, low.device.n_sm, longest, min([*limits, longest]),
                   bool(limits), 0, 1 << 62)  # fmt: skip
        if low.batch_invariant:
            one = Counts(1, 1, longest, 1, longest)
            plan = replace(plan, most=max(1, plan._filling(one, shapes(one))))
        rows = 0
        for tokens in _token_buckets(most):
            for segments in {1, tokens}:
                c = Counts(tokens, 1, longest, segments, longest)
                n = plan.parts(c, shapes(c))
                rows = max(rows, n * tokens * op.n_head if n > 1 else 0)
        return replace(plan, most_rows=rows)

    def fixed(self, c: Counts) -> int:
        """Return the most parts whose sizes depend on positions alone, 0 for parts of equal size."""
        return self.most if c.n_tokens <= N_EXACT else 0

    def _filling(self, c: Counts, shape: Shape) -> int:
        """Return the number of parts that fills the GPU once."""
        blocks = self.n_head_kv * count_tiles(c, self.n_head // self.n_head_kv, shape.rows)
        return self.n_sm * shape.per_sm // max(blocks, 1)

    def parts(self, c: Counts, shape: Shape) -> int:
        """Return the parts for these counts.

        Fixed parts of moving windows are always the same number, plus two for their ends.
        """
        longest = min(c.longest or c.n_kv, self.n_cells)
        if fixed := self.fixed(c):
            if fixed == 1:
                return 1
            seen = self.seen if self.moves else min(longest, self.seen)
            return min(fixed, _up(_up(seen, shape.block), PART_LEAST)) + (2 if self.moves else 0)
        positions = min(longest, self.seen + shape.rows + shape.block)
        n = min(self._filling(c, shape), _up(_up(positions, shape.block), shape.least))
        return max(1, min(n, self.most_rows // max(1, c.n_tokens * self.n_head)))


def _token_buckets(most: int) -> Iterator[int]:
    """Yield the numbers of tokens that a program may be launched for."""
    n = 1
    while n < most:
        yield n
        n = n + 1 if n < N_EXACT else 2 * n
    yield most


@dataclass(frozen=True, slots=True)
class Parts:
    """The results of parts, and the arguments of attention kernels about them (`args`: out, parts, stats)."""

    plan: SplitPlan
    shapes: Callable[[Counts], Shape]
    out: Ref
    sums: Ref
    stats: Ref

    @classmethod
    def of(cls, low: GpuLowering, node: Node, op: Attention, shapes: Callable[[Counts], Shape]) -> Parts:
        plan = SplitPlan.of(low, op, shapes)
        sums, stats = low.buffer(4 * plan.most_rows * plan.width), low.buffer(8 * plan.most_rows)
        return cls(plan, shapes, low.out(node), sums, stats)

    @property
    def refs(self) -> tuple[Ref, Ref, Ref]:
        return self.out, self.sums, self.stats

    def tiles(self, c: Counts, rows: int) -> int:
        """Return the tiles of `rows` rows for these counts; tokens of a segment may have fixed parts of two sizes."""
        return count_tiles(c, self.plan.n_head // self.plan.n_head_kv, rows, 2 if self.plan.fixed(c) else 1)

    def count(self, c: Counts) -> int:
        """Return the parts for these counts."""
        return self.plan.parts(c, self.shapes(c))

    @property
    def args(self) -> tuple[Arg, Arg]:
        """Return the number of parts, and the most fixed ones."""
        return (lambda c: np.int32(self.count(c))), (lambda c: np.int32(self.plan.fixed(c) if self.count(c) > 1 else 0))

    def combine(self, low: GpuLowering, sinks: Arg = 0) -> None:
        """Merge the parts, if there are several."""
        if self.plan.most_rows:
            plan = self.plan
            emit_combine(low, self.sums, self.stats, self.out, plan.n_head, plan.width, self.count, sinks)


def emit_combine(
    low: GpuLowering,
    sums: Ref,
    stats: Ref,
    out: Ref,
    heads: int,
    width: int,
    count: Callable[[Counts], int],
    sinks: Arg = 0,
) -> None:
    """Emit the launch that merges partial results into `out`, where `count` says that there are several parts."""
    low.emit("attn_combine", lambda c: (c.n_tokens * heads, _up(width, 64), 1), 256, 0, low.state, sums, stats, out,
             np.int32(heads), lambda c: np.int32(count(c)), np.int32(width), sinks,
             when=lambda c: count(c) > 1)  # fmt: skip


def parts_of_lists(
    low: GpuLowering, heads: int, width: int, tiles: int, longest: int
) -> tuple[Callable[[int], int], Ref, Ref]:
    """Return how many parts lists have by tokens, and buffers of partial sums and of maxima and denominators."""

    def parts_of(n_tokens: int) -> int:
        """Return how many parts fill the GPU; in programs for generation those for one token, whatever is beside it."""
        return max(1, min(low.device.n_sm // (tiles * (1 if low.batch_invariant else n_tokens)), longest))

    most_rows = 0  # of partial results
    for n in range(1, low.max_rows[Rows.TOKENS] + 1):
        most_rows = max(most_rows, heads * n * parts_of(n) if parts_of(n) > 1 else 0)
    return parts_of, low.buffer(4 * most_rows * width), low.buffer(8 * most_rows)


def combine_lists(
    low: GpuLowering, node: Node, heads: int, width: int, parts_of: Callable[[int], int], sums: Ref, stats: Ref,
    sinks: Arg = 0,
) -> None:  # fmt: skip
    """Emit the sum of partial results, if there can be any."""
    if any(parts_of(n) > 1 for n in range(1, low.max_rows[Rows.TOKENS] + 1)):
        emit_combine(low, sums, stats, low.out(node), heads, width, lambda c: parts_of(c.n_tokens), sinks)
