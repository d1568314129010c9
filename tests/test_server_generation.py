"""One generation without a model: what it knows after a banned text was taken back, and the limits at their edges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_grammar_gbnf import EOS, GRAMMARS, TOKENIZER

from ikcli.sampling import SamplerParams, SamplerVocab
from ikcli.server.slots.generation import Generation, Setting
from ikcli.server.slots.messages import Bans, GenerationRequest, TokenInfo
from ikcli.server.slots.patterns import Pattern

VOCAB = SamplerVocab.from_tokenizer(TOKENIZER)
PROMPT = tuple(b"the bat sat")
GREEDY = SamplerParams(temperature=0)


def generation(n_total: int = 1000, **changes: Any) -> Generation:
    setting = Setting(1000, n_total, False, TOKENIZER, VOCAB)
    fields: dict[str, Any] = {"prompt": PROMPT, "sampling": GREEDY} | changes
    return Generation(GenerationRequest(**fields), setting, 0)


def write(g: Generation, text: Iterable[int], rng: np.random.Generator | None = None) -> None:
    """Have the generation choose these tokens, as the engine does."""
    for token in text:
        logits = np.zeros(VOCAB.n_vocab, np.float32) if rng is None else rng.normal(size=VOCAB.n_vocab).astype("f4")
        logits[token] = 1000
        chosen = g.choose(logits)
        assert chosen.id == token
        g.push(chosen)


def counts(g: Generation) -> dict[int, float]:
    """Tokens of the window of the penalties, and how often each is there."""
    penalties = g.sampler._penalties
    assert penalties is not None
    return {token: n for token, slot in penalties._slots.items() if (n := float(penalties._counts[slot]))}


def state(g: Generation) -> dict[str, Any]:
    """All that what follows depends on."""
    s, out = g.sampler, g.output
    return {
        "history": list(g.history),
        "sampler": s._history.tokens.tolist(),
        "penalties": counts(g),
        "dry": [part.tolist() for part in s._dry.repeats(s._history.tokens)] if s._dry else None,
        "mirostat": list(s._mirostat._mu) if s._mirostat else None,
        "adaptive": list(s._adaptive._sums) if s._adaptive else None,
        "mask": g.constraint.mask().tolist() if g.constraint else None,  # type: ignore[union-attr]
        "text": (out.text, [t.id for t in out.tokens], list(out.starts), out.n_total),
        "lines": out.has_new_line,
        "end": (g.stop_type, out.stopping_word, g.truncated, g.n_remain),
    }


PENALTIES = {
    "repeat_penalty": 1.3,
    "frequency_penalty": 0.5,
    "dry_multiplier": 1.0,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": ("\n",),
}
SAMPLINGS = {
    "greedy": SamplerParams(temperature=0, repeat_last_n=-1, **PENALTIES),  # type: ignore[arg-type]
    "window": SamplerParams(temperature=0, repeat_last_n=6, dry_penalty_last_n=9, **PENALTIES),  # type: ignore[arg-type]
    "mirostat": SamplerParams(seed=1, mirostat=2, **PENALTIES),  # type: ignore[arg-type]
    "adaptive": SamplerParams(seed=1, adaptive_target=0.4, **PENALTIES),  # type: ignore[arg-type]
    "own prompt": SamplerParams(temperature=0, penalty_prompt=tuple(b"xyz"), **PENALTIES),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kept", ["", "the b", "a sat on", "one\ntwo "])
@pytest.mark.parametrize("bad", ["bad", "b\nad", "bat sat"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_after_a_banned_text_all_is_as_before_it(sampling: str, bad: str, kept: str) -> None:
    grammar = GRAMMARS.gbnf('root ::= "a" [a-z\\n ]* | [b-z] [a-z\\n ]*')
    more: dict[str, Any] = {"sampling": SAMPLINGS[sampling], "constraint": grammar, "n_predict": 50}
    other = generation(**more)
    write(other, kept.encode(), np.random.default_rng(3))
    g = generation(bans=Bans((bad,), counts=False), **more)
    write(g, kept.encode(), np.random.default_rng(3))
    for _ in range(2):
        write(g, bad.encode()[:-1])
        assert g.rewind_banned() == 0
        write(g, bad.encode()[-1:])
        assert g.rewind_banned() == len(bad)
        assert state(g) == state(other)
        g._bans.clear()
    rng = np.random.default_rng(5)
    write(g, b"q", np.random.default_rng(4))
    write(other, b"q", np.random.default_rng(4))
    assert state(g) == state(other)
    if sampling != "mirostat" and sampling != "adaptive":
        logits = [rng.normal(size=VOCAB.n_vocab).astype(np.float32) for _ in range(20)]
        assert [g.choose(row).id for row in logits] == [other.choose(row).id for row in logits]


def test_the_tokens_of_a_banned_text_are_banned_where_they_were() -> None:
    for n_tokens, banned in ((1, [{98}]), (2, [{98, 97}]), (-1, [{98, 97, 100}])):
        g = generation(bans=Bans(("bad",), n_tokens=n_tokens))
        write(g, b"x bad")
        assert g.rewind_banned() == 3
        assert list(g._bans) == [2] and [g._bans[2]] == banned
        logits = np.zeros(VOCAB.n_vocab, np.float32)
        logits[98], logits[99] = 9, 8
        assert g.choose(logits).id == 99
        write(g, b"o")
        assert g.choose(logits).id == 98  # banned at that place alone


def test_every_attempt_at_a_place_bans_one_more_token() -> None:
    g = generation(bans=Bans(("bad", "cad", "ed")))
    for bad, banned in ((b"xbad", {98}), (b"cad", {98, 99}), (b"ed", {98, 99, 101})):
        write(g, bad)
        g.rewind_banned()
        assert g._bans == {1: banned} and g.output.text == "x"


def test_an_earlier_banned_text_forgets_what_was_banned_after_it() -> None:
    g = generation(bans=Bans(("bad", "xo bed")))
    write(g, b"xo bad")
    assert g.rewind_banned() == 3 and set(g._bans) == {3}
    write(g, b"cd")
    g.output.rewind(3)
    g.sampler.rollback(2)
    del g.history[-2:]
    g._bans.clear()
    write(g, b"bed")
    assert g.rewind_banned() == 6 and set(g._bans) == {0} and g.history == list(PROMPT)


def test_attempts_are_counted_until_the_text_gets_further() -> None:
    g = generation(bans=Bans(("bad",), max_rewinds=2))
    for n in (3, 3, 0):
        write(g, b"bad") if not g._bans else [g.push(TokenInfo(i, 0.0)) for i in b"bad"]
        assert g.rewind_banned() == n
    assert g.output.text == "bad"
    [g.push(TokenInfo(i, 0.0)) for i in b" bad"]
    assert g.rewind_banned() == 3  # further on attempts begin again
    assert g.output.text == "bad "


def test_what_a_token_that_is_taken_back_ended_goes_on() -> None:
    token = next(i for i in range(TOKENIZER.n_vocab) if TOKENIZER.token_bytes(i) == b"abc")
    g = generation(stop=("c",), bans=Bans(("b",)), n_predict=5)
    assert not g.push(TokenInfo(token, 0.0)) and (g.stop_type, g.output.stopping_word) == ("word", "c")
    assert g.rewind_banned() == 1 and (g.stop_type, g.output.stopping_word, g.output.text) == ("none", "", "")
    g = generation(n_total=len(PROMPT) + 1, bans=Bans(patterns=(Pattern("b"),)))
    assert not g.push(TokenInfo(98, 0.0)) and g.truncated and g.stop_type == "limit"
    assert g.rewind_banned() == 1 and not g.truncated and g.stop_type == "none"
    g.truncated = True  # by a shift of the context
    assert not g.push(TokenInfo(98, 0.0)) and g.rewind_banned() == 1 and g.truncated


def test_lines_that_are_taken_back_have_no_indentation() -> None:
    g = generation(n_indent=2, bans=Bans(("a\n",)))
    write(g, b"qa\n")
    assert g.rewind_banned() == 2
    assert all(g.push(TokenInfo(i, 0.0)) for i in b"word\n  two\n   ")
    assert g.push(TokenInfo(10, 0.0)) and not g.push(TokenInfo(97, 0.0)) and g.output.text == "qword\n  two\n   \n"


def test_limits_at_their_edges() -> None:
    g = generation(n_predict=3)
    assert [g.push(TokenInfo(i, 0.0)) for i in b"abc"] == [True, True, False]
    assert (g.stop_type, g.n_remain, g.truncated) == ("limit", 0, False)
    g = generation(n_total=len(PROMPT) + 3)
    assert [g.push(TokenInfo(i, 0.0)) for i in b"abc"] == [True, True, False]
    assert (g.stop_type, g.n_remain, g.truncated) == ("limit", -1, True)
    g = generation(n_total=len(PROMPT) + 3, n_predict=10)  # a limit of the request's own
    assert [g.push(TokenInfo(i, 0.0)) for i in b"abcd"] == [True] * 4 and g.n_remain == 6
    g = generation(n_predict=3)
    assert not g.push(TokenInfo(EOS, 0.0)) and g.stop_type == "eos" and g.output.text == ""
    g = generation(n_predict=3, stop=("c",))
    assert [g.push(TokenInfo(i, 0.0)) for i in b"abc"] == [True, True, False]
    assert (g.stop_type, g.output.text) == ("word", "ab")  # before the limit
    g = generation(n_predict=1)
    assert not g.push(TokenInfo(EOS, 0.0)) and g.stop_type == "eos"


def test_a_finished_grammar_ends_what_has_no_end_token() -> None:
    grammar = GRAMMARS.gbnf('root ::= "ab"')
    g = generation(constraint=grammar)
    assert [g.push(TokenInfo(i, 0.0)) for i in b"ab"] == [True, True]  # the end token follows
    g = generation(constraint=grammar)
    g._eog = frozenset()
    assert [g.push(TokenInfo(i, 0.0)) for i in b"ab"] == [True, False] and g.stop_type == "eos"


def test_time_ends_at_line_ends_only() -> None:
    g = generation(t_max_predict_ms=1)
    g.prompt_done()
    g.t_prompt_done -= 10
    assert g.push(TokenInfo(97, 0.0)) and not g.push(TokenInfo(10, 0.0)) and g.stop_type == "limit"
    g = generation(t_max_predict_ms=10**9)
    g.prompt_done()
    assert all(g.push(TokenInfo(i, 0.0)) for i in b"a\nb\nc")


def test_bans_count_as_generated_unless_told() -> None:
    for counted, left in ((True, 2), (False, 5)):
        g = generation(n_predict=8, bans=Bans(("bad",), counts=counted))
        write(g, b"abcbad"[:6])
        assert g.n_remain == 2 and g.rewind_banned() == 3 and g.n_remain == left
    assert replace(Bans(), max_rewinds=0).most_rewinds == float("inf")
    assert Bans(("a",) * 11, (Pattern("b"),)).most_rewinds == 24 and Bans(("a",)).most_rewinds == 20
    assert Bans(patterns=(Pattern("abc"), Pattern("d"))).n_held == 3 and Bans(("abcd",)).n_held == 0
    assert Bans(patterns=(Pattern("abc"),), buffer=30).n_held == 29
