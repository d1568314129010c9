"""Operations of sparse attention: an indexer chooses the positions that a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array, Cache, HeadSlice, Node, Op, Per, RowSpec, Run, Weight
from ikcli.graph.micro_batch import Segment
from ikcli.graph.ops_attention import Attention
from ikcli.graph.ops_rows import head_columns, softmax

NONE = -1
"""Fills up the row of a query that sees fewer positions than may be chosen."""


@dataclass(frozen=True, slots=True)
class IndexTopK(Op):
    """Choose the positions with the largest index scores: [rows, top_k] cells in ascending order, then `NONE`.

    The score of a position is the sum over heads of weight * max(q . k, 0). All heads share the key, a cache row of
    `q.width` columns. A query that sees at most `top_k` positions gets all of them. Of equal scores the earlier
    position is chosen. Corresponds to the lightning indexer of DeepSeek V3.2.

    Without `weights` each is 1.

    `ratio`: keys are those of entries of so many positions (`ops_pooled.py`), which are chosen in place of positions:
    the first cell of the sequence plus the number of the entry.
    """

    name = "index_top_k"
    is_table = True
    dtype = "i32"

    q: HeadSlice
    weights: Node | None
    k: Cache
    n_head: int
    top_k: int
    ratio: int = 1

    def __post_init__(self) -> None:
        n_weights = self.n_head if self.weights is None else self.weights.cols
        if n_weights != self.n_head or self.k.cols != self.q.width or self.k.per is not Per.CELL:
            raise ValueError("an indexer has a weight per head, and keys as wide as its queries")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.q.node.rows, self.top_k

    def compute(self, run: Run) -> Array:
        out = np.full((len(run.state.tokens), self.top_k), NONE, np.int32)
        ones: Array = np.ones((len(out), self.n_head), run.dtype)
        weights = ones if self.weights is None else run.value(self.weights)
        for s in run.state.segments:
            tokens = np.s_[s.start : s.start + s.n_tokens]
            q = head_columns(run.value(self.q.node)[tokens], self.q, self.n_head)
            at = slice(s.cell + self.ratio - 1, s.cell + s.n_kv, self.ratio)
            k: Array = run.cached(self.k)[at].astype(run.dtype)
            w = weights[tokens]
            for i, seen in enumerate(range(s.pos + 1, s.n_kv + 1)):
                n = seen // self.ratio
                chosen = np.arange(n)
                if n > self.top_k:
                    scores = w[i] @ np.maximum(q[i] @ k[:n].T, 0)
                    chosen = np.sort(np.argsort(-scores, kind="stable")[: self.top_k])
                out[s.start + i, : len(chosen)] = s.cell + chosen
        return out


@dataclass(frozen=True, slots=True)
class EntryPositions(Op):
    """List the cells of the positions of chosen entries, then those that no entry has yet, then `NONE`.

    [rows, (top_k + 1) * ratio - 1]; `chosen`: a value of `IndexTopK` with this `ratio`.
    """

    name = "entry_positions"
    is_table = True
    dtype = "i32"

    chosen: Node
    ratio: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.chosen.rows, (self.chosen.cols + 1) * self.ratio - 1

    def compute(self, run: Run) -> Array:
        chosen, ratio = run.value(self.chosen), self.ratio
        out = np.full((len(chosen), self.shape[1]), NONE, np.int32)
        for s in run.state.segments:
            for i, n in enumerate(range(s.pos + 1, s.n_kv + 1)):
                entries = chosen[s.start + i]
                entries = entries[entries != NONE] - s.cell
                inside = (entries[:, None] * ratio + np.arange(ratio)).reshape(-1)
                found = np.concatenate([inside, np.arange(n - n % ratio, n)])
                out[s.start + i, : len(found)] = s.cell + found
        return out


@dataclass(frozen=True, slots=True)
class IndexTopBlocks(Op):
    """Choose the blocks of positions with the largest index scores: [rows, n_head * top_k * block] cells.

    Every head has a list of its own: the cells of its blocks in ascending order, then `NONE`. A block is `block`
    positions, counted from the first of the sequence, and its score the largest q . k in it; heads share the key. The
    query's own block, of which it sees the positions up to its own, and those before it, `local` together, are always
    chosen. Of equal scores the earlier block is chosen. Corresponds to the indexer of MiniMax-M3.
    """

    name = "index_top_blocks"
    is_table = True
    dtype = "i32"

    q: HeadSlice
    k: Cache
    n_head: int
    top_k: int
    block: int
    local: int

    def __post_init__(self) -> None:
        if self.k.cols != self.q.width or self.k.per is not Per.CELL:
            raise ValueError("an indexer has keys as wide as its queries")
        if not 1 <= self.local <= self.top_k:
            raise ValueError("a query's own block is chosen, and no more blocks than there are to choose")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.q.node.rows, self.n_head * self.top_k * self.block

    def compute(self, run: Run) -> Array:
        out = np.full((len(run.state.tokens), self.n_head, self.top_k * self.block), NONE, np.int32)
        for s in run.state.segments:
            q = head_columns(run.value(self.q.node)[s.start : s.start + s.n_tokens], self.q, self.n_head)
            k: Array = run.cached(self.k)[s.cell : s.cell + s.n_kv].astype(run.dtype)
            for i, n in enumerate(range(s.pos + 1, s.n_kv + 1)):
                starts = np.arange(0, n, self.block)
                for h in range(self.n_head):
                    scores = np.maximum.reduceat(q[i, h] @ k[:n].T, starts)
                    scores[-self.local :] = np.inf
                    best = np.sort(np.argsort(-scores, kind="stable")[: self.top_k])
                    cells = (starts[best, None] + np.arange(self.block)).ravel()
                    cells = cells[cells < n]
                    out[s.start + i, h, : len(cells)] = s.cell + cells
        return out.reshape(len(out), -1)


@dataclass(frozen=True, slots=True)
class SparseAttn(Attention):
    """Flash attention to the positions in `selected`; keys and values are cache rows.

    `selected` is a value of `IndexTopK`, of `IndexTopBlocks` for `lists` KV heads, with blocks of `block` positions, or
    (`rest`) of `EntryPositions`, with entries of so many.
    """

    name = "sparse_attn"

    selected: Node | None = None
    lists: int = 1
    block: int = 1
    rest: bool = False

    def __post_init__(self) -> None:
        super(SparseAttn, self).__post_init__()
        if self.window or self.chunk or self.both or self.slopes:
            raise ValueError("sparse attention has no windows, and does not look ahead")
        if self.lists not in (1, self.n_head_kv):
            raise ValueError("positions are chosen for all heads, or for every key head")

    def hidden(self, run: Run, s: Segment, at: Array) -> Array:
        assert self.selected is not None
        cells = run.value(self.selected)[s.start : s.start + s.n_tokens].reshape(s.n_tokens, self.lists, -1)
        seen = np.zeros((self.lists, s.n_tokens, s.n_kv), np.bool_)
        rows, lists, columns = np.nonzero(cells != NONE)
        seen[lists, rows, cells[rows, lists, columns] - s.cell] = True
        return ~(seen[0] if self.lists == 1 else seen)[..., at]


@dataclass(frozen=True, slots=True)
class PrefixAttn(Op):
    """Flash attention to rows before all positions and to those in `cells`: [rows, n_head * v.width].

    All heads share a row, of which k and v are columns. `prefix`: rows as wide as those of the cache, float32. `cells`:
    a list of rows of the cache for every query, of as many as it sees, and no more than the list has room for.
    """

    name = "prefix_attn"

    q: tuple[HeadSlice, ...]
    k: HeadSlice
    v: HeadSlice
    prefix: Weight
    cells: Node
    n_head: int
    scale: float

    def __post_init__(self) -> None:
        if not isinstance(self.k.source, Cache) or self.k.source is not self.v.source:
            raise ValueError("keys and values are rows of one cache")
        if self.prefix.ne0 != self.k.source.cols or sum(p.width for p in self.q) != self.k.width:
            raise ValueError("rows before all positions, and queries, are as wide as those of the cache")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.q[0].node.rows, self.n_head * self.v.width

    def compute(self, run: Run) -> Array:
        assert isinstance(self.k.source, Cache)
        k, v = (np.s_[:, part.offset : part.offset + part.width] for part in (self.k, self.v))
        q = np.concatenate([head_columns(run.value(p.node), p, self.n_head) for p in self.q], axis=2)
        prefix: Array = run.weight(self.prefix).reshape(-1, self.prefix.ne0).astype(run.dtype)
        cells, cached = run.value(self.cells), run.cached(self.k.source)
        out: Array = np.empty((len(run.state.tokens), self.n_head, self.v.width), run.dtype)
        for s in run.state.segments:
            for i, n in enumerate(range(s.pos + 1, s.n_kv + 1)):
                at = cells[s.start + i][: min(n, self.cells.cols)]
                rows: Array = np.concatenate([prefix, cached[at].astype(run.dtype)])
                out[s.start + i] = softmax(q[s.start + i] @ rows[k].T * run.dtype(self.scale)) @ rows[v]
        return out.reshape(len(out), -1)
