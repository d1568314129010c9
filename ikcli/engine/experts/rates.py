"""How often experts are used: which of them to keep in RAM.

The value of an expert is the sum of two averages of its uses per token, one over the last few tokens and one over the
last thousand (or those so far). The first keeps what a text is about at the moment, where tokens repeat the choices of
their neighbours; the second keeps what is used often everywhere. Replays of traces (`benchmarks/expert_cache.py`) show
that the sum is about as good as the better of both: as LRU where choices last, and nearly as a static choice where
experts are unequal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SHORT, LONG = 2.0, 1024.0  # tokens after which half of a use is forgotten
WEIGHT = 3.0  # of the long average: it is small where most experts are used alike

LIKELY = 0.5  # uses that are expected: those of a Poisson distribution are then more than none in 40 of 100 cases

F64 = npt.NDArray[np.float64]


class UseRates:
    """The rates of one layer's experts, in uses per token."""

    def __init__(self, value: F64) -> None:
        """Begin with no uses; `value` is where the values of the experts are kept."""
        self.value = value
        self._short, self._long = np.zeros(len(value)), np.zeros(len(value))
        self._left = 1.0  # weight in the long average of the time before the first token

    def add(self, experts: npt.NDArray[np.int64], uses: npt.NDArray[np.int64], n_tokens: int) -> None:
        """Add a step of n tokens, of which uses[i] used experts[i]."""
        share = uses / n_tokens
        for rates, half_life in ((self._short, SHORT), (self._long, LONG)):
            kept = 2 ** (-n_tokens / half_life)
            rates *= kept
            rates[experts] += (1 - kept) * share
        self._left *= 2 ** (-n_tokens / LONG)
        self.value[:] = self._short + WEIGHT / (1 - self._left) * self._long  # of the tokens so far, if they are few

    def likely(self, n_tokens: int) -> npt.NDArray[np.int64]:
        """Return the experts that n tokens probably use, the likeliest first: all before the first token."""
        order = np.argsort(-self.value, kind="stable")
        if self._left == 1:
            return order
        uses = n_tokens / (1 - self._left) * self._long
        return order[uses[order] >= LIKELY]
