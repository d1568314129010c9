"""Operations of hyper-connections: a residual of several streams, which layers read as a sum and write into by shares.

Rows hold the streams one after the other. Weights of a row are [before: n | after: n | mixing: n x n]: `before` sums up
the streams for the layer, `after` is each stream's share of what the layer returns, and mixing[i, j] is how much of
stream i goes on in stream j. Without `mixing` streams go on as they are. Corresponds to the manifold-constrained
hyper-connections of DeepSeek V4, and without `mixing` to the independent ones of Hy 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.activations import sigmoid
from ikcli.graph.core import Array, Node, Op, RowSpec, Run, Weight
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
