"""Sample with adaptive-p: prefer tokens whose probability is near a target that moves against the recent average.

Corresponds to llama_sample_adaptive_p (src/llama-sampling.cpp): after the other samplers, the logit of each candidate
becomes a function of the distance of its probability to the target, quadratic near it and linear far away.
"""

from __future__ import annotations

import numpy as np

from ikcli.sampling.candidates import Candidates, draw
from ikcli.sampling.params import SamplerParams

_PEAK = 5.0
_WIDTH = 0.3
_SHARPNESS = 10.0
_LARGEST_DECAY = 0.99


class Adaptive:
    """Running average of the probabilities of chosen tokens, for one generation."""

    def __init__(self, params: SamplerParams) -> None:
        self._target = min(max(params.adaptive_target, 0.0), 1.0)
        self._decay = min(max(params.adaptive_decay, 0.0), _LARGEST_DECAY)
        self._from_current = params.adaptive_updt_w_cur
        weight = 1 / (1 - self._decay)
        self._sums = [(self._target * weight, weight)]
        self._original: Candidates | None = None
        self._drawn: tuple[int, float] | None = None

    def remember(self, c: Candidates) -> Candidates:
        """Keep the distribution before the other samplers: the average is over its probabilities."""
        self._original = None if self._from_current else c
        return c

    def draw(self, c: Candidates, rng: np.random.Generator) -> tuple[int, Candidates]:
        """Draw a token; return it and the candidates with their new logits."""
        probs = c.probabilities()
        total, weight = self._sums[-1]
        target = min(max(2 * self._target - total / weight, 0.0), 1.0)
        distance = np.abs(probs - target) / _WIDTH
        logits = _PEAK - _SHARPNESS * distance * distance / (1 + distance)
        logits[c.logits == -np.inf] = -np.inf
        shaped = Candidates(c.ids, logits)
        index = draw(np.exp(logits - logits.max()), rng)
        token = c.token(index)
        self._drawn = (token, float(probs[index]) if self._original is None else _probability(self._original, token))
        return token, shaped

    def accept(self, token: int) -> None:
        """Add the probability of an accepted token to the average if it is the drawn one."""
        total, weight = self._sums[-1]
        if self._drawn is not None and self._drawn[0] == token and self._drawn[1] > 0:
            total, weight = self._decay * total + self._drawn[1], self._decay * weight + 1
        self._drawn = self._original = None
        self._sums.append((total, weight))

    def rollback(self, n: int) -> None:
        """Undo `n` accepted tokens."""
        del self._sums[len(self._sums) - n :]
        self._drawn = self._original = None


def _probability(c: Candidates, token: int) -> float:
    index = token if c.ids is None else int(np.flatnonzero(c.ids == token)[0])
    return float(c.probabilities()[index])
