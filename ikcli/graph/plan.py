"""Buffer reuse: values whose lifetimes do not overlap share memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64
_SPAN = 32  # steps


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
    alive: dict[int, list[int]] = {}  # buffers placed so far, by spans of steps in which they live
    total = 0
    for i in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].n_bytes, lifetimes[i].first)):
        me = lifetimes[i]
        size = _size(me)
        if not size:
            continue
        spans = range(me.first // _SPAN, me.last // _SPAN + 1)
        busy = sorted(
            (offsets[j], offsets[j] + _size(lifetimes[j]))
            for j in {j for span in spans for j in alive.get(span, ())}
            if lifetimes[j].first <= me.last and me.first <= lifetimes[j].last
        )
        at = 0
        for lo, hi in busy:
            if at + size <= lo:
                break
            at = max(at, hi)
        offsets[i] = at
        for span in spans:
            alive.setdefault(span, []).append(i)
        total = max(total, at + size)
    return offsets, total


def _size(lifetime: Lifetime) -> int:
    return -(-lifetime.n_bytes // ALIGN) * ALIGN
