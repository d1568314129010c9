"""The short chain draws what the chain of arrays draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import native_function, shared_library
from ikcli.sampling import Sampler, SamplerParams, SamplerVocab
from ikcli.sampling.candidates import top_indices
from ikcli.sampling.short import short_chain

ORDERS = (
    ("top_k", "top_p", "min_p", "temperature"),
    ("top_k", "temperature", "min_p", "top_p"),
    ("penalties", "dry", "top_k", "temperature", "temperature"),
    ("top_k", "min_p"),
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400), st.integers(1, 60), st.floats(0.01, 1), st.floats(0, 1), st.floats(0.01, 3),
    st.integers(0, 5), st.sampled_from(ORDERS), st.integers(0, 2**31), st.booleans(),
)  # fmt: skip
def test_draws_are_those_of_the_arrays(
    n: int, k: int, top_p: float, min_p: float, t: float, keep: int, order: tuple[str, ...], seed: int, ties: bool
) -> None:
    rng = np.random.default_rng(seed)
    params = SamplerParams(seed=seed, temperature=t, top_k=k, top_p=top_p, min_p=min_p, min_keep=keep, samplers=order)
    short, arrays = (Sampler(params, SamplerVocab(n)) for _ in range(2))
    assert short._short is not None
    arrays._short = arrays._plain = None
    for sampler in (short, arrays):
        sampler.prime([])
    for _ in range(10):
        logits = (3 * rng.standard_normal(n)).astype(np.float32)
        logits = np.round(logits) if ties else logits
        mask = None if rng.random() < 0.5 else np.full((n + 31) // 32, 0xFFFFFFFF, np.uint32)
        assert short.sample(logits, mask) == arrays.sample(logits, mask)
        assert short.sample(logits) == arrays.sample(logits)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 0}, {"top_k": 1000}, {"repeat_penalty": 1.1}, {"dry_multiplier": 1.0}, {"dynatemp_range": 0.5},
        {"xtc_probability": 0.5}, {"typical_p": 0.9}, {"n_probs": 3, "post_sampling_probs": True},
        {"samplers": ("top_p", "top_k")}, {"samplers": ()},
    ],
)  # fmt: skip
def test_other_chains_take_the_long_way(changes: dict[str, object]) -> None:
    assert short_chain(SamplerParams()) is not None
    assert short_chain(replace(SamplerParams(), **changes)) is None


@pytest.mark.parametrize("n", [7, 200, 3000, 40000])
@pytest.mark.parametrize("k", [1, 5, 40, 900])
def test_best_indices_whatever_the_method(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    logits = rng.integers(-20, 20, n).astype(np.float32)
    logits[rng.random(n) < 0.2] = -np.inf
    wanted = [i for i in np.argsort(-logits, kind="stable").tolist() if logits[i] > -np.inf][:k]
    assert top_indices(logits, k).tolist() == wanted


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 700), st.integers(1, 90), st.integers(0, 2**31), st.booleans())
def test_largest_of_a_vocabulary(n: int, k: int, seed: int, ties: bool) -> None:
    """The kernel finds what sorting finds: best first, equal ones in order, never -inf; a NaN anywhere is noticed."""
    library, key = shared_library(), KernelKey("ikcli.native.top_k", "make_top_k")
    library.require([key])
    top_k = native_function(library[key], 5, keep_gil=True)
    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=n).astype(np.float32)
    numbers = np.round(numbers) if ties else numbers
    numbers[rng.random(n) < 0.3] = -np.inf
    ids, values = np.zeros(k, np.int64), np.zeros(k, np.float32)
    found = top_k(numbers.ctypes.data, n, k, ids.ctypes.data, values.ctypes.data)
    wanted = np.argsort(-numbers, kind="stable")[:k]
    wanted = wanted[numbers[wanted] > -np.inf]
    assert ids[:found].tolist() == wanted.tolist()
    assert values[:found].tolist() == numbers[wanted].tolist()
    numbers[rng.integers(n)] = np.nan
    assert top_k(numbers.ctypes.data, n, k, ids.ctypes.data, values.ctypes.data) == -1


def test_whole_vocabulary_is_drawn_from_like_candidates() -> None:
    rng = np.random.default_rng(5)
    vocab = SamplerVocab(900, eog=frozenset({3, 8}))
    for params in (SamplerParams(seed=1), SamplerParams(seed=1, ignore_eos=True, logit_bias=((7, 3.0),))):
        plain, other = Sampler(params, vocab), Sampler(replace(params, n_probs=1), vocab)
        for _ in range(30):
            logits = rng.normal(size=900).astype(np.float32) * 4
            assert plain.sample(logits).id == other.sample(logits).id


@pytest.mark.parametrize("writeable", [True, False])
def test_biases_leave_the_logits_as_they_were(writeable: bool) -> None:
    params = SamplerParams(seed=4, ignore_eos=True, logit_bias=((7, 3.0), (9, 0.1)))
    sampler, other = (Sampler(params, SamplerVocab(500, eog=frozenset({3}))) for _ in range(2))
    logits = np.random.default_rng(6).normal(size=500).astype(np.float32)
    before = logits.copy()
    logits.flags.writeable = writeable
    drawn = [sampler.sample(logits).id for _ in range(20)]
    assert logits.tobytes() == before.tobytes()
    assert drawn == [other.sample(before).id for _ in range(20)]
