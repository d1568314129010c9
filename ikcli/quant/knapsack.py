"""Choose one option per item so that the sum of damages is small and the bytes fit a budget.

Starting from the smallest options, the solver takes the upgrade that removes the most damage per byte until nothing
fits. Steps run along the lower convex hull of each item's (bytes, damage) points, which solves the relaxed problem
exactly and so gives a lower bound. The rest of the budget goes to single steps, and in small problems to exchanges of
two options.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ikcli.gguf.constants import GGMLType

_MOST_EXCHANGED = 1000  # options of all items together; above that single steps are fine enough


@dataclass(frozen=True, slots=True)
class TypeOption:
    """One type for an item: its bytes and its damage."""

    type: GGMLType
    n_bytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class Solution:
    """One option per item, in order; no choice within the budget has less total damage than `bound`."""

    picked: tuple[TypeOption, ...]
    bound: float

    @property
    def damage(self) -> float:
        return sum(o.damage for o in self.picked)

    @property
    def n_bytes(self) -> int:
        return sum(o.n_bytes for o in self.picked)


def hull(options: Sequence[TypeOption]) -> list[TypeOption]:
    """Return the lower convex hull of (bytes, damage), smallest first.

    Every step removes less damage per byte than the one before.
    """
    out: list[TypeOption] = []
    for o in sorted(options, key=lambda o: (o.n_bytes, o.damage)):
        if out and o.damage >= out[-1].damage:
            continue
        while len(out) > 1 and _slope(out[-2], out[-1]) <= _slope(out[-2], o):
            out.pop()
        if out and out[-1].n_bytes == o.n_bytes:
            continue
        out.append(o)
    return out


def _slope(a: TypeOption, b: TypeOption) -> float:
    """Return the damage removed per byte added."""
    return (a.damage - b.damage) / (b.n_bytes - a.n_bytes) if b.n_bytes > a.n_bytes else math.inf


def solve(curves: Sequence[Sequence[TypeOption]], budget: int) -> Solution:
    """Choose one option per curve with little total damage; the smallest options must fit `budget` bytes."""
    hulls = [hull(curve) for curve in curves]
    at = [0] * len(hulls)
    left = budget - sum(h[0].n_bytes for h in hulls)
    damage = sum(h[0].damage for h in hulls)
    bound = math.inf
    queue = [(-_slope(h[0], h[1]), i) for i, h in enumerate(hulls) if len(h) > 1]
    heapq.heapify(queue)
    while queue:
        slope, i = heapq.heappop(queue)
        h, k = hulls[i], at[i]
        cost = h[k + 1].n_bytes - h[k].n_bytes
        if cost > left:  # the rest of this curve is out of reach; others may still fit
            bound = damage + slope * left if math.isinf(bound) else bound
            continue
        at[i], left, damage = k + 1, left - cost, damage + h[k + 1].damage - h[k].damage
        if k + 2 < len(h):
            heapq.heappush(queue, (-_slope(h[k + 1], h[k + 2]), i))
    picked = [h[k] for h, k in zip(hulls, at, strict=True)]
    picked = _spend(picked, curves, left)
    if sum(len(c) for c in curves) <= _MOST_EXCHANGED:
        _exchange(picked, curves, budget)
    return Solution(tuple(picked), min(bound, damage))


def _exchange(picked: list[TypeOption], curves: Sequence[Sequence[TypeOption]], budget: int) -> None:
    """Change two items at once while that helps; for small problems, where steps are coarse."""
    moves = [(i, o) for i, curve in enumerate(curves) for o in curve]
    item = np.array([i for i, _ in moves])
    for _ in range(len(moves)):
        left = budget - sum(o.n_bytes for o in picked)
        n_bytes = np.array([o.n_bytes - picked[i].n_bytes for i, o in moves])
        damage = np.array([o.damage - picked[i].damage for i, o in moves])
        allowed = (n_bytes[:, None] + n_bytes <= left) & (item[:, None] != item)
        total = np.where(allowed, damage[:, None] + damage, 0.0)
        a, b = np.unravel_index(int(total.argmin()), total.shape) if total.size else (0, 0)
        if not total.size or total[a, b] >= -1e-12:
            return
        for k in (a, b):
            picked[moves[k][0]] = moves[k][1]


def _spend(picked: list[TypeOption], curves: Sequence[Sequence[TypeOption]], left: int) -> list[TypeOption]:
    """Spend the remaining bytes on single upgrades, the most useful first."""
    while True:
        best, gain = None, 0.0
        for i, curve in enumerate(curves):
            for o in curve:
                if o.n_bytes - picked[i].n_bytes <= left and picked[i].damage - o.damage > gain:
                    best, gain = (i, o), picked[i].damage - o.damage
        if best is None:
            return picked
        i, o = best
        left -= o.n_bytes - picked[i].n_bytes
        picked[i] = o
