"""Apply repeat, presence and frequency penalties over a window of earlier tokens, from counts per distinct token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.sampling.candidates import Candidates, Floats
from ikcli.sampling.params import SamplerParams

_LARGEST = float(np.finfo(np.float32).max)  # keeps penalties from making a logit infinite


class History:
    """Tokens of the prompt and the generation so far, in one growing int64 array."""

    def __init__(self) -> None:
        self._tokens = np.empty(256, np.int64)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """All tokens, oldest first (a view)."""
        return self._tokens[: self._n]

    def extend(self, tokens: npt.ArrayLike) -> None:
        """Append tokens."""
        new = np.asarray(tokens, np.int64)
        if self._n + len(new) > len(self._tokens):
            grown = np.empty(2 * (self._n + len(new)), np.int64)
            grown[: self._n] = self.tokens
            self._tokens = grown
        self._tokens[self._n : self._n + len(new)] = new
        self._n += len(new)

    def append(self, token: int) -> None:
        """Append one token."""
        if self._n == len(self._tokens):
            self.extend([token])
            return
        self._tokens[self._n] = token
        self._n += 1

    def truncate(self, n: int) -> None:
        """Forget all but the first `n` tokens."""
        self._n = min(self._n, n)


def penalizes(params: SamplerParams) -> bool:
    """Return True if any of the three penalties is active."""
    neutral = params.repeat_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0
    return params.repeat_last_n != 0 and not neutral


class Penalties:
    """Penalties for the tokens of the last `repeat_last_n` (-1: all) of a history."""

    def __init__(self, params: SamplerParams, newline: int | None, n_vocab: int) -> None:
        self._params = params
        self._spared = newline if not params.penalize_nl else None
        self._n_vocab = n_vocab
        self.rebuild(History())

    def rebuild(self, history: History) -> None:
        """Recount from `history`."""
        n = self._params.repeat_last_n
        ids, counts = np.unique(history.tokens[-n:] if n > 0 else history.tokens, return_counts=True)
        known = (ids >= 0) & (ids < self._n_vocab)
        if self._spared is not None:
            known &= ids != self._spared
        self._ids, self._counts = ids[known], counts[known].astype(np.float64)
        self._slots = {int(token): slot for slot, token in enumerate(self._ids)}
        self._used = len(self._ids)

    def appended(self, history: History) -> None:
        """Count the newest token of `history` and drop the one that leaves the window."""
        n, tokens = self._params.repeat_last_n, history.tokens
        self._count(int(tokens[-1]), 1)
        if 0 < n < len(tokens):
            self._count(int(tokens[-n - 1]), -1)

    def apply(self, c: Candidates) -> Candidates:
        """Penalize the candidates that occur in the window."""
        held = self._counts[: self._used] > 0
        ids, counts = self._ids[: self._used][held], self._counts[: self._used][held]
        if c.ids is None:
            logits = c.logits.copy()
            logits[ids] = self._penalized(logits[ids], counts)
            return Candidates(None, logits)
        where = find(ids, c.ids)
        at = np.flatnonzero(where >= 0)
        logits = c.logits.copy()
        logits[at] = self._penalized(logits[at], counts[where[at]])
        return Candidates(c.ids, logits)

    def _penalized(self, logits: Floats, counts: Floats) -> Floats:
        p = self._params
        wide = logits.astype(np.float64)
        scaled = np.where(wide > 0, wide / p.repeat_penalty, wide * p.repeat_penalty)
        penalized = scaled - (counts * p.frequency_penalty + p.presence_penalty)
        return np.where(np.isfinite(logits), np.clip(penalized, -_LARGEST, _LARGEST), logits)

    def _count(self, token: int, change: int) -> None:
        if token == self._spared or not 0 <= token < self._n_vocab:
            return
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = self._used
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(slot + 64, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(slot + 64)])
            self._ids[slot], self._used = token, slot + 1
        self._counts[slot] += change


def find(ids: npt.NDArray[np.int64], among: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the index into `ids` of each element of `among`, -1 where it is missing."""
    if not len(ids):
        return np.full(len(among), -1, np.int64)
    order = np.argsort(ids)
    at = order[np.minimum(np.searchsorted(ids, among, sorter=order), len(ids) - 1)]
    return np.where(ids[at] == among, at, -1)
