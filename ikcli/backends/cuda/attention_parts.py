"""How attention is divided between blocks of the GPU: tiles of query rows, parts of the cached positions.

A node that is too small to fill the GPU with its query rows is computed in parts over ranges of positions, whose
un-normalised sums and (maximum, denominator) pairs attn_combine merges (kernels/attn_tiles.cuh, attn_mla.cu).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ikcli.backends.cuda.lower import N_EXACT, Arg, Counts, Lowering, Ref
from ikcli.graph import Node, Rows
from ikcli.graph.ops_attention import Attention

PART_COUNT, PART_SIZE = 16, 128  # attn_tiles.cuh: fixed parts


def _up(n: int, by: int) -> int:
    return -(-n // by)


def part_start(part: int, steps: int) -> int:
    """First position of a fixed part: 16 parts of 128 positions, 16 of 256, ..., up to 128 << (steps - 1)."""
    level = min(part // PART_COUNT, steps - 1)
    return PART_SIZE * (PART_COUNT * ((1 << level) - 1) + ((part - level * PART_COUNT) << level))


def fixed_parts(n_kv: int, steps: int) -> int:
    """Parts that hold n_kv positions."""
    low, high = 1, _up(n_kv, PART_SIZE) + 1
    while low < high:
        mid = (low + high) // 2
        low, high = (low, mid) if part_start(mid, steps) >= n_kv else (mid + 1, high)
    return low


def count_tiles(c: Counts, group: int, rows: int) -> int:
    """Upper bound of the tiles of `rows` (token, head) rows; a tile holds rows of one segment."""
    segments = min(max(c.n_segments, 1), c.n_tokens)
    return min(c.n_tokens * _up(group, rows), (c.n_tokens * group + segments * (rows - 1)) // rows)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Division of cached positions into parts for one attention node.

    Parts of equal size fill the GPU once. In programs whose rows must not depend on each other, up to N_EXACT tokens
    have parts with fixed bounds instead, `steps` sizes of them; the longer the cache can be, the larger the last size.
    """

    n_head: int
    n_head_kv: int
    width: int  # of a value
    n_sm: int
    n_cells: int
    steps: int  # 0: never fixed
    most_rows: int  # rows of partial results that there is memory for

    @classmethod
    def of(cls, low: Lowering, op: Attention, shapes: Callable[[Counts], tuple[int, int, int]]) -> SplitPlan:
        """`shapes`: (rows of a tile, positions of a block, blocks an SM can hold) of the kernel for these counts."""
        n_head, n_head_kv, n_sm = op.n_head, op.n_head_kv, low.device.n_sm
        longest, most = low.max_rows[Rows.KV], low.max_rows[Rows.TOKENS]
        steps = 0
        if low.independent:
            tiles = n_head_kv * count_tiles(Counts(1, 1, longest, 1, longest), n_head // n_head_kv, 32)
            steps = next((s for s in range(1, 12) if fixed_parts(longest, s) * tiles <= 4 * n_sm), 12)
        plan = cls(n_head, n_head_kv, op.v.width, n_sm, longest, steps, 1 << 62)
        rows = 0
        for tokens in _token_buckets(most):
            for segments in {1, tokens}:
                c = Counts(tokens, 1, longest, segments, longest)
                n = plan.parts(c, *shapes(c))
                rows = max(rows, n * tokens * n_head if n > 1 else 0)
        return replace(plan, most_rows=rows)

    def fixed(self, c: Counts) -> bool:
        """Whether parts have fixed bounds."""
        return self.steps > 0 and c.n_tokens <= N_EXACT

    def parts(self, c: Counts, rows: int, block: int, per_sm: int) -> int:
        """Parts for these counts."""
        longest = min(c.longest or c.n_kv, self.n_cells)
        if self.fixed(c):
            n = fixed_parts(longest, self.steps)
        else:
            blocks = self.n_head_kv * count_tiles(c, self.n_head // self.n_head_kv, rows)
            n = min(self.n_sm * per_sm // max(blocks, 1), _up(_up(longest, block), 4))
        return max(1, min(n, self.most_rows // max(1, c.n_tokens * self.n_head)))


def _token_buckets(most: int) -> Iterator[int]:
    """Numbers of tokens that a program may be launched for."""
    n = 1
    while n < most:
        yield n
        n = n + 1 if n < N_EXACT else 2 * n
    yield most


@dataclass(frozen=True, slots=True)
class Parts:
    """The results of parts, and what attention kernels are told about them (`args`: out, parts, stats)."""

    plan: SplitPlan
    shapes: Callable[[Counts], tuple[int, int, int]]
    out: Ref
    sums: Ref
    stats: Ref

    @classmethod
    def of(cls, low: Lowering, node: Node, op: Attention, shapes: Callable[[Counts], tuple[int, int, int]]) -> Parts:
        plan = SplitPlan.of(low, op, shapes)
        sums, stats = low.buffer(4 * plan.most_rows * plan.width), low.buffer(8 * plan.most_rows)
        return cls(plan, shapes, low.out(node), sums, stats)

    @property
    def refs(self) -> tuple[Ref, Ref, Ref]:
        return self.out, self.sums, self.stats

    def count(self, c: Counts) -> int:
        """Parts for these counts."""
        return self.plan.parts(c, *self.shapes(c))

    @property
    def args(self) -> tuple[Arg, Arg]:
        """Number of parts, sizes of fixed ones."""
        return (lambda c: np.int32(self.count(c))), (lambda c: np.int32(self.plan.steps if self.plan.fixed(c) else 0))

    def combine(self, low: Lowering) -> None:
        """Merge the parts, if there are several."""
        if self.plan.most_rows:
            heads, width = self.plan.n_head, self.plan.width
            low.emit("attn_combine", lambda c: (c.n_tokens * heads, _up(width, 128), 1), 256, 0, low.state, self.sums,
                     self.stats, self.out, np.int32(heads), self.args[0], np.int32(width),
                     when=lambda c: self.count(c) > 1)  # fmt: skip
