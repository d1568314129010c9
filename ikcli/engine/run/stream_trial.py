"""Decide by the times of micro-batches from how many tokens on experts in RAM are copied to a GPU.

Copies take the bus as long for few tokens as for many, while the CPU takes longer with each token. Where they meet
depends on the bus, the CPU, and what else the machine does, so both ways are timed as they occur. A micro-batch takes
at least as long as one of fewer tokens, and at most so many times as long as it has more tokens. So each time bounds
those of all other numbers of tokens. Where bounds do not overlap, the faster way is taken. Elsewhere the rule of
`--offload-min-batch` holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

FEWEST = 32  # tokens that experts may be copied for
LAST = 5  # times of about the same number of tokens, of which the shortest counts
LEAST = 2  # before that, times are not used: pages may still be read from disk
MARGIN = 1.05
AGAIN = 64  # choices against the rule, after which the other way is timed again


class _Times:
    """The times of one way."""

    def __init__(self) -> None:
        self._last: dict[int, deque[tuple[float, int]]] = {}  # by the bits of n: (seconds, n)

    def add(self, n: int, seconds: float) -> None:
        self._last.setdefault(n.bit_length(), deque(maxlen=LAST)).append((seconds, n))

    def bounds(self, n: int) -> tuple[float, float] | None:
        """Return the least and the most seconds for n tokens; None if nothing is known."""
        best = [min(times, key=lambda x: x[0] / x[1]) for times in self._last.values() if len(times) >= LEAST]
        if not best:
            return None
        low = max(t * min(n / m, 1.0) for t, m in best)
        return low, max(min(t * max(n / m, 1.0) for t, m in best), low)


class StreamTrial:
    """Times of micro-batches with experts copied and on the CPU; `least` is the number of tokens of the rule."""

    def __init__(self, least: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.least, self._clock = least, clock
        self._times = {True: _Times(), False: _Times()}
        self._start, self._n_tokens, self._copied = 0.0, 0, False
        self._against = 0
        self.news: list[str] = []  # log lines about choices against the rule, once for each way
        self._told: set[bool] = set()

    def begin(self, n_tokens: int) -> bool:
        """Return whether the experts of the micro-batch that begins are copied."""
        self._copied = self._choose(n_tokens)
        self._start, self._n_tokens = self._clock(), n_tokens
        return self._copied

    def end(self) -> None:
        """Learn the time of the micro-batch."""
        if self._n_tokens >= FEWEST:
            self._times[self._copied].add(self._n_tokens, self._clock() - self._start)

    def _choose(self, n: int) -> bool:
        rule = n >= self.least
        if n < FEWEST:
            return rule
        found = {copied: self._times[copied].bounds(n) for copied in (True, False)}
        with_, without = found[True], found[False]
        if with_ is None or without is None:
            return rule
        other = without if rule else with_
        own = with_ if rule else without
        if other[1] * MARGIN >= own[0]:
            return rule
        self._against += 1
        if self._against % AGAIN == 0:
            return rule
        if rule not in self._told:
            self._told.add(rule)
            ways = "on the CPU", "copied to the GPU"
            self.news.append(
                f"offload: {n} tokens are computed with experts {ways[not rule]}, at most {1e3 * other[1]:.0f} ms; "
                f"{ways[rule]} they take at least {1e3 * own[0]:.0f} ms (measured)"
            )
        return not rule
