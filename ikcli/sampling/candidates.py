"""Represent the candidate tokens: the whole vocabulary or a selection, with their logits.

A whole vocabulary is float32 (n_vocab,), -inf marks tokens that are out. A selection is float64 with ids and holds no
-inf. Filters take one and return one; they never change the arrays they were given.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.errors import IkError

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating]

_GROUP = 64
_BLOCK = 64


class NoTokenError(IkError):
    """No token may follow: the grammar, the biases and the bans together leave none."""


class Candidates(NamedTuple):
    """Tokens and their logits; `ids` None means that the index is the id. `descending`: the best one comes first."""

    ids: Ids | None
    logits: Floats
    descending: bool = False

    def take(self, index: npt.NDArray[np.integer] | slice, *, descending: bool) -> Candidates:
        """Return the candidates at `index` as a selection."""
        if self.ids is not None:
            return Candidates(self.ids[index], self.logits[index], descending)
        ids = np.arange(len(self.logits))[index] if isinstance(index, slice) else index
        return Candidates(ids.astype(np.int64, copy=False), self.logits[index].astype(np.float64), descending)

    def head(self, k: int) -> Candidates:
        """Return the `k` best candidates, best first; lower ids first among equals."""
        if self.descending:
            return (
                Candidates(self.ids, self.logits[:k], True)
                if self.ids is None
                else self.take(slice(k), descending=True)
            )
        return self.take(top_indices(self.logits, k), descending=True)

    def best_first(self) -> Candidates:
        """Return all candidates, best first."""
        return self if self.descending else self.head(len(self.logits))

    def token(self, index: int) -> int:
        """Return the id of the candidate at `index`."""
        return index if self.ids is None else int(self.ids[index])

    def probabilities(self) -> Floats:
        """Return the softmax of the logits (len,)."""
        top = self.logits[0] if self.descending else self.logits.max()
        p = np.exp(self.logits - top)
        return p / p.sum()


def top_indices(logits: Floats, k: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `k` largest finite logits, largest first, lower indices first among equals."""
    n = len(logits)
    groups = n // _GROUP
    bound = -np.inf
    if 0 < k * 4 <= groups:
        # The k-th largest maximum of groups is a lower bound of the k-th largest logit.
        best = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        bound = np.partition(best, groups - k)[groups - k]
    elif 0 < k * 4 <= n:
        bound = np.partition(logits, n - k)[n - k]
    found = np.flatnonzero(logits >= bound if bound > -np.inf else logits > -np.inf)
    if len(found) > 4096 and k < len(found) // 4:
        values = logits[found]
        found = found[values >= np.partition(values, len(found) - k)[len(found) - k]]
    return found[ascending(-logits[found])[:k]]


def ascending(values: Floats) -> npt.NDArray[np.integer]:
    """Return the indices that sort `values`, lower indices first among equals."""
    if values.dtype != np.float32 or len(values) < 1024:
        return np.argsort(values, kind="stable")
    # One integer per element that orders by value, then by index: NumPy sorts integers vectorized.
    bits = (values + np.float32(0)).view(np.uint32)  # -0 becomes 0
    flip = np.where(bits >> 31, np.uint32(0xFFFFFFFF), np.uint32(0x80000000))
    keys = (bits ^ flip).astype(np.uint64) << np.uint64(32) | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def draw(weights: Floats, rng: np.random.Generator) -> int:
    """Draw an index with probability proportional to `weights`."""
    start = 0
    if len(weights) > 2 * _BLOCK * _BLOCK:
        # A cumulative sum over everything is slow: find the block first.
        blocks = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
        start = _draw(blocks, rng) * _BLOCK
        weights = weights[start : start + _BLOCK]
    return start + _draw(weights, rng)


def _draw(weights: Floats, rng: np.random.Generator) -> int:
    sums = np.cumsum(weights, dtype=np.float64)
    at = int(np.searchsorted(sums, rng.random() * sums[-1], side="right"))
    # A product that rounds up to the total would fall off the end.
    return at if at < len(sums) else int(np.searchsorted(sums, sums[-1], side="left"))


def allowed_only(logits: Floats, mask: npt.NDArray[np.uint32]) -> Candidates:
    """Keep the candidates whose bit in the packed `mask` (ceil(n_vocab / 32),) is set."""
    n = len(logits)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=min(n, mask.size * 32)).view(np.bool_)
    if len(bits) < n:
        bits = np.concatenate([bits, np.zeros(n - len(bits), np.bool_)])
    if np.count_nonzero(bits) * 8 > n:
        return Candidates(None, np.where(bits, logits, np.float32(-np.inf)))
    ids = np.flatnonzero(bits)
    values = logits[ids]
    keep = values > -np.inf
    return Candidates(ids[keep], values[keep].astype(np.float64))
