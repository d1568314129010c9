"""Which experts are copied: those of the step before, then the rest of this step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ikcli.backends.cuda.used_experts import ExpertTable, UsedExperts, runs


@pytest.mark.parametrize(
    ("mask", "found"),
    [([], []), ([0, 0], []), ([1], [(0, 1)]), ([1, 1, 0, 1], [(0, 2), (3, 4)]), ([0, 1, 1, 0], [(1, 3)])],
    ids=["no experts", "none", "one", "two runs", "inside"],
)
def test_runs_of_experts(mask: list[int], found: list[tuple[int, int]]) -> None:
    assert list(runs(np.array(mask, bool))) == found


class Gpu:
    """Downloads a list that the test sets; counts waits."""

    def __init__(self) -> None:
        self.starts, self.waits = np.zeros(0, np.int32), 0

    def pinned(self, n_bytes: int, owner: str) -> Any:
        return type("Pinned", (), {"array": np.zeros(n_bytes, np.uint8)})

    def download(self, stream: Any, array: Any, address: int) -> None:
        array[:] = self.starts

    def synchronize(self, stream: Any) -> None:
        self.waits += 1

    def free_pinned(self, pinned: Any) -> None: ...


def test_a_step_copies_what_the_last_one_used_and_then_the_rest() -> None:
    gpu: Any = Gpu()
    node: Any = object()
    table = ExpertTable(node, 0, 10)
    used = UsedExperts(gpu, None, {node: table})

    def step(*experts: int) -> tuple[list[int] | None, list[int] | None]:
        gpu.starts = np.concatenate([[0], np.cumsum(np.isin(np.arange(10), experts))]).astype(np.int32)
        used.begin()
        first = used.expected(table)
        used.learn(table, 0)
        second = used.expected(table)
        used.learn(table, 0)
        return tuple(None if m is None else np.flatnonzero(m).tolist() for m in (first, second))  # type: ignore

    assert step(1, 2) == (None, None) and gpu.waits == 0
    assert step(2, 3) == ([1, 2], [2, 3]) and gpu.waits == 1
    assert step(*range(9)) == ([2, 3], list(range(9))) and gpu.waits == 2
    assert step(5) == (None, None) and gpu.waits == 2, "all but one were used before"
    assert step(6) == ([5], [6])
