"""Seconds as a function of a small count (rows of a micro-batch, tokens of a draft), measured while running."""

from __future__ import annotations

_WEIGHT = 0.1  # of a new measurement
_FIRST = 0.5  # ... while there are few: the first one may include work that is done once
_BEYOND = 0.4  # of the last slope is assumed beyond what was measured: curves flatten, and trying shows it
_OUTLIER = 4.0  # a measurement counts as at most this many times the estimate


class Curve:
    """Exponentially weighted estimates for the counts 1..most; the others are interpolated from their neighbours.

    `slope`: what one more is assumed to add, as a share of the seconds for one, before a second count was measured.
    """

    def __init__(self, most: int, slope: float) -> None:
        self.most, self._slope = most, slope
        self._seconds: list[float] = [0.0] * (most + 1)
        self._n = [0] * (most + 1)
        self._known: list[int] = []

    def observe(self, count: int, seconds: float) -> None:
        """Add a measurement."""
        if not 0 < count <= self.most or seconds <= 0:
            return
        n, old = self._n[count], self._seconds[count]
        if n:
            weight = max(_WEIGHT, _FIRST / n)
            self._seconds[count] = old + weight * (min(seconds, _OUTLIER * old) - old)
        else:
            self._seconds[count] = seconds
            self._known = sorted({*self._known, count})
        self._n[count] = n + 1

    def measured(self, count: int) -> bool:
        """Return whether this count was measured."""
        return self._n[count] > 0

    def __bool__(self) -> bool:
        return bool(self._known)

    def __call__(self, count: int) -> float:
        """Return the estimated seconds for a count; 0 for none, or if nothing was measured."""
        known, seconds = self._known, self._seconds
        if count <= 0 or not known:
            return 0.0
        if self._n[count]:
            return seconds[count]
        low = max((k for k in known if k < count), default=0)
        high = min((k for k in known if k > count), default=0)
        if low and high:
            return seconds[low] + (seconds[high] - seconds[low]) * (count - low) / (high - low)
        if high:  # below everything: one costs at least what the slope says of the smallest
            return seconds[high] * (1 + self._slope * (count - 1)) / (1 + self._slope * (high - 1))
        before = max((k for k in known if k < low), default=0)
        least = self._slope * seconds[low] / (1 + self._slope * (low - 1))
        each = max(_BEYOND * (seconds[low] - seconds[before]) / (low - before), least) if before else least
        return seconds[low] + each * (count - low)
