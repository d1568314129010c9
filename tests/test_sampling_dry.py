"""DRY: repetitions, their penalties, and breakers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import NEUTRAL, make

from ikcli.sampling.candidates import Candidates
from ikcli.sampling.dry import Dry, find_breakers
from ikcli.sampling.vocab import BreakerTable


def slow_dry(history: list[int], allowed: int, breakers: dict[int, tuple[tuple[int, ...], ...]]) -> dict[int, int]:
    """Longest repetition that each token would extend, by trying all lengths at all places."""
    limit = len(history)
    for at in reversed(range(len(history))):
        rest = history[at + 1 :]
        lengths = [len(t) for t in breakers.get(history[at], ()) if tuple(rest[: len(t)]) == t]
        if lengths:
            limit = len(rest) - max(lengths)
            break
    found: dict[int, int] = {}
    for end in range(len(history) - 1):
        longest = 0
        while longest < min(limit, end + 1) and history[end - longest] == history[-1 - longest]:
            longest += 1
        token = history[end + 1]
        if longest >= max(allowed, 1) and () not in breakers.get(token, ()):
            found[token] = max(found.get(token, 0), longest)
    return found


@given(
    st.lists(st.integers(0, 4), max_size=60),
    st.integers(1, 4),
    st.dictionaries(
        st.integers(0, 4),
        st.lists(st.lists(st.integers(0, 4), max_size=2).map(tuple), max_size=2).map(tuple),
        max_size=2,
    ),
)
@settings(deadline=None, max_examples=150)
def test_dry_finds_all_repetitions(history: list[int], allowed: int, breakers: dict) -> None:
    dry = Dry(replace(NEUTRAL, dry_multiplier=1.0, dry_allowed_length=allowed), breakers, 5)
    tokens, lengths = dry.repeats(np.array(history, np.int64))
    assert dict(zip(tokens.tolist(), lengths.tolist(), strict=True)) == slow_dry(history, allowed, breakers)


def test_of_two_breakers_with_one_head_the_longer_counts() -> None:
    history = np.array([3, 5, 6, 9, 1, 2, 3, 5, 6], np.int64)
    params = replace(NEUTRAL, dry_multiplier=1.0, dry_allowed_length=1)
    for tails, length in (
        (((2,), (2, 3)), 2),  # 1 2 3 broke last: 5 6 is left to repeat
        (((2, 3), (2,)), 2),
        (((2,), (2, 4)), 3),  # only 1 2 did
        (((2, 3, 5), ()), 1),
        (((2, 3, 5, 6), (2, 3)), 0),
        (((2, 3, 5, 6, 9), ()), 3),  # longer than what there is
    ):
        tokens, lengths = Dry(params, {1: tails}, 10).repeats(history)
        assert dict(zip(tokens.tolist(), lengths.tolist(), strict=True)) == ({9: length} if length else {})


def test_dry_penalties_stay_finite() -> None:
    history = [1] * 400
    logits = np.zeros(3, np.float32)
    for allowed in (2, 1, 0):
        params = replace(NEUTRAL, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=allowed)
        dry = Dry(params, {}, 3)
        assert dry.repeats(np.array(history, np.int64))[1].tolist() == [max(allowed, 1) + 115]  # 80 / ln 2
        for c in (Candidates(None, logits), Candidates(np.array([2, 1]), logits[:2].astype(np.float64))):
            found = dry.apply(c, np.array(history, np.int64)).logits
            assert found[1] == -(2.0**114) and found[0] == 0
        dry = Dry(replace(params, dry_base=1.0), {}, 3)  # does not grow
        assert dry.apply(Candidates(None, logits), np.array(history, np.int64)).logits.tolist() == [0, -0.5, 0]


def test_dry_at_the_edges() -> None:
    params = replace(NEUTRAL, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    logits = np.zeros(6, np.float32)
    for history, penalties in (
        ([1, 2, 3, 1, 2], {3: 1}),  # just as long as allowed
        ([0, 2, 3, 1, 2], {}),  # one shorter
        ([4, 1, 2, 3, 4, 1, 2], {3: 2}),
        ([4, 1, 2, 3, 0, 1, 2, 5, 4, 1, 2], {3: 2, 5: 1}),
        ([4, 1, 2, 3, 0, 1, 2, 3, 4, 1, 2], {3: 2}),  # the longest counts
        ([1, 1, 1], {1: 1}),
        ([1, 1], {}),
        ([2, 9, 2, 9, 2], {}),  # 9 is outside of the vocabulary
    ):
        c = Dry(params, {}, 6).apply(Candidates(None, logits), np.array(history, np.int64))
        assert {i: -x for i, x in enumerate(c.logits.tolist()) if x} == penalties, history
    logits[3] = 0.5
    for changes, token in (
        ({}, 0),
        ({"dry_base": 1.0}, 0),
        ({"dry_base": 0.99}, 3),
        ({"dry_multiplier": 0.0}, 3),
        ({"dry_multiplier": -1.0, "logit_bias": ((3, -1.0),)}, 3),
        ({"dry_penalty_last_n": 0}, 3),
    ):
        greedy = replace(params, temperature=0, **changes)  # type: ignore[arg-type]
        assert make(greedy, 6, [1, 2, 3, 1, 2]).sample(logits).id == token
    window = np.array([4, 1, 2, 3, 4, 1, 2], np.int64)
    for n, length in ((7, 3), (6, 2), (5, 0), (-1, 3)):  # what the window cuts off is not repeated
        lengths = Dry(replace(params, dry_penalty_last_n=n), {}, 6).repeats(window)[1]
        assert lengths.tolist() == ([length] if length else [])


def test_long_breakers_are_cut() -> None:
    found = find_breakers(["x" * 45], ["x", "x" * 40, "y"], lambda text: list(range(len(text))))
    assert found == {0: (tuple(range(20)),), 1: ((), *found[1][1:])}


def test_dry_penalty_and_greedy() -> None:
    params = replace(NEUTRAL, temperature=0, dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=2)
    history = [5, 6, 7, 1, 5, 6, 7]  # 1 would repeat 5 6 7
    logits = np.zeros(10, np.float32)
    logits[1], logits[2] = 1.61, 0.0
    assert make(params, 10, history).sample(logits).id == 1  # penalty 0.8 * 2 ** 1
    logits[1] = 1.59
    assert make(params, 10, history).sample(logits).id == 0
    assert make(replace(params, dry_penalty_last_n=4), 10, history).sample(logits).id == 1
    assert make(replace(params, dry_allowed_length=4), 10, history).sample(logits).id == 1
    broken = make(params, 10, history, breakers=lambda _: {6: ((),)})
    assert broken.sample(logits).id == 1
    assert len(find_breakers(["\n"], ["a", "\n", "x\ny"], lambda _: [])) == 2


def test_breakers_that_span_tokens() -> None:
    pieces = ["a", "ab", "b", "abc", "xa", "bc"]
    found = find_breakers(["abc"], pieces, lambda text: {"bc": [5], "c": [9]}[text])
    assert found == {0: ((5,),), 1: ((9,),), 3: ((),), 4: ((5,),)}

    class Fake:
        n_vocab = 6

        def token_text(self, token: int) -> str:
            return pieces[token]

        def encode(self, text: str, **_: bool) -> list[int]:
            return [pieces.index(text)]

    table = BreakerTable(Fake())  # type: ignore[arg-type]
    assert table(("b", "xa")) == {1: ((),), 2: ((),), 3: ((),), 5: ((),), 4: ((),)}
