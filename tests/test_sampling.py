"""The sampler as a whole: order, penalties, DRY, mirostat, probabilities, masks, random numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikcli.errors import NonFiniteError, UsageError
from ikcli.sampling import (
    NoTokenError,
    Sampler,
    SamplerParams,
    SamplerVocab,
    check_params,
    sampler_names,
    token_logprobs,
)
from ikcli.sampling.candidates import Candidates

NEUTRAL = SamplerParams(seed=7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def make(params: SamplerParams, n: int, prompt: list[int] | None = None, **vocab: object) -> Sampler:
    sampler = Sampler(params, SamplerVocab(n, **vocab))  # type: ignore[arg-type]
    sampler.prime(prompt or [])
    return sampler


def log(*probs: float) -> np.ndarray:
    return np.log(np.array(probs, np.float64)).astype(np.float32)


def packed(n: int, *ids: int) -> np.ndarray:
    bits = np.zeros((n + 31) // 32 * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def shares(sampler: Sampler, logits: np.ndarray, mask: np.ndarray | None = None, n: int = 4000) -> np.ndarray:
    return np.bincount([sampler.sample(logits, mask).id for _ in range(n)], minlength=len(logits)) / n


def chi_square(got: np.ndarray, expected: np.ndarray, n: int = 4000) -> float:
    assert not got[expected == 0].any()
    seen = expected > 0
    return float((n * (got[seen] - expected[seen]) ** 2 / expected[seen]).sum())


def final(
    params: SamplerParams, logits: np.ndarray, prompt: list[int] | None = None, **vocab: object
) -> dict[int, float]:
    """The distribution that a token is drawn from."""
    params = replace(params, n_probs=len(logits), post_sampling_probs=True)
    return {i: math.exp(p) for i, p in make(params, len(logits), prompt, **vocab).sample(logits).top}


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    assert chi_square(shares(make(NEUTRAL, 4), log(*probs)), probs) < 16.3  # 3 degrees of freedom, p = 0.001
    hot = probs**0.5 / (probs**0.5).sum()
    assert chi_square(shares(make(replace(NEUTRAL, temperature=2.0), 4), log(*probs)), hot) < 16.3


def test_a_mask_gives_the_constrained_distribution() -> None:
    n = 40
    logits = np.random.default_rng(3).normal(size=n).astype(np.float32)
    allowed = [1, 2, 35]
    expected = np.zeros(n)
    expected[allowed] = np.exp(logits[allowed])
    expected /= expected.sum()
    assert chi_square(shares(make(NEUTRAL, n), logits, packed(n, *allowed)), expected) < 13.8  # 2 degrees of freedom
    top = replace(NEUTRAL, top_k=1)
    assert make(top, n).sample(logits, packed(n, *allowed)).id == max(allowed, key=lambda i: logits[i])
    assert make(replace(NEUTRAL, temperature=0), n).sample(logits, packed(n, 5)).id == 5


def test_order_of_samplers_matters() -> None:
    logits = log(0.5, 0.2, 0.15, 0.15)
    first = replace(NEUTRAL, temperature=100.0, min_p=0.35, samplers=("temperature", "min_p"))
    last = replace(first, samplers=("min_p", "temperature"))
    assert sum(p > 0 for p in final(first, logits).values()) == 4
    assert sum(p > 0 for p in final(last, logits).values()) == 2
    assert final(replace(first, samplers=()), logits) == pytest.approx({0: 0.5, 1: 0.2, 2: 0.15, 3: 0.15}, rel=1e-5)


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    for temperature in (0.0, -1.0):
        sampler = make(replace(NEUTRAL, temperature=temperature, xtc_probability=1.0, mirostat=2), 4)
        assert sampler.sample(np.array([1, 3, 3, 2], np.float32)).id == 1


def test_penalties_see_the_whole_window() -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0, 3.0], np.float32)
    params = replace(NEUTRAL, repeat_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, repeat_last_n=4)
    sampler = make(params, 5, [4, 0, 0, 1])
    sampler.accept(2)  # the window is now 0 0 1 2
    expected = logits.astype(np.float64)
    expected[0] = 2.0 / 1.5 - 2 * 0.5 - 0.25
    expected[1] = -1.0 * 1.5 - 0.5 - 0.25
    expected[2] = 0.5 / 1.5 - 0.5 - 0.25
    weights = np.exp(expected) / np.exp(expected).sum()
    assert chi_square(shares(sampler, logits), weights) < 18.5  # 4 degrees of freedom
    sampler.rollback(1)  # 4 0 0 1
    assert sampler.sample(np.array([0, 0, 0, -9, 0.4], np.float32)).id in (2, 4)
    assert (
        make(replace(params, temperature=0), 5, [4, 0, 0, 1]).sample(np.array([0, 0, 0.2, 0, 0.4], np.float32)).id == 2
    )


def test_penalties_also_work_on_a_selection_and_spare_the_line_feed() -> None:
    logits = log(0.4, 0.3, 0.2, 0.1)
    params = replace(NEUTRAL, presence_penalty=50.0, top_k=2)
    after = replace(params, samplers=("top_k", "penalties"))
    assert final(after, logits, [0])[1] == pytest.approx(1.0)
    assert final(params, logits, [0, 1])[2] > 0.6
    assert final(params, logits, [0, 1], newline=1)[1] == pytest.approx(0.6)
    assert final(replace(params, penalize_nl=True), logits, [0, 1], newline=1)[2] > 0.6
    assert final(replace(params, penalty_prompt=(2,)), logits, [0, 1])[0] > 0.5
    assert final(replace(params, repeat_last_n=0), logits, [0])[0] > 0.5


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(-1, 12), st.lists(st.integers(0, 9), max_size=40))
@settings(deadline=None, max_examples=80)
def test_counts_stay_right(prompt: list[int], window: int, generated: list[int]) -> None:
    params = replace(NEUTRAL, frequency_penalty=1.0, repeat_last_n=window, temperature=0)
    sampler = make(params, 10, prompt)
    for token in generated:
        sampler.accept(token)
    sampler.accept(3)
    sampler.rollback(1)
    seen = prompt + generated
    seen = seen[-window:] if window > 0 else seen if window < 0 else []
    counts = np.array([seen.count(i) for i in range(10)])
    logits = np.linspace(0, 0.9, 10).astype(np.float32)
    assert sampler.sample(logits).id == int((logits - counts).argmax())


@given(
    st.lists(st.integers(-1, 10), max_size=30),
    st.integers(-1, 12),
    st.lists(st.integers(-1, 10), max_size=30),
    st.integers(0, 5),
    st.booleans(),
)
@settings(deadline=None, max_examples=80)
def test_penalties_by_their_definition(
    prompt: list[int], window: int, generated: list[int], n_back: int, spares_newline: bool
) -> None:
    """Tokens -1 and 10 are outside of the vocabulary, 4 is the line feed."""
    params = replace(NEUTRAL, repeat_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, repeat_last_n=window)
    sampler = make(replace(params, penalize_nl=not spares_newline), 10, prompt, newline=4)
    for token in generated:
        sampler.accept(token)
    sampler.rollback(n_back)
    generated = generated[: max(len(generated) - n_back, 0)]
    seen = np.array([*prompt, *generated], np.int64)
    seen = seen[max(len(seen) - window, 0) :] if window >= 0 else seen
    counts = np.array([(seen == i).sum() for i in range(10)])
    counts[4] *= not spares_newline
    logits = np.linspace(-1, 1, 10).astype(np.float32)
    wanted = np.where(logits > 0, logits / 1.5, logits * 1.5) - 0.5 * counts - 0.25
    wanted = np.where(counts > 0, wanted, logits)
    if sampler._penalties is None or window == 0:
        assert window == 0
        return
    some = np.array([9, 0, 5, 4])
    whole, part = Candidates(None, logits), Candidates(some, logits[some].astype(np.float64))
    assert sampler._penalties.apply(whole).logits == pytest.approx(wanted, abs=1e-6)
    assert sampler._penalties.apply(part).logits == pytest.approx(wanted[some], abs=1e-6)


def test_penalties_start_again_with_the_sampler() -> None:
    params = replace(NEUTRAL, temperature=0, presence_penalty=5.0, dry_multiplier=5.0, dry_allowed_length=1)
    logits = np.array([1.0, 0.9, 0.8], np.float32)
    sampler = make(params, 3, [1])
    assert sampler.sample(logits).id == 0
    sampler.accept(0)
    assert sampler.sample(logits).id == 2
    sampler.rollback(100)  # not into the prompt
    assert sampler.sample(logits - np.array([5, 0, 0], np.float32)).id == 2
    sampler.accept(0)
    sampler.reset()
    assert sampler.sample(logits).id == 0 and sampler._history.tokens.tolist() == [1]
    sampler.prime([0])
    assert sampler.sample(logits).id == 1


@pytest.mark.parametrize("changes", [{"mirostat": 1}, {"mirostat": 2}, {"adaptive_target": 0.3}])
def test_learning_samplers_start_again_and_go_back(changes: dict[str, float]) -> None:
    logits = np.random.default_rng(1).normal(size=50).astype(np.float32) * 2
    sampler = make(replace(NEUTRAL, **changes), 50, [3])  # type: ignore[arg-type]

    def state() -> list[object]:
        return list(sampler._mirostat._mu if sampler._mirostat else sampler._adaptive._sums)  # type: ignore[union-attr]

    states = [state()]
    for _ in range(6):
        sampler.accept(sampler.sample(logits).id)
        states.append(state())
    assert len({str(s) for s in states}) == 7
    for n in (1, 2, 3):
        sampler.rollback(n)
        assert state() == states[len(states) - 1 - n]
        del states[-n:]
        if n == 2:
            sampler.accept(sampler.sample(logits).id)
            states.append(state())
    sampler.reset()
    assert state() == states[0]


def test_mirostat_by_its_definition() -> None:
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    sampler = make(replace(NEUTRAL, mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5), 4)
    mirostat = sampler._mirostat
    assert mirostat is not None and mirostat._mu == [2.0]
    for _ in range(8):
        mu = mirostat._mu[-1]
        kept = np.flatnonzero(-np.log2(probs) <= mu + 1e-9)
        kept = kept if len(kept) else np.array([0])
        token = sampler.sample(log(*probs)).id
        assert token in kept
        sampler.accept(token)
        surprise = -math.log2(probs[token] / probs[kept].sum())
        assert mirostat._mu[-1] == pytest.approx(mu - 0.5 * (surprise - 1.0), abs=1e-5)
    sampler.sample(log(*probs))
    sampler.accept(3 if mirostat._drawn and mirostat._drawn[0] != 3 else 2)  # another than the drawn one
    assert mirostat._mu[-1] == mirostat._mu[-2]
    one = make(replace(NEUTRAL, mirostat=1, mirostat_tau=1.0, mirostat_eta=0.5), 400)
    zipf = (np.arange(1, 401) ** -1.5).astype(np.float64)
    logits = np.log(zipf / zipf.sum()).astype(np.float32)
    token = one.sample(logits).id
    k = (0.5 * 2.0**2.0 / (1 - 400**-0.5)) ** (1 / 1.5)  # the paper's estimate, for s = 1.5 and mu = 2
    assert token < int(k)
    one.accept(token)
    assert one._mirostat is not None  # version 1: surprise among all
    assert one._mirostat._mu[-1] == pytest.approx(2.0 - 0.5 * (-math.log2(zipf[token] / zipf.sum()) - 1.0), abs=1e-4)


def test_adaptive_averages_the_original_or_the_current_probabilities() -> None:
    probs = np.array([0.6, 0.3, 0.1])
    for current in (False, True):
        params = replace(NEUTRAL, adaptive_target=0.3, adaptive_decay=0.5, adaptive_updt_w_cur=current, top_k=2)
        sampler = make(params, 3)
        adaptive = sampler._adaptive
        assert adaptive is not None and adaptive._sums == [(0.6, 2.0)]
        total, weight = adaptive._sums[0]
        for _ in range(5):
            token = sampler.sample(log(*probs)).id
            sampler.accept(token)
            seen = probs[token] / (0.9 if current else 1.0)  # top-k has cut 0.1
            total, weight = 0.5 * total + seen, 0.5 * weight + 1
            assert adaptive._sums[-1] == (pytest.approx(total, rel=1e-5), pytest.approx(weight))
    banned = make(replace(NEUTRAL, adaptive_target=0.3), 3)
    assert all(banned.sample(log(*probs), banned=[1]).id != 1 for _ in range(50))


def test_logit_bias_ignore_eos_and_bans() -> None:
    logits = log(0.7, 0.2, 0.1)
    params = replace(NEUTRAL, logit_bias=((0, -math.inf), (2, 1.0), (2, 1.0), (77, 5.0)), temperature=0)
    assert make(params, 3).sample(logits).id == 2
    assert make(replace(NEUTRAL, ignore_eos=True), 3, eog=frozenset({0, 2})).sample(logits).id == 1
    assert make(NEUTRAL, 3).sample(logits, banned=[0, 1]).id == 2
    assert final(replace(NEUTRAL, logit_bias=((1, math.inf),)), logits)[1] == pytest.approx(1.0)
    assert logits.tolist() == log(0.7, 0.2, 0.1).tolist()


def test_nothing_left_is_an_error() -> None:
    logits = np.zeros(40, np.float32)
    for params in (NEUTRAL, replace(NEUTRAL, temperature=0)):
        with pytest.raises(NoTokenError):
            make(params, 40).sample(logits, packed(40))
        with pytest.raises(NoTokenError):
            make(params, 40).sample(logits, packed(40, 3), banned=[3])
        with pytest.raises(NoTokenError):
            make(replace(params, ignore_eos=True), 40, eog=frozenset({3})).sample(logits, packed(40, 3))
        with pytest.raises(NonFiniteError):
            make(params, 2).sample(np.array([0, np.nan], np.float32))
        with pytest.raises(NonFiniteError):
            make(params, 2).sample(np.array([0, np.inf], np.float32))


def test_probabilities_before_sampling() -> None:
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    params = replace(NEUTRAL, n_probs=3, top_k=1, logit_bias=((0, 100.0),), temperature=0)
    got = make(params, 4).sample(log(*probs))
    assert got.id == 0 and math.exp(got.logprob) == pytest.approx(0.1, rel=1e-5)
    assert [i for i, _ in got.top] == [3, 2, 1]
    assert [math.exp(p) for _, p in got.top] == pytest.approx([0.4, 0.3, 0.2], rel=1e-5)
    everything = make(replace(params, n_probs=10**9), 4).sample(log(*probs)).top
    assert sum(math.exp(p) for _, p in everything) == pytest.approx(1.0)
    assert token_logprobs(log(*probs), 2, 1).top[0][0] == 3
    assert math.exp(token_logprobs(log(*probs), 2, 0).logprob) == pytest.approx(0.3, rel=1e-5)


def test_probabilities_after_sampling() -> None:
    logits = log(0.1, 0.2, 0.3, 0.4)
    params = replace(NEUTRAL, n_probs=4, top_k=2, post_sampling_probs=True)
    got = make(params, 4).sample(logits)
    assert [math.exp(p) for _, p in got.top] == pytest.approx([4 / 7, 3 / 7, 0, 0])
    assert [i for i, _ in got.top] == [3, 2, 1, 0]
    assert math.exp(got.logprob) == pytest.approx(4 / 7 if got.id == 3 else 3 / 7)
    greedy = make(replace(params, temperature=0), 4).sample(logits)
    assert greedy.id == 3 and [math.exp(p) for _, p in greedy.top] == [1, 0, 0, 0]


def test_xtc_chance() -> None:
    logits = log(0.5, 0.3, 0.15, 0.05)
    base = replace(NEUTRAL, xtc_probability=0.25, xtc_threshold=0.12)
    assert shares(make(base, 4), logits)[0] == pytest.approx(0.75 * 0.5, abs=0.03)
    assert final(replace(base, xtc_probability=1.0), logits) == pytest.approx({2: 0.75, 3: 0.25, 0: 0, 1: 0})
    assert final(replace(base, xtc_probability=1.0, xtc_threshold=0.6), logits)[0] == pytest.approx(0.5)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_keeps_the_surprise_near_its_target(version: int) -> None:
    logits = (-1.1 * np.log(np.arange(1, 3001))).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum())
    sampler = make(replace(NEUTRAL, mirostat=version, mirostat_tau=3.0, mirostat_eta=0.1), 3000)
    surprises = []
    for _ in range(600):
        token = sampler.sample(logits).id
        sampler.accept(token)
        surprises.append(-logprobs[token] / math.log(2))
    entropy = -float(np.exp(logprobs) @ logprobs) / math.log(2)
    assert entropy > 6
    assert np.mean(surprises[100:]) == pytest.approx(3.0, abs=1.5)


def test_mirostat_state_follows_accept_and_rollback() -> None:
    logits = np.random.default_rng(0).normal(size=500).astype(np.float32) * 3
    params = replace(NEUTRAL, mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5)
    straight, undone = make(params, 500), make(params, 500)
    for step in range(30):
        token = straight.sample(logits).id
        straight.accept(token)
        assert undone.sample(logits).id == token
        undone.accept(token)
        if step % 7 == 0:
            undone.accept(1)
            undone.rollback(1)


def test_adaptive_prefers_its_target() -> None:
    logits = log(0.6, 0.3, 0.1)
    got = final(replace(NEUTRAL, adaptive_target=0.3), logits)
    assert max(got, key=lambda i: got[i]) == 1
    distance = np.abs(np.array([0.6, 0.3, 0.1]) - 0.3) / 0.3
    weights = np.exp(5 - 10 * distance**2 / (1 + distance))
    assert [got[i] for i in range(3)] == pytest.approx(weights / weights.sum(), rel=1e-4)
    sampler = make(replace(NEUTRAL, adaptive_target=0.3, adaptive_decay=0.0), 3)
    token = sampler.sample(logits).id
    sampler.accept(token)
    target = min(max(2 * 0.3 - [0.6, 0.3, 0.1][token], 0.0), 1.0)
    distance = np.abs(np.array([0.6, 0.3, 0.1]) - target) / 0.3
    weights = np.exp(5 - 10 * distance**2 / (1 + distance))
    assert chi_square(shares(sampler, logits), weights / weights.sum()) < 13.8


def test_seeds() -> None:
    logits = np.zeros(1000, np.float32)

    def draws(sampler: Sampler) -> list[int]:
        return [sampler.sample(logits).id for _ in range(20)]

    one, other = make(NEUTRAL, 1000), make(NEUTRAL, 1000)
    mixed = [(one.sample(logits).id, other.sample(logits).id) for _ in range(20)]
    assert all(a == b for a, b in mixed)
    assert [a for a, _ in mixed] != draws(make(replace(NEUTRAL, seed=8), 1000))
    one.reset()
    assert draws(one) == [a for a, _ in mixed]
    for seed in (-1, 0xFFFFFFFF):
        assert draws(make(replace(NEUTRAL, seed=seed), 1000)) != draws(make(replace(NEUTRAL, seed=seed), 1000))
    assert draws(make(replace(NEUTRAL, seed=2**40), 1000))


PARAMS = st.builds(
    SamplerParams,
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 1e-9, 0.8, 1.0, 50.0]),
    dynatemp_range=st.sampled_from([0.0, 0.5, 5.0]),
    top_k=st.sampled_from([-1, 0, 1, 5, 1000]),
    top_p=st.sampled_from([0.0, 0.5, 0.95, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0, 7.0]),
    tfs_z=st.sampled_from([0.0, 0.5, 1.0]),
    typical_p=st.sampled_from([0.0, 0.5, 1.0]),
    top_n_sigma=st.sampled_from([-1.0, 0.5, 2.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.1, 0.9]),
    mirostat=st.sampled_from([0, 0, 1, 2]),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 2.0, -2.0]),
    dry_multiplier=st.sampled_from([0.0, 1.0, 1e30]),
    adaptive_target=st.sampled_from([-1.0, 0.0, 0.5]),
    min_keep=st.sampled_from([0, 3]),
    n_probs=st.sampled_from([0, 4]),
    post_sampling_probs=st.booleans(),
    samplers=st.lists(st.sampled_from(SamplerParams().samplers), max_size=12).map(tuple),
)


def test_mirostat_with_vanishing_probabilities() -> None:
    """Quotients of neighbouring probabilities beyond the float32 range."""
    logits = np.array([0.0, -100.0, -103.0], np.float32)
    for version in (1, 2):
        assert make(replace(NEUTRAL, mirostat=version), 3).sample(logits).id == 0


@pytest.mark.parametrize("penalty", [0.25, 4.0])
def test_penalties_make_nothing_infinite(penalty: float) -> None:
    """A quotient or product beyond the float32 range is the largest number, and what was excluded stays so."""
    logits = np.array([3e38, -3e38, -np.inf, 1.0], np.float32)
    params = replace(NEUTRAL, repeat_penalty=penalty, samplers=("penalties", "penalties", "temperature"), n_probs=4)
    with np.errstate(over="ignore"):
        got = make(params, 4, [0, 1, 2]).sample(logits)
    assert got.id == 0 and not math.isnan(got.logprob)


@given(PARAMS, st.integers(1, 300), st.integers(0, 2**32), st.sampled_from([0.0, 1.0, 1e4, 3e37]))
@settings(deadline=None, max_examples=200)
def test_what_comes_out_is_always_allowed(params: SamplerParams, n: int, seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=n) * spread).astype(np.float32)
    logits[rng.random(n) < 0.2] = -np.inf
    allowed = rng.random(n) < rng.choice([0.05, 0.9])
    sampler = make(params, n, rng.integers(0, n, 12).tolist())
    possible = np.flatnonzero(allowed & (logits > -np.inf))
    mask = packed(n, *np.flatnonzero(allowed))
    with np.errstate(over="ignore"):
        if not len(possible):
            with pytest.raises(NoTokenError):
                sampler.sample(logits, mask)
            return
        for _ in range(3):
            got = sampler.sample(logits, mask)
            assert got.id in possible
            sampler.accept(got.id)
            assert math.isnan(got.logprob) == (params.n_probs <= 0) and all(not math.isnan(p) for _, p in got.top)
            assert sum(math.exp(p) for _, p in got.top) < 1.0001
            if params.post_sampling_probs and params.n_probs:
                assert got.logprob > -math.inf


def test_names_and_letters() -> None:
    assert sampler_names("edskypmxt") == (
        "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature",
    )  # fmt: skip
    assert sampler_names("fnw") == ("tfs_z", "top_n_sigma", "adaptive_p")
    assert sampler_names(["top-k", "typ_p", "nucleus", "temp", "dist"]) == (
        "top_k",
        "typical_p",
        "top_p",
        "temperature",
    )
    for bad in ("q", ["bogus"]):
        with pytest.raises(UsageError, match="known are"):
            sampler_names(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"repeat_last_n": -2},
        {"dry_penalty_last_n": -2},
        {"temperature": math.nan},
        {"mirostat": 3},
        {"repeat_penalty": 0.0},
        {"samplers": ("bogus",)},
        {"logit_bias": ((1, math.nan),)},
    ],
)
def test_senseless_parameters_are_refused(change: dict) -> None:
    with pytest.raises(UsageError):
        check_params(replace(SamplerParams(), **change))
