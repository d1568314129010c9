"""Operations of residuals that are more than one sum; rows hold the streams one after the other.

Hyper-connections (DeepSeek V4): layers read a sum of the streams and write into them by shares. Weights of a row are
[before: n | after: n | mixing: n x n]: `before` sums up the streams for the layer, `after` is each stream's share of
what the layer returns, and mixing[i, j] is how much of stream i goes on in stream j; without `mixing` (Hy 4) streams go
on as they are. Those of Qwen4-Exp have a weight for every column of every stream before a layer (`GatedStreams`), a
share per stream after it, and no mixing (`StreamAdd`); streams choose how much they take of a value that is the same
for all (`StreamMatch`).

AltUp (Gemma 3n): layers read the first stream as it is predicted from all, and what they return corrects all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ikcli.graph.activations import sigmoid
from ikcli.graph.core import Array, Node, Op, Place, RowSpec, Run, SameSize, Weight
from ikcli.graph.ops_rows import softmax


@dataclass(frozen=True, slots=True)
class StreamWeights(Op):
    """Make the weights of n streams from their projection x: [rows, n * (n + 2)], without `mixing` [rows, 2 * n].

    [rows, n] is `before` alone. x times a factor per part (`scale`) plus `base` goes through a sigmoid (`most` times
    that for `after`); `mixing` through a soft-max, and `n_iter` times through divisions by the sums of columns and of
    rows, of which the first begins with columns and has no rows. `eps` is added to what is divided by, to `before` and
    to the soft-max; without `mixing` also to `after`.
    """

    name = "stream_weights"
    is_table = True

    x: Node
    scale: Weight
    base: Weight
    n: int
    n_iter: int
    eps: float
    most: float = 2.0

    def __post_init__(self) -> None:
        if self.x.cols not in (self.n, 2 * self.n, self.n * (self.n + 2)) or self.base.shape[0] != self.x.cols:
            raise ValueError("streams have a weight before and after a layer and one for every pair of them")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        n, x, eps = self.n, run.value(self.x), run.dtype(self.eps)
        base, scale = run.weight(self.base).reshape(-1), run.weight(self.scale).reshape(-1)
        before = sigmoid(x[:, :n] * scale[0] + base[:n]) + eps
        if x.shape[1] == n:
            return np.asarray(before, run.dtype)
        after = self.most * sigmoid(x[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        if x.shape[1] == 2 * n:
            return np.concatenate([before, after + eps], axis=1).astype(run.dtype)
        mixing = softmax((x[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)) + eps
        mixing = mixing / (mixing.sum(axis=1, keepdims=True) + eps)
        for _ in range(self.n_iter - 1):
            mixing = mixing / (mixing.sum(axis=2, keepdims=True) + eps)
            mixing = mixing / (mixing.sum(axis=1, keepdims=True) + eps)
        return np.concatenate([before, after, mixing.reshape(len(x), -1)], axis=1).astype(run.dtype)


@dataclass(frozen=True, slots=True)
class StreamSum(Op):
    """The sum of the streams x, each times its weight before a layer: [rows, x.cols / n]."""

    name = "stream_sum"

    x: Node
    weights: Node
    n: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols // self.n

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        return np.einsum("rs,rsd->rd", run.value(self.weights)[:, : self.n], x.reshape(len(x), self.n, -1))


@dataclass(frozen=True, slots=True)
class StreamMix(Op):
    """The streams x mixed (if there are weights for it), plus their shares of what a layer returned: [rows, x.cols]."""

    name = "stream_mix"

    x: Node
    out: Node
    weights: Node
    n: int

    def __post_init__(self) -> None:
        if self.x.cols != self.n * self.out.cols or self.weights.cols not in (2 * self.n, self.n * (self.n + 2)):
            raise ValueError("a layer returns as many columns as a stream has")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        n, x, weights = self.n, run.value(self.x), run.value(self.weights)
        mixed = x.reshape(len(x), n, -1)
        if weights.shape[1] > 2 * n:
            mixed = np.einsum("rjk,rjd->rkd", weights[:, 2 * n :].reshape(-1, n, n), mixed)
        shares = weights[:, n : 2 * n, None] * run.value(self.out)[:, None]
        return np.asarray((mixed + shares).reshape(x.shape), run.dtype)


@dataclass(frozen=True, slots=True)
class GatedStreams(Op):
    """The mean of the streams x, each column times the sigmoid of its own gate: [rows, x.cols / n]."""

    name = "gated_streams"

    x: Node
    gate: Node
    n: int

    def __post_init__(self) -> None:
        if self.x.cols != self.gate.cols or self.x.cols % self.n:
            raise ValueError("every column of a stream has a gate")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols // self.n

    def compute(self, run: Run) -> Array:
        gated = run.value(self.x) * sigmoid(run.value(self.gate))
        return np.asarray(gated.reshape(len(gated), self.n, -1).mean(axis=1), run.dtype)


@dataclass(frozen=True, slots=True)
class StreamPredict(SameSize):
    """The streams x, each plus a sum of all: column n * j + i of `weights` is how much of stream i stream j gets."""

    name = "stream_predict"

    x: Node
    weights: Node
    n: int

    def __post_init__(self) -> None:
        if self.x.cols % self.n or self.weights.cols != self.n * self.n:
            raise ValueError("streams have a weight for every pair of them")

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        weights, streams = run.value(self.weights).reshape(-1, self.n, self.n), x.reshape(len(x), self.n, -1)
        return np.asarray((streams + np.einsum("rji,rid->rjd", weights, streams)).reshape(x.shape), run.dtype)


@dataclass(frozen=True, slots=True)
class StreamAdd(SameSize):
    """The streams x, from stream `first` on each plus its share of `out`.

    A share is 1; with weights, 1 + weight, or 2 sigmoid(scale * weight) if there is a `scale`.
    """

    name = "stream_add"

    x: Node
    out: Node
    n: int
    weights: Node | None = None
    first: int = 0
    scale: float = 0.0

    def __post_init__(self) -> None:
        if self.x.cols != self.n * self.out.cols or (self.weights is not None and self.weights.cols != self.n):
            raise ValueError("what is added has as many columns as a stream, and streams have a weight each")

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        shares: Array = np.ones((len(x), self.n), run.dtype)
        if self.weights is not None:
            weights = run.value(self.weights)
            shares = 2 * sigmoid(weights * run.dtype(self.scale)) if self.scale else shares + weights
        shares[:, : self.first] = 0
        added = shares[:, :, None] * run.value(self.out)[:, None]
        return np.asarray((x.reshape(len(x), self.n, -1) + added).reshape(x.shape), run.dtype)


@dataclass(frozen=True, slots=True)
class StreamMatch(Op):
    """A value for every stream, times the sigmoid of how well its key fits its query: [rows, n * value.cols].

    The fit is k . q / sqrt(columns), of which the square root is taken (of 1e-6 at least) with the sign kept.
    """

    name = "stream_match"

    key: Node
    query: Node
    value: Node
    n: int

    def __post_init__(self) -> None:
        if not self.key.cols == self.query.cols == self.n * self.value.cols:
            raise ValueError("keys and queries have as many columns per stream as the value")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.key.rows, self.key.cols

    def compute(self, run: Run) -> Array:
        key, value = run.value(self.key), run.value(self.value)
        products = (key * run.value(self.query)).reshape(len(key), self.n, -1)
        fit = products.sum(axis=2, dtype=np.float64) / math.sqrt(value.shape[1])
        gate = sigmoid(np.sign(fit) * np.sqrt(np.maximum(np.abs(fit), 1e-6)))
        return np.asarray((gate[:, :, None] * value[:, None]).reshape(key.shape), run.dtype)


@dataclass(frozen=True, slots=True)
class StreamLevel(SameSize):
    """The streams x, each but the first scaled to the mean square of the first; its own counts as `least` or more."""

    name = "stream_level"

    x: Node
    n: int
    least: float

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        streams = x.reshape(len(x), self.n, -1)
        squares = np.mean(np.square(streams, dtype=np.float64), axis=2)
        scales = np.sqrt(squares[:, :1] / np.maximum(squares, self.least))
        scales[:, 0] = 1
        return np.asarray((streams * scales[:, :, None]).reshape(x.shape), run.dtype)


@dataclass(frozen=True, slots=True)
class ResidualAttn(Op):
    """Rows kept, one after the other, and x, averaged with weights that are a soft-max of their scores: [rows, x.cols].

    The score of a row is its product with w, divided by the row's root mean square. Corresponds to the attention
    residuals of Kimi K3.
    """

    name = "residual_attn"
    place = Place.WEIGHT

    kept: Node
    x: Node
    w: Weight
    eps: float

    def __post_init__(self) -> None:
        if self.kept.cols % self.x.cols or self.w.ne0 != self.x.cols:
            raise ValueError("all rows that are mixed have as many columns, and so have their weights")

    @property
    def n_kept(self) -> int:
        """Return the number of rows before x."""
        return self.kept.cols // self.x.cols

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        rows = np.concatenate([run.value(self.kept), x], axis=1).reshape(len(x), self.n_kept + 1, -1)
        size: Array = np.sqrt(np.mean(rows * rows, axis=-1, dtype=np.float64) + self.eps).astype(run.dtype)
        scores = rows @ run.weight(self.w).reshape(-1) / size
        return np.einsum("rs,rsd->rd", softmax(scores), rows)
