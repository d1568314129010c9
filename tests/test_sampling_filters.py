"""Every filter against its definition, written out slowly over sorted Python lists."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikcli.sampling import filters
from ikcli.sampling.candidates import Candidates, allowed_only, ascending, draw, top_indices


def logits_of(seed: int, n: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)


def ranked(logits: np.ndarray) -> list[tuple[int, float]]:
    return sorted(((i, float(x)) for i, x in enumerate(logits) if x > -math.inf), key=lambda t: (-t[1], t[0]))


def softmax(values: list[float]) -> list[float]:
    largest = max(values)
    weights = [math.exp(v - largest) for v in values]
    total = sum(weights)
    return [w / total for w in weights]


def slow_top_p(logits: np.ndarray, p: float, keep: int) -> set[int]:
    tokens = ranked(logits)
    total, kept = 0.0, set()
    for (token, _), prob in zip(tokens, softmax([x for _, x in tokens]), strict=True):
        kept.add(token)
        total += prob
        if total >= p and len(kept) >= keep:
            break
    return kept


def slow_min_p(logits: np.ndarray, p: float, keep: int) -> set[int]:
    tokens = ranked(logits)
    probs = softmax([x for _, x in tokens])
    return {
        token
        for n, ((token, _), prob) in enumerate(zip(tokens, probs, strict=True))
        if prob >= p * probs[0] or n < keep
    }


def slow_tfs(logits: np.ndarray, z: float, keep: int) -> set[int]:
    tokens = ranked(logits)
    probs = softmax([x for _, x in tokens])
    first = [a - b for a, b in pairwise(probs)]
    second = [abs(a - b) for a, b in pairwise(first)]
    scale = sum(second)
    total, last = 0.0, len(tokens)
    for i, value in enumerate(second):
        total += value / scale
        if total > z and i >= keep:
            last = i
            break
    return {token for token, _ in tokens[:last]}


def slow_typical(logits: np.ndarray, p: float, keep: int) -> set[int]:
    tokens = ranked(logits)
    probs = softmax([x for _, x in tokens])
    entropy = -sum(q * math.log(q) for q in probs)
    order = sorted(range(len(tokens)), key=lambda i: abs(-math.log(probs[i]) - entropy))
    total, kept = 0.0, set()
    for i in order:
        kept.add(tokens[i][0])
        total += probs[i]
        if total > p and len(kept) >= keep:
            break
    return kept


def slow_sigma(logits: np.ndarray, n: float) -> set[int]:
    values = [float(x) for x in logits if x > -math.inf]
    mean = sum(values) / len(values)
    sigma = math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))
    return {i for i, x in enumerate(logits) if x >= max(values) - n * sigma}


def slow_xtc(logits: np.ndarray, threshold: float) -> set[int]:
    tokens = ranked(logits)
    above = sum(q >= threshold for q in softmax([x for _, x in tokens]))
    return {token for token, _ in (tokens[above - 1 :] if above > 1 else tokens)}


def ids(c: Candidates) -> set[int]:
    return set(c.ids.tolist()) if c.ids is not None else set(np.flatnonzero(c.logits > -np.inf).tolist())


def forms(logits: np.ndarray) -> list[Candidates]:
    """The same candidates as a whole vocabulary, unsorted, and best first."""
    whole = Candidates(None, logits)
    return [whole, whole.take(np.flatnonzero(logits > -np.inf), descending=False), whole.best_first()]


@pytest.mark.parametrize(("n", "keep"), [(3, 1), (40, 1), (40, 7), (700, 1), (5000, 7)])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.999])
def test_filters_follow_their_definitions(n: int, keep: int, share: float) -> None:
    logits = logits_of(n, n)
    logits[:: max(5, n // 3)] = -np.inf
    expected = [
        slow_top_p(logits, share, keep),
        slow_min_p(logits, share, keep),
        slow_typical(logits, share, keep),
        slow_xtc(logits, share / 2),
        slow_tfs(logits, share, keep) if n > 3 else ids(Candidates(None, logits)),
        slow_sigma(logits, share * 3) if n > 4 else ids(Candidates(None, logits)),
    ]
    for c in forms(logits):
        got = [
            filters.top_p(c, share, keep),
            filters.min_p(c, share, keep),
            filters.typical_p(c, share, keep),
            filters.xtc(c, share / 2),
            filters.tfs_z(c, share, keep),
            filters.top_n_sigma(c, share * 3),
        ]
        assert [ids(one) for one in got] == expected


@pytest.mark.parametrize("n", [1, 63, 64, 1000, 20000])
@pytest.mark.parametrize("k", [1, 2, 40, 700, 100000])
def test_top_k_takes_the_best_ones_in_order(n: int, k: int) -> None:
    logits = np.round(logits_of(n + k, n), 1)  # rounded: with equals
    expected = [token for token, _ in ranked(logits)[:k]]
    for c in forms(logits):
        assert filters.top_k(c, k).ids is not None or len(logits) == 0
        assert filters.top_k(c, k).ids.tolist() == expected
    assert filters.top_k(Candidates(None, logits), 0).ids is None


def test_top_indices_leave_out_what_is_impossible() -> None:
    logits = np.full(50000, -np.inf, np.float32)
    logits[[70, 40000]] = 1.0, 2.0
    assert top_indices(logits, 5).tolist() == [40000, 70]
    assert top_indices(logits, 40000).tolist() == [40000, 70]


def test_ascending_is_a_stable_sort() -> None:
    values = np.round(logits_of(0, 5000), 1)
    values[::7], values[3::11], values[5] = 0.0, -0.0, -np.inf
    assert ascending(values).tolist() == sorted(range(5000), key=lambda i: (values[i], i))


def test_known_cuts() -> None:
    c = Candidates(None, np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32)))
    assert ids(filters.top_k(c, 1)) == {3}
    assert ids(filters.top_p(c, 0.69)) == {2, 3}
    assert ids(filters.top_p(c, 0.71)) == {1, 2, 3}
    assert ids(filters.min_p(c, 0.49)) == {1, 2, 3}
    assert ids(filters.min_p(c, 1.0)) == {3}
    assert ids(filters.typical_p(c, 0.49)) == {1, 2}
    assert ids(filters.xtc(c, 0.25)) == {0, 1, 2}
    assert ids(filters.xtc(c, 0.45)) == {0, 1, 2, 3}
    assert ids(filters.xtc(c, 0.05)) == {0}


def test_cuts_at_their_edges() -> None:
    def kept(c: Candidates) -> list[int]:
        return sorted(ids(c))

    c = Candidates(None, np.log(np.array([0.5, 0.25, 0.125, 0.125], np.float64)))
    assert kept(filters.top_p(c, 0.75)) == [0, 1] and kept(filters.top_p(c, 0.76)) == [0, 1, 2]
    assert kept(filters.top_p(c, 0.0)) == [0] and kept(filters.top_p(c, 0.0, 3)) == [0, 1, 2]
    assert kept(filters.min_p(c, 0.5)) == [0, 1] and kept(filters.min_p(c, 0.51)) == [0]
    assert kept(filters.xtc(c, 0.25)) == [1, 2, 3] and kept(filters.xtc(c, 0.26)) == [0, 1, 2, 3]
    assert kept(filters.xtc(c, 0.25, 3)) == [1, 2, 3] and kept(filters.xtc(c, 0.25, 4)) == [0, 1, 2, 3]
    half = Candidates(None, np.log(np.array([0.5, 0.5], np.float64)))
    assert kept(filters.xtc(half, 0.5)) == [1] and kept(filters.xtc(half, 0.51)) == [0, 1]
    three = Candidates(None, np.array([9.0, 1.0, 0.0, -np.inf]))
    assert kept(filters.top_n_sigma(three, 0.1)) == [0, 1, 2]
    four = Candidates(None, np.array([3.0, 1.0, 1.0, -1.0]))  # sigma is the root of 2
    assert kept(filters.top_n_sigma(four, 1.0)) == [0] and kept(filters.top_n_sigma(four, 1.42)) == [0, 1, 2]
    two = Candidates(None, np.log(np.array([0.9, 0.1])))
    assert kept(filters.tfs_z(two, 0.01)) == [0, 1]
    three = Candidates(None, np.log(np.array([0.7, 0.2, 0.1])))
    assert kept(filters.tfs_z(three, 0.01)) == [0, 1, 2]  # one curvature only
    four = Candidates(None, np.log(np.array([8, 4, 2, 1]) / 15))  # curvatures 2/3 and 1/3
    assert kept(filters.tfs_z(four, 0.9)) == [0]
    assert kept(filters.tfs_z(four, 1.0)) == [0, 1, 2, 3]


def test_dynamic_temperature_of_a_selection_counts_all_of_it() -> None:
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    whole = Candidates(None, np.append(np.log(probs), -np.inf))
    entropy = 1.75 * math.log(2) / math.log(4)
    t = 0.5 + 1.0 * entropy**0.5
    wanted = probs ** (1 / t) / (probs ** (1 / t)).sum()
    assert filters.dynamic_temperature(whole, 1.0, 0.5, 0.5).probabilities()[:4] == pytest.approx(wanted)
    some = Candidates(np.array([7, 5, 3, 1]), np.log(probs), True)
    assert filters.dynamic_temperature(some, 1.0, 0.5, 0.5).probabilities() == pytest.approx(wanted)
    low = filters.dynamic_temperature(some, 0.1, 0.5, 1.0).probabilities()  # never below 0
    t = 0.6 * entropy
    assert low == pytest.approx(probs ** (1 / t) / (probs ** (1 / t)).sum())


def test_temperatures() -> None:
    logits = logits_of(3, 20)
    for c in forms(logits):
        expected = np.exp(c.logits / 0.7 - (c.logits / 0.7).max())
        assert filters.temperature(c, 0.7).probabilities() == pytest.approx(expected / expected.sum(), rel=1e-5)
        probs = c.probabilities()
        t = 0.5 + 1.0 * (-(probs * np.log(probs)).sum() / np.log(20)) ** 2.0
        got = filters.dynamic_temperature(c, 1.0, 0.5, 2.0).probabilities()
        assert got == pytest.approx(filters.temperature(c, t).probabilities(), rel=1e-4)
    flat = Candidates(None, np.zeros(8, np.float32))
    assert filters.dynamic_temperature(flat, 1.0, 1.0, 1.0).probabilities() == pytest.approx(np.full(8, 1 / 8))


@given(
    st.floats(1e-30, 1e30),
    st.floats(0, 5),
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9),
)
@settings(deadline=None, max_examples=80)
def test_no_temperature_makes_a_nan(t: float, spread: float, values: list[float]) -> None:
    c = Candidates(None, np.array(values, np.float32))
    for changed in (filters.temperature(c, t), filters.dynamic_temperature(c, t, spread, 1.0)):
        assert changed.probabilities().sum() == pytest.approx(1, rel=1e-5)


def test_masks_of_any_density() -> None:
    logits = logits_of(1, 1000)
    logits[500] = -np.inf
    for share in (0.001, 0.05, 0.5, 1.0):
        bits = np.random.default_rng(2).random(1024) < share
        bits[[500, 3]] = True
        mask = np.packbits(bits, bitorder="little").view(np.uint32)
        assert ids(allowed_only(logits, mask)) == set(np.flatnonzero(bits[:1000]).tolist()) - {500}
    short = np.array([0b1001], np.uint32)
    assert ids(allowed_only(logits, short)) == {0, 3}


@pytest.mark.parametrize("n", [5, 30000])
def test_draws_have_the_weights(n: int) -> None:
    rng = np.random.default_rng(5)
    weights = np.zeros(n, np.float32)
    at = np.array([0, 1, n // 2, n - 1])
    weights[at] = [1, 4, 2, 3]
    drawn = np.array([draw(weights, rng) for _ in range(4000)])
    counts = np.array([(drawn == i).sum() for i in at])
    assert counts.sum() == 4000
    expected = 4000 * weights[at] / 10
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001
