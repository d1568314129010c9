"""How long this machine takes to compute positions of a prompt, from the prompts it has computed."""

from __future__ import annotations

_FORGET = 0.98  # weight of earlier prompts after each new one
_FIRST_GUESS = 1e-3  # seconds per token before anything was measured
_LEAST = 1e-9


class Cost:
    """Estimate seconds as a·n + b·(sum of the n positions): products take a, attention takes b.

    Both come from least squares over the prompts seen, the latest ones with most weight.
    """

    def __init__(self) -> None:
        self._nn = self._np = self._pp = self._nt = self._pt = 0.0
        self._per_token, self._per_position = _FIRST_GUESS, 0.0

    def observe(self, first: int, n: int, seconds: float) -> None:
        """Learn from n positions from `first` on that were computed in this time."""
        if n <= 0 or seconds <= 0:
            return
        sums = _positions(first, n)
        weight = 1 / n  # so that a long prompt counts as a measurement of each of its tokens
        products = n * n, n * sums, sums * sums, n * seconds, sums * seconds
        known = self._nn, self._np, self._pp, self._nt, self._pt
        self._nn, self._np, self._pp, self._nt, self._pt = (
            _FORGET * old + weight * new for old, new in zip(known, products, strict=True)
        )
        determinant = self._nn * self._pp - self._np * self._np
        a, b = self._nt / self._nn, 0.0
        if determinant > 1e-6 * self._nn * self._pp:
            both = (
                (self._nt * self._pp - self._pt * self._np) / determinant,
                (self._pt * self._nn - self._nt * self._np) / determinant,
            )
            a, b = both if min(both) >= 0 else (a, b)
        self._per_token, self._per_position = max(a, _LEAST), b

    def seconds(self, first: int, n: int) -> float:
        """Return the estimated time to compute n positions from `first` on."""
        return self._per_token * n + self._per_position * _positions(first, n)


def _positions(first: int, n: int) -> float:
    """Return the sum of the positions first..first+n-1."""
    return n * (first + (n - 1) / 2)
