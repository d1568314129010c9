"""Estimate the seconds that steps and drafts take from a few measurements made while running."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_WEIGHT = 0.08  # of a new measurement, once there are many
_PACE_WEIGHT = 0.1  # ... of one of a well-known count, for what is known of the machine's pace
_KNOWN = 8  # measurements that make a count well known
_OUTLIER = 1.3  # a measurement counts as at most this many times the estimate, after a few; before: _ODD times
_ODD, _FEW = 1.6, 4
_SPREAD = 0.08  # of single measurements, relative
_DOUBT = 9.0  # factor of the variance of a count that was measured once: something else may have taken most of it
_STALE = 1e-5  # variance that a measurement gains with every later one
# How curves differ before anything is measured, in steps of one row: any level, what every row adds, what the second
# row adds (another kernel), what distinct experts add, and small deviations from row to row.
_LEVEL, _EACH, _SECOND, _EXPERTS, _STEP = 10.0, 0.12, 0.2, 0.25, 0.12
_EXPECTED_EACH = 0.08


def distinct_experts(n_experts: int, n_used: int, n_rows: int) -> float:
    """Return how many experts the rows read together, if each chooses at random, as a multiple of those of one row."""
    return n_experts * (1 - (1 - n_used / n_experts) ** n_rows) / n_used


class RowCosts:
    """Seconds of a step by its number of rows: a Gaussian process over the counts 1..most.

    A measurement of one count also tells of the others: curves are sums of a level, a slope, what distinct experts add
    (for models with `experts`: their number, and how many a row uses), and deviations. `seconds`, `low` and `high` are
    estimates and the bounds of what is likely, by count; they change with `refresh`. All are at the machine's usual
    pace: others use it, too, and what is measured minutes apart would not be comparable. `pace`: how many times as long
    everything takes at present.
    """

    def __init__(self, most: int, experts: tuple[int, int] | None = None) -> None:
        self.most = most
        self.pace = 1.0
        self.seconds: list[float] = [0.0] * (most + 1)
        self.low, self.high = list(self.seconds), list(self.seconds)
        self._mean = [0.0] * (most + 1)
        self._n, self._at = [0] * (most + 1), [0] * (most + 1)
        self._clock = 0
        rows = np.arange(1, most + 1, dtype=np.float64)
        kinds = [np.full(most, _LEVEL), _EACH * (rows - 1), _SECOND * (rows > 1)]
        if experts is not None:
            kinds.append(_EXPERTS * np.array([distinct_experts(*experts, int(k)) - 1 for k in rows]))
        basis = np.array(kinds)
        self._prior = basis.T @ basis + _STEP**2 * (np.minimum.outer(rows, rows) - 1)
        self._expected = 1 + _EXPECTED_EACH * (rows - 1)

    def observe(self, rows: int, seconds: float) -> None:
        """Add a measurement."""
        if not 0 < rows <= self.most or seconds <= 0:
            return
        n, mean = self._n[rows], self._mean[rows]
        if n >= _KNOWN:
            ratio = seconds / (mean * self.pace)
            self.pace *= min(max(ratio, 1 / _OUTLIER), _OUTLIER) ** _PACE_WEIGHT
        seconds /= self.pace
        if not n:
            self._mean[rows] = seconds
        elif n == 1:  # the first one may have included work that is done once
            self._mean[rows] = min(mean, seconds)
        else:
            most = _OUTLIER if n >= _FEW else _ODD
            self._mean[rows] += max(_WEIGHT, 1 / n) * (min(seconds, most * mean) - mean)
        self._n[rows] = n + 1
        self._clock += 1
        self._at[rows] = self._clock

    def n_measured(self, rows: int) -> int:
        """Return how often this count was measured."""
        return self._n[rows]

    def age(self, rows: int) -> int:
        """Return how many other steps were measured since this count was."""
        return self._clock - self._at[rows]

    def refresh(self) -> None:
        """Compute the estimates from the measurements."""
        known = [k for k in range(1, self.most + 1) if self._n[k]]
        if not known:
            return
        at = np.array(known) - 1
        unit = self._mean[known[0]] / self._expected[at[0]]
        found = np.array([self._mean[k] for k in known]) / unit
        noise = [
            _SPREAD**2 * (_DOUBT if self._n[k] == 1 and k > known[0] else 1.0) * max(_WEIGHT, 1 / self._n[k])
            + _STALE * self.age(k)
            for k in known
        ]
        to_known = self._prior[:, at]
        gain = np.linalg.solve(to_known[at] + np.diag(noise * found**2), to_known.T).T
        mean = self._expected + gain @ (found - self._expected[at])
        spread = np.sqrt(np.maximum((self._prior - gain @ to_known.T).diagonal(), 0))
        mean = np.maximum.accumulate(np.maximum(mean, 1e-3))
        self.seconds = [0.0, *(unit * mean).tolist()]
        self.low = [0.0, *(unit * np.maximum(mean - spread, mean[0])).tolist()]
        self.high = [0.0, *(unit * (mean + spread)).tolist()]


def between(values: Sequence[float], at: float) -> float:
    """Return the value at a place between two counts."""
    low = int(at)
    if low == at:
        return values[low]
    if low >= len(values) - 1:
        return values[-1]
    return values[low] + (at - low) * (values[low + 1] - values[low])


class MakingCosts:
    """Seconds of making a draft: what every draft takes, and what every token of it adds (least squares)."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # weights, counts, counts², seconds, counts * seconds
        self.first = self.each = 0.0

    def __bool__(self) -> bool:
        return self._sums[0] > 0

    def __call__(self, n: float) -> float:
        """Return the estimate for n tokens."""
        return self.first + self.each * n

    def observe(self, n: int, seconds: float) -> None:
        """Add a measurement of a draft of n > 0 tokens."""
        if self:
            seconds = min(seconds, _ODD * self(n))
        decay = 1 - _WEIGHT
        news = (1.0, n, n * n, seconds, n * seconds)
        self._sums = [decay * old + new for old, new in zip(self._sums, news, strict=True)]
        w, x, xx, y, xy = self._sums
        # two prior measurements, of no token and of one, keep the slope where all drafts are equally long
        usual = y / x
        w, x, xx, y, xy = w + 0.1, x + 0.05, xx + 0.05, y + 0.05 * usual, xy + 0.05 * usual
        self.each = min(max((w * xy - x * y) / (w * xx - x * x), 0.0), y / x)
        self.first = max((y - self.each * x) / w, 0.0)
