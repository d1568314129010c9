"""The cost model of drafts in a simulation: against no drafts, and against every fixed length.

Curves of costs, costs of drafts, acceptance and its drift are drawn at random. The seeds are not those with which the
model's constants were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ikcli.drafting.acceptance import Acceptance
from ikcli.drafting.costs import MakingCosts, RowCosts, distinct_experts
from ikcli.drafting.policy import COMPARES, SHARE, Option, Policy

MOST = 8
UNIT = 0.05  # seconds of a plain step
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """A model and a text; `right[t, i]`: token t is guessed when it is the i-th of a draft. Times in plain steps."""

    rows: Floats
    first: float
    each: float
    repair: float
    noise: float
    spikes: float
    right: npt.NDArray[np.bool_]


def draw(seed: int, n_tokens: int) -> Case:
    random = np.random.default_rng(seed)
    rows = np.arange(MOST)
    shape = random.integers(4)
    if shape == 0:
        cost = 1 + random.uniform(0, 0.3) * rows
    elif shape == 1:
        n_experts = int(random.choice([8, 32, 128, 256]))
        used = max(2, n_experts // int(random.choice([4, 8, 16, 32])))
        distinct = np.array([distinct_experts(n_experts, used, k + 1) for k in rows])
        cost = 1 + random.uniform(0.4, 0.9) * (distinct - 1) + random.uniform(0, 0.05) * rows
    elif shape == 2:
        cost = 1 + np.where(rows > 0, random.uniform(0, 0.6), 0) + random.uniform(0, 0.05) * rows
    else:
        cost = 1 + np.append(0, random.exponential(random.uniform(0.02, 0.4), MOST - 1).cumsum())
    models = random.random() < 0.5
    first, each = (random.uniform(0, 0.1), random.uniform(0.005, 0.3)) if models else (0.0, 0.0)
    repair = random.uniform(0.2, 1) if random.random() < 0.25 else 0.0

    n = n_tokens + MOST
    drift = random.integers(4)
    if drift == 0:
        rate = np.full(n, random.uniform())
    elif drift == 1:
        rate = np.linspace(random.uniform(), random.uniform(), n)
    elif drift == 2:
        length = int(random.choice([30, 100, 400]))
        rate = np.repeat(random.uniform(0, 1, n // length + 1), length)[:n]
    else:
        good = np.arange(n) // int(random.choice([20, 60])) % 2 == 0
        rate = np.where(good, random.uniform(0.8, 1), random.uniform(0, 0.4))
    by_place = rate[:, None] * random.uniform(0.85, 1) ** rows
    right = random.random((n, MOST)) < by_place
    return Case(cost, first, each, repair, random.uniform(0.005, 0.08), random.choice([0, 0.002, 0.01]), right)


def pace_of_others(seed: int, n_steps: int) -> Floats:
    """Return how many times as long everything takes, step by step, on a machine that others use, too."""
    random = np.random.default_rng(seed)
    levels = random.normal(0, 0.12, n_steps)
    level, near, out = 0.0, 0.0, np.zeros(n_steps)
    for i in range(n_steps):
        level = levels[i] if random.random() < 1 / 400 else level
        near += random.normal(0, 0.013) - near / 60
        out[i] = level + near
    return np.exp(out)


def seconds(
    case: Case, n_tokens: int, fixed: int | None = None, policy: Policy | None = None, pace: Floats | None = None
) -> float:
    """Return the time of a text, in plain steps per token; the policy sees it with noise, and some slow steps.

    `pace`: what the policy sees is so many times as long, step by step; what is returned is not.
    """
    random = np.random.default_rng(1)
    policy = policy or Policy(MOST, repairs=case.repair > 0)
    at, total, rest, passed, step = 0, 0.0, 0, 0, 0
    while at < n_tokens:
        compared = 0
        unit = UNIT if pace is None else UNIT * float(pace[step])
        step += 1
        most = min(MOST - 1, n_tokens - at - 1)
        if fixed is not None:
            n = min(fixed, most)
        elif rest or not most:
            rest -= rest > 0
            passed += 1
            n = 0
        else:
            policy.passed(passed)
            decision = policy.decide([Option(0, "kind", most, case.each > 0)], 1)
            passed, rest, n = 0, decision.rest, decision.lengths[0]
            compared = decision.compared[0] if decision.compared else 0
        right = 0
        while right < n and case.right[at + 1 + right, right]:
            right += 1
        made = n or compared
        making = case.first + case.each * made if made else 0.0
        repair = case.repair if right < n else 0.0
        total += case.rows[n] + making + repair
        if fixed is None and not passed:
            if making:
                policy.drafted("kind", made, making * unit, 1)
            if n:
                policy.judged(0, "kind", n, n, right)
            elif shown := compared or (0 if case.each else most):  # the text shows what would have been right
                unused = next((i for i in range(shown) if not case.right[at + 1 + i, i]), shown)
                policy.judged(0, "kind", shown, shown, unused)
            if repair:
                policy.repaired(repair * unit, 1)
            slow = 3 if random.random() < case.spikes else 1
            policy.checked(1 + n, case.rows[n] * random.lognormal(0, case.noise) * slow * unit, 1, 1 + right)
        elif fixed is None and rest % 8 == 1:
            policy.rested(1, random.lognormal(0, case.noise) * unit)
        at += 1 + right
    return total / at


def ratios(seed: int, n_tokens: int, *, drifts: bool = False) -> tuple[float, float]:
    """Return the rate with chosen lengths relative to no drafts, and to the best fixed length."""
    case = draw(seed, n_tokens)
    fixed = [seconds(case, n_tokens, k) for k in range(MOST)]
    chosen = seconds(case, n_tokens, pace=pace_of_others(seed, n_tokens) if drifts else None)
    return fixed[0] / chosen, min(fixed) / chosen


def check(seeds: range, n_tokens: int, least: float, *, drifts: bool = False) -> None:
    found = {seed: ratios(seed, n_tokens, drifts=drifts) for seed in seeds}
    assert {s: r for s, r in found.items() if r[0] < 0.98 or r[1] < least} == {}


def test_little_is_lost_in_short_texts() -> None:
    """The first 256 tokens of an engine take at most 2 % longer, while it learns."""
    check(range(9000, 9012), 256, 0)


@pytest.mark.slow("many simulated texts")
def test_little_is_lost_in_many_short_texts() -> None:
    check(range(9100, 9250), 256, 0)


@pytest.mark.slow("many simulated texts, of 2048 tokens, with every fixed length")
def test_the_best_fixed_length_is_near() -> None:
    check(range(9000, 9100), 2048, 0.9)


@pytest.mark.slow("many simulated texts, with every fixed length")
def test_the_best_fixed_length_is_near_where_the_machine_changes_its_pace() -> None:
    """Costs measured at one time say little of those at another, but their ratios do."""
    check(range(9262, 9352), 1024, 0.9, drifts=True)


def test_a_draft_of_which_only_long_ones_pay_is_tried() -> None:
    """The second row takes more than a right token is worth; the others are cheap, and nearly all guesses are right."""
    n = 1500
    rows = np.array([1.0, *(2.2 + 0.1 * np.arange(MOST - 1))])
    case = Case(rows, 0.0, 0.05, 0.0, 0.02, 0.0, np.random.default_rng(0).random((n + MOST, MOST)) < 0.96)
    policy = Policy(MOST)
    for _ in range(40):  # what was learned elsewhere says that drafts are wrong
        policy.judged(1, "kind", 2, 2, 0)
    assert seconds(case, n, policy=policy) < 0.8


def test_a_predictable_text_does_not_pay_for_the_next_one() -> None:
    """Two texts, the second one without a right guess: it is at most 2 % slower."""
    case = draw(1, 300)
    rows = 1 + 0.3 * np.arange(MOST)
    good, bad = (Case(rows, 0.02, 0.05, 0.0, 0.02, 0.0, np.full_like(case.right, right)) for right in (True, False))
    policy = Policy(MOST)
    assert seconds(good, 300, policy=policy) < 0.6
    policy.forget(0)
    assert seconds(bad, 300, policy=policy) < 1 / 0.98


def test_a_slow_step_of_the_machine_does_not_stop_drafts_that_pay() -> None:
    policy, option = Policy(MOST), [Option(0, "kind", MOST - 1)]
    drafted = []
    for step in range(60):
        n = policy.decide(option, 1).lengths[0]
        policy.judged(0, "kind", n or MOST - 1, n or MOST - 1, n or MOST - 1)  # those that are not used show it later
        seconds = 1 + 0.1 * n
        policy.checked(1 + n, 100 * seconds if step == 30 else seconds, 1, 1 + n)
        drafted.append(n)
    assert drafted[30] and all(drafted[31:])


def test_looking_for_drafts_that_are_never_found_costs_a_percent() -> None:
    """Looking takes a tenth of a step: most steps rest."""
    policy, looked, rest = Policy(MOST), 0, 0
    for _ in range(1000):
        if rest:
            rest -= 1
            policy.passed(1)
            continue
        looked += 1
        rest = policy.looked(0.1, 1)
        policy.checked(1, 1.0, 1, 1)
    assert 20 < looked <= 10 * (1000 * 0.01 + 2)


def test_looking_leaves_the_means_to_use_what_is_found() -> None:
    """Looking takes a tenth of a step and rarely finds something; what it finds is right, and is used."""
    policy, n_found, n_used, rest = Policy(MOST), 0, 0, 0
    for step in range(2000):
        n, options = 0, list[Option]()
        if rest:
            rest -= 1
        else:
            options = [Option(0, "kind", MOST - 1)] if step > 300 and not step % 3 else []
            n = policy.decide(options, 1).lengths[0] if options else 0
            rest = 0 if n else policy.looked(0.1, 1)
            n_found, n_used = n_found + len(options), n_used + (n > 0)
        if n or options:
            policy.judged(0, "kind", n or MOST - 1, n or MOST - 1, n or MOST - 1)
        policy.checked(1 + n, 1 + 0.1 * n, 1, 1 + n)
    assert n_found > 300 and n_used > 0.9 * n_found


def test_a_try_that_finds_nothing_is_not_repeated_at_once() -> None:
    """A model may draft nothing, as it is not sure of its first token; asking it cost time."""
    policy, option, tries = Policy(MOST), [Option(0, "kind", MOST - 1, costs=True)], 0
    for _ in range(2000):
        if any(policy.decide(option, 1).lengths):
            tries += 1
            policy.drafted("kind", 1, 0.5, 1)
            policy.judged(0, "kind", MOST - 1, 0, 0)
        policy.checked(1, 1.0, 1, 1)
    assert 1 <= tries <= (2000 * SHARE + 2) / 0.5


def test_dear_drafts_are_compared_before_they_are_checked() -> None:
    """A wrong one takes three steps, making it a tenth: as long as they are wrong none is checked, then most are."""
    policy, option = Policy(MOST), [Option(0, "kind", MOST - 1, costs=True)]
    counts = []
    for right, n_steps in ((False, 1500), (True, 1500)):
        checked = compared = 0
        for _ in range(n_steps):
            decision = policy.decide(option, 1)
            n, made = decision.lengths[0], decision.lengths[0] or (decision.compared or (0,))[0]
            checked, compared = checked + (n > 0), compared + (made > n)
            if made:
                policy.drafted("kind", made, 0.02 * made, 1)
                policy.judged(0, "kind", made, made, made * right)
            policy.checked(1 + n, 1.0 + (2 + 0.1 * n if n else 0), 1, 1 + n * right)
        counts.append((checked, compared))
    (checked, compared), (later, _) = counts
    assert checked <= 3 and compared >= 5 and later > 1000


def test_drafts_that_cost_nothing_teach_without_being_checked() -> None:
    """The first ones are compared with the text; wrong ones cost no step, right ones are used from then on."""
    option = [Option(0, "kind", MOST - 1)]
    for n_right in (0, MOST - 1):
        policy, used = Policy(MOST), 0
        for _ in range(100):
            n = policy.decide(option, 1).lengths[0]
            used += n > 0
            policy.judged(0, "kind", n or MOST - 1, n or MOST - 1, min(n_right, n or MOST - 1))
            policy.checked(1 + n, 1 + 0.5 * n, 1, 1 + min(n, n_right))
        assert used >= 90 if n_right else used <= 1
    waits = Policy(MOST)
    for _ in range(2):
        waits.checked(1, 1.0, 1, 1)
    assert waits.decide(option, 1).reason == COMPARES
    assert waits.decide([Option(0, "kind", MOST - 1, costs=True)], 1).reason != COMPARES


def test_several_texts_share_the_rows() -> None:
    """Rows go to the text whose guesses are right, and drafts below their least length are not made."""
    policy = Policy(MOST)
    options: list[Any] = [Option(0, "kind", 6), Option(1, "kind", 6)]
    lengths: list[tuple[int, ...]] = []
    for _ in range(80):
        decided = policy.decide(options, 2).lengths
        lengths.append(decided)
        right = decided[0], 0
        for text, n in enumerate(decided):  # what is not used is compared with the text
            policy.judged(text, "kind", n or 6, n or 6, right[text] if n else 6 * (not text))
        policy.checked(2 + sum(decided), 1 + 0.05 * sum(decided), 2, 2 + sum(right))
    assert lengths[-1][0] >= 5 and lengths[-1][1] <= 1
    least = Policy(MOST)
    for _ in range(2):
        least.checked(1, 1.0, 1, 1)
    assert least.decide([Option(0, "kind", 7, n_least=4)], 1).lengths[0] in (0, 4, 5, 6, 7)


def test_curves_of_costs() -> None:
    """Some counts tell of the others; the first step, which may load things, does not stay."""
    rows = RowCosts(MOST)
    for count, value in ((1, 9.0), (1, 1.0), (1, 1.0), (4, 1.6), (8, 2.4), (8, 2.4)):
        rows.observe(count, value)
        rows.refresh()
    assert rows.seconds[1:] == pytest.approx([1, 1.2, 1.4, 1.6, 1.8, 2, 2.2, 2.4], abs=0.1)
    assert all(low <= mean <= high for low, mean, high in zip(rows.low, rows.seconds, rows.high, strict=True))
    making = MakingCosts()
    for n in (1, 4, 2, 6, 3):
        making.observe(n, 0.5 + 0.25 * n)
    assert making(5) == pytest.approx(1.75, rel=0.1) and making.first == pytest.approx(0.5, abs=0.15)


def test_drafts_that_stop_early_are_not_counted_as_long() -> None:
    known = Acceptance(MOST)
    for _ in range(50):
        known.observe(0, "kind", 5, 2, 2)
    chain = known.chain(0, "kind", 5)
    assert chain.right[1] > 0.9 and chain.right[2] < 0.2
    assert chain.found[1] > 0.9 and chain.found[2] < 0.2
