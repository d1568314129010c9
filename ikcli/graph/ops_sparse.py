"""Operations of sparse attention: an indexer chooses the positions that a query attends to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array, Cache, HeadSlice, Node, Op, Per, RowSpec, Run
from ikcli.graph.micro_batch import Segment
from ikcli.graph.ops_attention import Attention
from ikcli.graph.ops_rows import head_columns

NONE = -1
"""Fills up the row of a query that sees fewer positions than may be chosen."""


@dataclass(frozen=True, slots=True)
class IndexTopK(Op):
    """Choose the positions with the largest index scores: [rows, top_k] cells in ascending order, then `NONE`.

    The score of a position is the sum over heads of weight * max(q . k, 0). All heads share the key, a cache row of
    `q.width` columns. A query that sees at most `top_k` positions gets all of them. Of equal scores the earlier
    position is chosen. Corresponds to the lightning indexer of DeepSeek V3.2.
    """

    name = "index_top_k"
    is_table = True
    dtype = "i32"

    q: HeadSlice
    weights: Node
    k: Cache
    n_head: int
    top_k: int

    def __post_init__(self) -> None:
        if self.weights.cols != self.n_head or self.k.cols != self.q.width or self.k.per is not Per.CELL:
            raise ValueError("an indexer has a weight per head, and keys as wide as its queries")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.weights.rows, self.top_k

    def compute(self, run: Run) -> Array:
        out = np.full((len(run.state.tokens), self.top_k), NONE, np.int32)
        for s in run.state.segments:
            tokens = np.s_[s.start : s.start + s.n_tokens]
            q = head_columns(run.value(self.q.node)[tokens], self.q, self.n_head)
            k: Array = run.cached(self.k)[s.cell : s.cell + s.n_kv].astype(run.dtype)
            w = run.value(self.weights)[tokens]
            for i, n in enumerate(range(s.pos + 1, s.n_kv + 1)):
                chosen = np.arange(n)
                if n > self.top_k:
                    scores = w[i] @ np.maximum(q[i] @ k[:n].T, 0)
                    chosen = np.sort(np.argsort(-scores, kind="stable")[: self.top_k])
                out[s.start + i, : len(chosen)] = s.cell + chosen
        return out


@dataclass(frozen=True, slots=True)
class SparseAttn(Attention):
    """Flash attention to the positions in `selected`, a value of `IndexTopK`; keys and values are cache rows."""

    name = "sparse_attn"

    selected: Node | None = None

    def __post_init__(self) -> None:
        super(SparseAttn, self).__post_init__()
        if self.window or self.chunk or self.both or self.slopes:
            raise ValueError("sparse attention has no windows, and does not look ahead")

    def hidden(self, run: Run, s: Segment, at: Array) -> Array:
        assert self.selected is not None
        cells = run.value(self.selected)[s.start : s.start + s.n_tokens]
        seen = np.zeros((s.n_tokens, s.n_kv), np.bool_)
        rows, columns = np.nonzero(cells != NONE)
        seen[rows, cells[rows, columns] - s.cell] = True
        return ~seen[:, at]
