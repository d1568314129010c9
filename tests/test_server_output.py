"""The text of a generation as it grows: what is sent when, where it is cut, which token a banned text begins with."""

from __future__ import annotations

import pytest
from test_grammar_gbnf import EOS, TOKENIZER

from ikcli.server.slots.messages import Bans, TokenInfo
from ikcli.server.slots.output import Output
from ikcli.server.slots.patterns import Pattern

CONTROL = EOS  # without a text
ID = {TOKENIZER.token_bytes(i).decode(): i for i in range(256, EOS - 1)}


def output(*stop: str, bans: Bans | None = None) -> Output:
    return Output(TOKENIZER, stop, bans or Bans())


def add(out: Output, *texts: str | int) -> Output:
    """Tokens: the one with a text, or those of its bytes."""
    for text in texts:
        ids = [text] if isinstance(text, int) else [ID[text]] if text in ID else list(text.encode())
        for i in ids:
            out.add(TokenInfo(i, 0.0))
    return out


def sent(out: Output, everything: bool = False) -> tuple[str, list[int]]:
    text, tokens = out.take(everything=everything)
    return text, [t.id for t in tokens]


@pytest.mark.parametrize(
    ("stop", "texts", "kept", "word"),
    [
        (("c", "b"), ("abc",), "a", "b"),  # the first one in the text
        (("b", "c"), ("abc",), "a", "b"),
        (("bc", "b"), ("abc",), "a", "b"),
        (("abcd", "bc"), ("abc", "d"), "a", "bc"),  # complete before the longer one
        (("the",), ("x", " the", "y"), "x ", "the"),
        (("",), ("abc",), "abc", ""),
        (("é",), ("caf", "é!"), "caf", "é"),
    ],
)
def test_stop_texts(stop: tuple[str, ...], texts: tuple[str, ...], kept: str, word: str) -> None:
    out = output(*stop)
    found = False
    for text in texts:
        for i in [ID[text]] if text in ID else list(text.encode()):
            if not found:
                add(out, i)
                found = out.check_stop()
    assert (found, out.text, out.stopping_word) == (bool(word), kept, word)
    assert all(start < len(kept) for start in out.starts) and len(out.tokens) == len(out.starts)


def test_text_that_may_become_a_stop_text_waits() -> None:
    for stop, texts, certain in (
        ("bX", ("a", "b"), "a"),
        ("aab", ("x", "aa"), "x"),
        ("aab", ("x", "aaa"), "xa"),
        ("abc", ("x", "a"), "x"),
        ("b", ("x", "a"), "xa"),
        ("abX", ("abc",), "abc"),
        ("abcX", ("x", "abc"), "x"),
    ):
        out = add(output("never", stop), *texts)
        assert sent(out)[0] == certain
        assert certain + sent(out, everything=True)[0] == "".join(texts) == out.text


def test_tokens_are_sent_with_the_beginning_of_their_text() -> None:
    out = add(output("bX"), "a", "b")
    assert sent(out) == ("a", [97])  # the second token begins where what waits begins
    assert sent(out) == ("", [])
    assert sent(add(out, "c")) == ("bc", [98, 99])
    out = add(output("cX"), "abc")
    assert sent(out) == ("ab", [ID["abc"]])
    assert sent(add(out, "d")) == ("cd", [100])
    out = add(output(), "a", CONTROL)
    assert sent(out) == ("a", [97, CONTROL])
    assert sent(add(out, CONTROL)) == ("", []) and sent(add(out, "b")) == ("b", [CONTROL, 98])
    assert sent(add(out, CONTROL), everything=True) == ("", [CONTROL])


def test_what_was_sent_is_not_cut() -> None:
    out = add(output("b"), "a", CONTROL)
    assert sent(out) == ("a", [97, CONTROL])
    add(out, "b")
    assert out.check_stop() and [t.id for t in out.tokens] == [97, CONTROL] and out.starts == [0, 1]
    out = add(output("b"), "a", CONTROL, "b")
    assert out.check_stop() and [t.id for t in out.tokens] == [97]


def test_a_banned_text_begins_with_the_token_that_it_begins_in() -> None:
    for texts, bad, index in (
        (("x", "abc"), "c", 1),
        (("x", "abc", "d"), "cd", 1),
        (("ab", "abc"), "ba", 0),
        (("ab", "abc"), "A", 0),
        (("ab", "abc"), "c", 1),
        (("ab", CONTROL, "x"), "x", 2),
    ):
        out = add(output(bans=Bans((bad,))), *texts)
        assert out.find_banned() == index
        out = add(output(bans=Bans(patterns=(Pattern(bad, ignore_case=True),))), *texts)
        assert out.find_banned() == index
    assert add(output(bans=Bans(("cd", "b"))), "abcd").find_banned() == 1  # the first of two
    assert add(output(bans=Bans(("cd", "b"))), "acdb").find_banned() == 1
    assert output().find_banned() is None and add(output(bans=Bans(("z",))), "abc").find_banned() is None


def test_tokens_of_which_a_part_was_sent_stay() -> None:
    out = add(output("heX", bans=Bans(patterns=(Pattern("hey"),), buffer=1)), "the")
    assert sent(out) == ("t", [ID["the"]])
    assert add(out, "y").find_banned() == 1
    out.rewind(1)
    assert sent(out, everything=True) == ("he", [])


def test_all_of_a_token_waits_in_which_a_banned_text_may_begin() -> None:
    for bans, texts, certain in (
        (Bans(("cX",)), ("x", "abc"), "x"),
        (Bans(("CX",)), ("x", "abc"), "x"),
        (Bans(("cX", "abcX")), ("x", "y", "abc"), "xy"),
        (Bans(("cX",)), ("x", "abc", "d"), "xabcd"),
        (Bans(patterns=(Pattern("abc"),)), ("vwxyz",), "vw"),
        (Bans(patterns=(Pattern("abc"),), buffer=3), ("vwxyz",), "vwx"),
        (Bans(patterns=(Pattern("abc"),), buffer=1), ("vwxyz",), "vwxyz"),
        (Bans(patterns=(Pattern("a"),), buffer=9), ("vwxyz",), ""),
    ):
        assert sent(add(output(bans=bans), *texts))[0] == certain


def test_what_was_sent_counts_as_the_text_before_a_pattern() -> None:
    word = Bans(patterns=(Pattern(r"\bcat"),), buffer=1)
    for before, banned in (("con", False), ("a ", True)):
        out = add(output(bans=word), before)
        assert sent(out)[0] == before
        assert (add(out, "cat").find_banned() is not None) == banned
    assert add(output(bans=word), "cat").find_banned() == 0  # at the beginning of all


def test_what_was_allowed_stays_allowed_and_what_follows_does_not() -> None:
    out = add(output(bans=Bans(("bad", r"worse"))), "a bad")
    assert out.find_banned() == 2
    out.allow_banned()
    assert out.find_banned() is None and sent(out)[0] == "a bad"
    for text in (" one", " more"):
        add(out, text)
        assert out.find_banned() is None and sent(out)[0] == text
    add(out, "so bad")
    assert out.find_banned() == len("a bad one moreso ")
    out = add(output(bans=Bans(("ab",), patterns=(Pattern("b+c"),))), "ab")
    out.allow_banned()
    assert add(out, "bc").find_banned() == 1  # not where it was allowed
    assert add(output(bans=Bans(("ab",), patterns=(Pattern("b+c"),))), "xbbc").find_banned() == 1


def test_characters_of_several_tokens() -> None:
    out = add(output("é"), "a")
    euro = "€".encode()
    for i, byte in enumerate(euro):
        add(out, byte)
        assert out.text == ("a" if i < 2 else "a€")
    out.rewind(3)
    assert out.text == "a" and len(out.tokens) == 3 == len(out.starts)
    add(out, euro[2])
    assert out.text == "a€"


def test_indentation() -> None:
    def lines(text: str, n_indent: int) -> tuple[bool, str]:
        out, more = output(), True
        for byte in text.encode():
            piece = out.add(TokenInfo(byte, 0.0))
            out.check_stop()
            more = more and out.line_indent(piece, n_indent)
            if not more:
                break
        return more, out.text

    assert lines("a\n  b\n\t c\n\n  d", 2) == (True, "a\n  b\n\t c\n\n  d")
    assert lines("  a\n b", 2) == (False, "  a\n")
    assert lines("a\n  b\nc", 1) == (False, "a\n  b\n")
    assert lines("no line end", 5) == (True, "no line end")
