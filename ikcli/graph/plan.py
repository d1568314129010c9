"""Buffer reuse: values whose lifetimes do not overlap share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of n_bytes, written first by step `first` and read last by step `last` (inclusive)."""

    n_bytes: int
    first: int
    last: int


def assign_offsets(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Offsets into one arena such that buffers alive at the same step never overlap; returns (offsets, arena bytes).

    Greedy by size, lowest free gap first: the same strategy as most inference runtimes' static planners.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].n_bytes, lifetimes[i].first)):
        me = lifetimes[i]
        size = -(-me.n_bytes // ALIGN) * ALIGN
        busy = sorted(
            (offsets[j], offsets[j] + -(-lifetimes[j].n_bytes // ALIGN) * ALIGN)
            for j in placed
            if lifetimes[j].first <= me.last and me.first <= lifetimes[j].last
        )
        at = 0
        for lo, hi in busy:
            if at + size <= lo:
                break
            at = max(at, hi)
        offsets[i] = at
        placed.append(i)
        total = max(total, at + size)
    return offsets, total
