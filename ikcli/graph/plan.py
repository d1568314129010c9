"""Plan memory: buffers whose lifetimes do not overlap share an arena."""

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
    """Place buffers in one arena so that those alive at the same step never overlap; return (offsets, arena bytes).

    Greedy by size, lowest free gap first: the same strategy as most inference runtimes' static planners.
    """
    offsets = [0] * len(lifetimes)
    # Placed so far, by spans of steps in which they live: first and last step, first byte and end.
    alive: dict[int, list[tuple[int, int, int, int]]] = {}
    total = 0
    for i in sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].n_bytes, lifetimes[i].first)):
        first, last = lifetimes[i].first, lifetimes[i].last
        size = -(-lifetimes[i].n_bytes // ALIGN) * ALIGN
        if not size:
            break
        spans = range(first // _SPAN, last // _SPAN + 1)
        busy = {(lo, hi) for span in spans for a, z, lo, hi in alive.get(span, ()) if a <= last and first <= z}
        at = 0
        for lo, hi in sorted(busy):
            if at + size <= lo:
                break
            at = max(at, hi)
        offsets[i] = at
        for span in spans:
            alive.setdefault(span, []).append((first, last, at, at + size))
        total = max(total, at + size)
    return offsets, total
