"""Mirostat 1 and 2 (arXiv:2007.14966): cut the candidates so that the surprise stays near a target."""

from __future__ import annotations

import math

import numpy as np

from ikcli.sampling.candidates import Candidates, draw
from ikcli.sampling.params import SamplerParams

_MOST_LIKELY = 100
_LARGEST_MU = 1000.0
_TINY = 1e-300


class Mirostat:
    """The state mu of one generation: the surprise (bits) that tokens may have."""

    def __init__(self, params: SamplerParams) -> None:
        self._version = params.mirostat
        self._tau = params.mirostat_tau
        self._eta = params.mirostat_eta
        self._mu = [2 * params.mirostat_tau]
        self._drawn: tuple[int, float] | None = None

    def draw(self, c: Candidates, rng: np.random.Generator) -> tuple[int, Candidates]:
        """Draw a token; return it and the candidates that were left."""
        weights = np.exp(c.logits - c.logits.max())
        probs = weights / weights.sum()
        if self._version == 1:
            kept = c.head(min(self._count(probs, len(c.logits)), len(c.logits)))
            total = float(weights.sum())
        else:
            index = np.flatnonzero(probs >= 2.0 ** -min(self._mu[-1], _LARGEST_MU))
            kept = c.take(index, descending=c.descending) if len(index) else c.head(1)
            total = float(np.exp(kept.logits - c.logits.max()).sum())
        weights = np.exp(kept.logits - c.logits.max())
        index_drawn = draw(weights, rng)
        token = kept.token(index_drawn)
        self._drawn = (token, -math.log2(max(float(weights[index_drawn]) / total, _TINY)))
        return token, kept

    def accept(self, token: int) -> None:
        """Update mu from the surprise of an accepted token if it is the drawn one."""
        mu = self._mu[-1]
        if self._drawn is not None and self._drawn[0] == token:
            mu -= self._eta * (self._drawn[1] - self._tau)
        self._drawn = None
        self._mu.append(mu)

    def rollback(self, n: int) -> None:
        """Undo `n` accepted tokens."""
        del self._mu[len(self._mu) - n :]
        self._drawn = None

    def _count(self, probs: np.ndarray, n_vocab: int) -> int:
        """Compute how many candidates Mirostat 1 keeps, from a Zipf exponent fitted to the best ones."""
        best = probs[:_MOST_LIKELY]
        best = best[best > 0]
        if len(best) < 2:
            return 1
        t = np.log(np.arange(2, len(best) + 1) / np.arange(1, len(best)))
        logs = np.log(best.astype(np.float64))  # quotients of float32 could overflow
        s_hat = float(t @ (logs[:-1] - logs[1:]) / (t @ t))
        epsilon = s_hat - 1
        if s_hat < 1e-6:
            return n_vocab
        # log k = (log(epsilon / (1 - n ** -epsilon)) + mu * log 2) / s_hat; the fraction tends to 1 / log n at 0.
        if abs(epsilon) < 1e-6:
            log_fraction = -math.log(math.log(n_vocab)) if n_vocab > 2 else 0.0
        else:
            log_fraction = math.log(epsilon / -math.expm1(-min(max(epsilon * math.log(n_vocab), -600.0), 600.0)))
        log_k = (log_fraction + self._mu[-1] * math.log(2)) / s_hat
        return max(1, int(math.exp(min(log_k, math.log(n_vocab)) + 1e-9)))
