"""Operations of compressed attention: `ratio` positions become one entry, which later queries see in their place.

An entry is complete with the last of its positions: position p is the last of entry p // ratio if (p + 1) % ratio is 0,
and sees (p + 1) // ratio entries. An entry is in the cell of its last position, so that cells can be dropped, saved and
shared like those of other caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array, Cache, HeadSlice, Node, Op, Per, RowSpec, Run, Weight
from ikcli.graph.micro_batch import Segment
from ikcli.graph.ops_rows import head_columns, softmax


def first_row(cache: Cache, s: Segment) -> int:
    """Return the row of position 0 of a segment."""
    return s.window_cell if cache.per is Per.WINDOW else s.cell


@dataclass(frozen=True, slots=True)
class Pool(Op):
    """Sum up the positions of the entry that a token completes, weighted column by column: [tokens, width].

    Cache rows are [values | logits of weights], each of one or two parts of `width` columns. With two, the first is for
    the entry after that of the position, the second for its own, so that an entry sums up twice `ratio` positions.
    Weights are the soft-max, over the positions, of logits plus `bias`, (columns, ratio). Rows of tokens that complete
    no entry are 0.
    """

    name = "pool"

    after: Node  # whose rows have been stored; it orders this op behind the store
    cache: Cache
    bias: Weight
    width: int
    ratio: int

    def __post_init__(self) -> None:
        if self.cache.cols != 2 * self.width * self.parts or self.bias.shape != (self.width * self.parts, self.ratio):
            raise ValueError("cache rows hold values and logits of one or two entries")

    @property
    def parts(self) -> int:
        """Return the entries that a position is part of."""
        return self.cache.cols // (2 * self.width)

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.after.rows, self.width

    def compute(self, run: Run) -> Array:
        out: Array = np.zeros((len(run.state.tokens), self.width), run.dtype)
        cached, bias, d, parts = run.cached(self.cache), run.weight(self.bias), self.width, self.parts
        for s in run.state.segments:
            for i, p in enumerate(range(s.pos, s.n_kv)):
                if (p + 1) % self.ratio:
                    continue
                at = np.arange(max(p + 1 - parts * self.ratio, 0), p + 1)
                rows: Array = cached[first_row(self.cache, s) + at].astype(run.dtype)
                logits = rows[:, parts * d :] + bias.reshape(self.ratio, -1)[at % self.ratio]
                own = np.where(at > p - self.ratio, (parts - 1) * d, 0)[:, None] + np.arange(d)
                weights = softmax(np.take_along_axis(logits, own, axis=1).T).T
                out[s.start + i] = (weights * np.take_along_axis(rows, own, axis=1)).sum(axis=0)
        return out


@dataclass(frozen=True, slots=True)
class PooledStore(Op):
    """Write the rows of tokens that complete an entry into a cache of entries. The node has no output."""

    name = "pooled_store"
    stores = True

    cache: Cache
    x: Node
    ratio: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, 0

    def compute(self, run: Run) -> Array:
        x, cached = run.value(self.x), run.cached(self.cache)
        for s in run.state.segments:
            for i, p in enumerate(range(s.pos, s.n_kv)):
                if (p + 1) % self.ratio == 0:
                    cached[s.cell + p] = x[s.start + i]
        return np.zeros((len(x), 0), run.dtype)


@dataclass(frozen=True, slots=True)
class PooledCells(Op):
    """List the rows that each query attends to: [rows, window + most] rows of two caches.

    First come the rows of its last `window` positions in `recent`; then entries, row r as -1 - r: those in `chosen`, a
    value of `IndexTopK` with this `ratio`, or all. Unused columns are 0.
    """

    name = "pooled_cells"
    is_table = True
    dtype = "i32"

    x: Node  # whose rows are the queries
    recent: Cache
    chosen: Node | None
    window: int
    ratio: int
    most: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.window + self.most

    def count(self, n: int) -> int:
        """Return the length of the list of a query that sees n positions."""
        return min(n, self.window) + min(n // self.ratio, self.most)

    def compute(self, run: Run) -> Array:
        out = np.zeros((len(run.state.tokens), self.window + self.most), np.int32)
        for s in run.state.segments:
            for i, n in enumerate(range(s.pos + 1, s.n_kv + 1)):
                recent = first_row(self.recent, s) + np.arange(max(n - self.window, 0), n)
                entries = np.arange(min(n // self.ratio, self.most))
                if self.chosen is not None:
                    entries = run.value(self.chosen)[s.start + i][: self.count(n) - len(recent)] - s.cell
                found = np.concatenate([recent, -1 - (s.cell + self.ratio * (entries + 1) - 1)])
                out[s.start + i, : len(found)] = found
        return out


@dataclass(frozen=True, slots=True)
class PooledAttn(Op):
    """Flash attention to the rows in `cells` of two caches, each row both key and value: [rows, n_head * width].

    All heads share a row. `sinks`: a logit per head that takes part in the soft-max and has no value.
    """

    name = "pooled_attn"

    q: HeadSlice
    recent: Cache
    pooled: Cache
    cells: Node
    sinks: Weight
    n_head: int
    scale: float
    window: int
    ratio: int

    def __post_init__(self) -> None:
        if (self.recent.cols, self.recent.type) != (self.pooled.cols, self.pooled.type):
            raise ValueError("positions and entries have rows of one kind")

    @property
    def most(self) -> int:
        """Return the most entries that a query attends to."""
        return self.cells.cols - self.window

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.q.node.rows, self.n_head * self.q.width

    def compute(self, run: Run) -> Array:
        q = head_columns(run.value(self.q.node), self.q, self.n_head)
        recent, pooled = run.cached(self.recent), run.cached(self.pooled)
        cells, sinks = run.value(self.cells), run.weight(self.sinks).reshape(-1, 1)
        out: Array = np.empty(q.shape, run.dtype)
        for s in run.state.segments:
            for i, n in enumerate(range(s.pos + 1, s.n_kv + 1)):
                n_recent = min(n, self.window)
                at = cells[s.start + i][: n_recent + min(n // self.ratio, self.most)]
                rows: Array = np.concatenate([recent[at[:n_recent]], pooled[-1 - at[n_recent:]]]).astype(run.dtype)
                scores = q[s.start + i] @ rows.T * run.dtype(self.scale)
                weights = softmax(np.concatenate([scores, sinks.astype(scores.dtype)], axis=1))[:, :-1]
                out[s.start + i] = weights @ rows
        return out.reshape(len(out), -1)
