"""Patterns of clients: the same matches as Python's `re` finds, and no slow ones."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikcli.server.slots.patterns import Pattern, PatternError

ATOMS = ("a", "b", ".", "[ab]", "[^a]", r"\w", r"\s", r"\D", "(ab)", "(?:a|ab)", "^", "[b-d_]", "(?:ab)?")
REPEATS = ("", "*", "+", "?", "{2}", "{1,3}", "*?")


def leftmost(pattern: str, text: str) -> int:
    """Where the leftmost match that is not empty begins, by trying all pieces of the text."""
    compiled = re.compile(pattern, re.ASCII)
    places = ((i, j) for i in range(len(text)) for j in range(i + 1, len(text) + 1))
    return next((i for i, j in places if compiled.fullmatch(text, i, j)), -1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPEATS)), min_size=1, max_size=4),
    st.text(alphabet="ab c_1\n", max_size=9),
)
def test_as_re(parts: list[tuple[str, str]], text: str) -> None:
    pattern = "".join(f"(?:{atom}){repeat}" for atom, repeat in parts if not (atom == "^" and repeat))
    assert Pattern(pattern).search(text) == leftmost(pattern.replace(".", r"[^\n]"), text)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"\bcat\b", "concat cat", 7),
        (r"\Bcat", "cat concat", 7),
        (r"end$", "end the end", 8),
        (r"a|bc|d{3}", "xxddd", 2),
        ("x*", "aaa", -1),
        ("é+", "caféé", 3),
        ("a.b", "a\rb a\u2028b a\nb a\u00a0b", 12),
        (r"a\sb[\s,]c", "acb a\u00a0b\u3000c", 4),
        (r"[^\S\n]b[\Sx]", "b! \nb! \u2003b\u2003 \u2003b!", 11),
        (r"[.]\.[a[]b[]x]\u4e2d", "aaa[b]中 ..[b]中", 8),
        ("[[:digit:].]z.", "az\n 1z\n.z!", 7),
        (r"a\.\\.", r"axx a.\!", 4),
        ("[a[].x", "a\rx [zx", 4),
        ("(a|b)*c*?", "xyzc", 3),
    ],
)
def test_places_and_alternatives(pattern: str, text: str, expected: int) -> None:
    assert Pattern(pattern).search(text) == expected


def test_what_comes_before_the_text() -> None:
    assert Pattern("^a").search("a") == 0 and Pattern("^a").search("a", "x") == -1
    assert Pattern(r"\bcat").search("cat", "x") == -1 and Pattern(r"\bcat").search("cat", " ") == 0


def test_case() -> None:
    assert Pattern("ab[c-e]", ignore_case=True).search("xABD") == 1
    assert Pattern("[^a]", ignore_case=True).search("Ab") == 1
    assert Pattern("ab").search("xAB") == -1


def test_patterns_that_would_take_for_ever_elsewhere() -> None:
    assert Pattern("((a+)+)+c").search("a" * 500) == -1
    assert Pattern("(a|aa)+$").search("a" * 500 + "b") == -1
    assert Pattern("(a?){40}a{40}").search("a" * 40) == 0


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        "(?=a)",
        r"(a)\1",
        "a{5000}",
        "(?i:a)",
        "a++",
        r"\p",
        "(" * 5000,
        "(" * 900,
        "a" * 1001,
        "(a{9}){200}{9}",
        r"\C",
        r"\Qa",
        "\ud800",
    ],
)
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        Pattern(pattern)
