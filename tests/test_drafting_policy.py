"""The cost model of drafts, fed with simulated times, against no drafts and against every fixed length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ikcli.drafting.policy import Option, Policy

COSTS: dict[str, Callable[[int], float]] = {
    "dense": lambda rows: 1 + 0.08 * (rows - 1),
    "experts": lambda rows: 0.3 + 0.7 * 16 * (1 - (1 - 1 / 16) ** rows),
    "gpu": lambda rows: 1.0 if rows == 1 else 1.15 + 0.01 * rows,
}
MOST = 8


def simulate(
    cost: Callable[[int], float],
    rate: float,
    n_tokens: int,
    *,
    drafting: float = 0.0,
    fixed: int = -1,
    n_texts: int = 1,
) -> float:
    """Return the seconds of `n_tokens` per text; a drafted token is right with probability `rate`."""
    random = np.random.default_rng([int(100 * rate), n_tokens, fixed + 1, n_texts])
    policy = Policy(MOST)
    seconds, tokens = 0.0, 0
    while tokens < n_tokens * n_texts:
        options = [Option(i, "kind", MOST - n_texts, drafting > 0) for i in range(n_texts)]
        lengths = policy.decide(options, n_texts).lengths if fixed < 0 else (fixed,) * n_texts
        if drafting and any(lengths):
            spent = drafting * max(lengths)
            policy.drafted("kind", max(lengths), spent)
            seconds += spent
        right = []
        for i, n in enumerate(lengths):
            wrong = (random.random(n) >= rate).nonzero()[0]
            right.append(int(wrong[0]) if wrong.size else n)
            if n:
                policy.judged(i, "kind", n, right[-1])
        rows, gained = n_texts + sum(lengths), n_texts + sum(right)
        took = cost(rows) * random.uniform(0.95, 1.05)
        policy.checked(rows, took, n_texts, gained)
        seconds, tokens = seconds + took, tokens + gained
    return seconds * n_tokens * n_texts / tokens


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("drafting", [0.0, 0.1])
@pytest.mark.parametrize("name", COSTS)
def test_little_is_lost_and_the_best_fixed_length_is_near(name: str, drafting: float, rate: float) -> None:
    """A short text loses 2 % at most; a longer one comes at 0.85 or more of the rate of the best fixed length."""
    cost = COSTS[name]
    assert simulate(cost, rate, 256, fixed=0) / simulate(cost, rate, 256, drafting=drafting) >= 0.98
    best = min(simulate(cost, rate, 2048, drafting=drafting, fixed=k) for k in range(MOST))
    assert best / simulate(cost, rate, 2048, drafting=drafting) >= 0.85


def test_a_slow_step_of_the_machine_does_not_stop_drafts_that_pay() -> None:
    policy, option = Policy(MOST), [Option(0, "kind", MOST - 1)]
    drafted = []
    for step in range(60):
        n = policy.decide(option, 1).lengths[0]
        if n:
            policy.judged(0, "kind", n, n)
        seconds = 1 + 0.1 * n
        policy.checked(1 + n, 100 * seconds if step == 30 else seconds, 1, 1 + n)
        drafted.append(n)
    assert drafted[30] and all(drafted[31:])
