"""Operations on the KV cache: storing rows, reading them, attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array, Cache, HeadSlice, Node, Op, Per, Rows, RowSpec, Run, Weight
from ikcli.graph.micro_batch import Segment
from ikcli.graph.ops_rows import head_columns, softmax


@dataclass(frozen=True, slots=True)
class KvStore(Op):
    """Write columns [offset, offset + n_cols) of x into the cells of the micro-batch, from column `cache_offset` on.

    Transposed caches get whole columns of cells. The node has no output.
    """

    name = "kv_store"
    stores = True

    cache: Cache
    x: Node
    offset: int
    n_cols: int
    cache_offset: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, 0

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)[:, self.offset : self.offset + self.n_cols]
        run.store(self.cache, x, self.cache_offset)
        return np.zeros((len(x), 0), run.dtype)


@dataclass(frozen=True, slots=True)
class KvRows(Op):
    """Cached columns of every position of the micro-batch's sequences, as float32: [n_kv, n_cols]."""

    name = "kv_rows"

    cache: Cache
    offset: int
    n_cols: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.KV), self.n_cols

    def compute(self, run: Run) -> Array:
        return run.cached(self.cache)[run.state.kv_cells, self.offset : self.offset + self.n_cols].astype(run.dtype)


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Attention within each sequence, causal unless `both`: [rows, n_head*v.width].

    Query head h uses key/value head h // (n_head // n_head_kv). The parts of q and of k are concatenated in order and
    have equal total widths. Sources that are caches are read at the sequence's cells; sources that are nodes with
    Rows.KV are read at compact rows.

    `window`: a query at position p sees the positions > p - window (0: all). `chunk`: it sees those from p - p % chunk
    on (0: all). `sinks`: a logit per head that takes part in the soft-max and has no value. `softcap`: scaled scores
    become softcap * tanh(score / softcap) (0: off). `wide`: rows of q and of k must not be rounded with one scale,
    because their columns differ much in size or because nothing may be rounded here (`Graph.exact`).

    `both`: queries also see later positions, with a window those < p + window. Sequences are then whole and begin in
    the micro-batch, so sources that are nodes have a row per token. `slopes`: scores lose slope times distance, one
    slope per head (none: off). `ranged`: queries also see the range of positions that comes with their token
    (`MicroBatch.ranges`), an image's in a text.
    `biases`: scores gain a number by the distance from the query's position to the key's, per head one for each of -n
    to n; the outer ones serve beyond (none: off). `cross`: queries of a decoder see all positions of the encoder, whose
    rows are in caches from the `window_cell` of their segment on. `half`: rows of k and of v that are nodes need no
    more precision than a cache of float16 has.
    """

    q: tuple[HeadSlice, ...]
    k: tuple[HeadSlice, ...]
    v: HeadSlice
    n_head: int
    n_head_kv: int
    scale: float
    window: int = 0
    chunk: int = 0
    sinks: Weight | None = None
    softcap: float = 0.0
    wide: bool = False
    both: bool = False
    slopes: tuple[float, ...] = ()
    ranged: bool = False
    half: bool = False
    biases: tuple[tuple[float, ...], ...] = ()
    cross: bool = False

    def __post_init__(self) -> None:
        if self.slopes and (len(self.slopes) != self.n_head or self.window or self.chunk or self.softcap):
            raise ValueError("slopes are one per head, without windows and soft caps")
        if self.biases and (
            len(self.biases) != self.n_head or self.n_head != self.n_head_kv or self.slopes or self.window
        ):
            raise ValueError("biases are those of every head, each with keys of its own, without slopes and windows")
        if len({len(b) for b in self.biases}) > 1 or any(len(b) % 2 == 0 for b in self.biases):
            raise ValueError("biases of all heads are of one odd number of distances")
        if self.cross and (self.both or self.window or self.chunk or self.slopes or self.ranged or self.biases):
            raise ValueError("attention to an encoder is to all of its positions, without regard to distance")
        if self.cross and not all(isinstance(p.source, Cache) for p in (*self.k, self.v)):
            raise ValueError("attention to an encoder reads caches")
        if self.sinks is not None and self.sinks.shape[0] != self.n_head:
            raise ValueError(f"{self.sinks.name}: {self.sinks.shape[0]} sinks for {self.n_head} heads")
        if sum(p.width for p in self.q) != sum(p.width for p in self.k):
            raise ValueError("heads of queries and of keys differ in width")

    @property
    def group(self) -> int:
        """Return the number of query heads per key head."""
        return self.n_head // self.n_head_kv

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.q[0].node.rows, self.n_head * self.v.width

    def first_seen(self, pos: int) -> int:
        """Return the first position that a query at `pos` sees."""
        return max(pos - self.window + 1 if self.window else 0, pos - pos % self.chunk if self.chunk else 0, 0)

    def hidden(self, run: Run, s: Segment, at: Array) -> Array:
        """Return which positions `at` the tokens of a segment do not see: [n_tokens, len(at)].

        The result may have an axis of key heads before these.
        """
        if self.cross:
            return np.zeros((s.n_tokens, len(at)), np.bool_)
        first, end = self.bounds(run, s)
        if self.both:
            end = end - 1 + self.window if self.window else np.full_like(end, s.n_kv)
        return (at >= end[:, None]) | (at < first[:, None])

    def bounds(self, run: Run, s: Segment) -> tuple[Array, Array]:
        """Return the first position that each token of a segment sees, and the end of those it sees without `both`."""
        tokens = np.s_[s.start : s.start + s.n_tokens]
        pos = np.arange(s.pos, s.pos + s.n_tokens)  # in the cache; a token may be rotated by another one
        first, end = np.array([self.first_seen(int(p)) for p in pos]), pos + 1
        if not self.ranged:
            return first, end
        least, most = (x[tokens] for x in run.state.ranges())
        return np.minimum(first, least), np.maximum(end, most)

    def compute(self, run: Run) -> Array:
        out: Array = np.empty((len(run.state.tokens), self.n_head, self.v.width), run.dtype)
        kv0 = 0
        for s in run.state.segments:
            tokens = np.s_[s.start : s.start + s.n_tokens]
            pos = run.state.pos[tokens]
            first, _ = self.bounds(run, s)
            at = np.arange(s.n_encoded) if self.cross else np.arange(first.min(initial=s.n_kv), s.n_kv)
            hidden = self.hidden(run, s, at)
            q = np.concatenate([head_columns(run.value(p.node)[tokens], p, self.n_head) for p in self.q], axis=2)
            place = kv0, self.cross
            k = np.concatenate([_positions(run, p, s, place, at, self.n_head_kv) for p in self.k], axis=2)
            v = _positions(run, self.v, s, place, at, self.n_head_kv)
            for h in range(self.n_head):
                scores = (q[:, h] @ k[:, h // self.group].T) * run.dtype(self.scale)
                if self.softcap:
                    scores = run.dtype(self.softcap) * np.tanh(scores / run.dtype(self.softcap))
                if self.slopes:
                    scores = scores - run.dtype(self.slopes[h]) * np.abs(at - pos[:, None])
                if self.biases:
                    most = len(self.biases[h]) // 2
                    distance = np.clip(at - pos[:, None], -most, most)
                    scores = scores + np.asarray(self.biases[h], run.dtype)[distance + most]
                scores = np.where(hidden if hidden.ndim == 2 else hidden[h // self.group], -np.inf, scores)
                if self.sinks is not None:
                    sink = np.full((len(scores), 1), run.weight(self.sinks)[h], scores.dtype)
                    scores = np.concatenate([scores, sink], axis=1)
                out[tokens, h] = softmax(scores)[:, : len(at)] @ v[:, h // self.group]
            kv0 += s.n_kv
        return out.reshape(len(out), -1)


def _positions(run: Run, part: HeadSlice, s: Segment, place: tuple[int, bool], at: Array, n_head: int) -> Array:
    """Return keys or values of a segment's positions `at`; `place`: first row in nodes, and `cross`.

    They are its cells of a cache, or rows of a node over all segments.
    """
    kv0, cross = place
    if isinstance(part.source, Cache):
        first = s.window_cell if cross or part.source.per is Per.WINDOW else s.cell
        rows: Array = run.cached(part.source)[first + at].astype(run.dtype)
    else:
        rows = run.value(part.source)[kv0 + at]
    return head_columns(rows, part, n_head)


@dataclass(frozen=True, slots=True)
class FlashAttn(Attention):
    """Attention in one pass: scores are never stored."""

    name = "flash_attn"


@dataclass(frozen=True, slots=True)
class Attn(Attention):
    """Attention that stores K*Q, `heads_per_step` heads at a time (0 = all)."""

    name = "attn"

    heads_per_step: int = 0
