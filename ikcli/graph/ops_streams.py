"""Operations of residuals that are more than one sum: hyper-connections, and attention to earlier outputs.

With hyper-connections a residual has several streams, which layers read as a sum and write into by shares.

Rows hold the streams one after the other. Weights of a row are [before: n | after: n | mixing: n x n]: `before` sums up
the streams for the layer, `after` is each stream's share of what the layer returns, and mixing[i, j] is how much of
stream i goes on in stream j. Corresponds to the manifold-constrained hyper-connections of DeepSeek V4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.activations import sigmoid
from ikcli.graph.core import Array, Node, Op, Place, RowSpec, Run, Weight
from ikcli.graph.ops_rows import softmax


@dataclass(frozen=True, slots=True)
class StreamWeights(Op):
    """Make the weights of n streams from their projection x: [rows, n * (n + 2)], or `before` alone: [rows, n].

    x times a factor per part (`scale`) plus `base` goes through a sigmoid (twice that for `after`); `mixing` through a
    soft-max, and `n_iter` times through divisions by the sums of columns and of rows, of which the first begins with
    columns and has no rows. `eps` is added to what is divided by, to `before` and to the soft-max.
    """

    name = "stream_weights"
    is_table = True

    x: Node
    scale: Weight
    base: Weight
    n: int
    n_iter: int
    eps: float

    def __post_init__(self) -> None:
        if self.x.cols not in (self.n, self.n * (self.n + 2)) or self.base.shape[0] != self.x.cols:
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
        after = 2 * sigmoid(x[:, n : 2 * n] * scale[1] + base[n : 2 * n])
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
    """The streams x mixed, plus their shares of what a layer returned: [rows, x.cols]."""

    name = "stream_mix"

    x: Node
    out: Node
    weights: Node
    n: int

    def __post_init__(self) -> None:
        if self.x.cols != self.n * self.out.cols or self.weights.cols != self.n * (self.n + 2):
            raise ValueError("a layer returns as many columns as a stream has")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        n, x, weights = self.n, run.value(self.x), run.value(self.weights)
        mixing = weights[:, 2 * n :].reshape(-1, n, n)
        mixed = np.einsum("rjk,rjd->rkd", mixing, x.reshape(len(x), n, -1))
        shares = weights[:, n : 2 * n, None] * run.value(self.out)[:, None]
        return np.asarray((mixed + shares).reshape(x.shape), run.dtype)


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
