"""Regular expressions of clients, matched in linear time: no pattern and no text makes a search slow.

The syntax is that of `re`, which reads nearly all ECMAScript patterns. Look-around and back references are refused, as
no linear algorithm supports them. A search finds where the leftmost non-empty match begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from re import _constants as c  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

MAX_STATES = 2000

Test = Callable[[str], bool]


class PatternError(ValueError):
    """A pattern that cannot be used; the text says why."""


class Pattern:
    """A compiled pattern."""

    def __init__(self, text: str, *, ignore_case: bool = False) -> None:
        self.text, self._ignore_case = text, ignore_case
        # Per state: a test of the next character, of the place between two characters, or neither; and the next state.
        self._tests: list[Test | None] = []
        self._places: list[Callable[[str, str], bool] | None] = []
        self._next: list[list[int]] = []
        if "[[" in text:
            raise PatternError("has [[ inside; write [a-z] for a POSIX class, and \\[ for a bracket")
        try:
            parsed = _parser.parse(text, re.ASCII)
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"is not a regular expression: {error}") from None
        self._start, end = self._sequence(list(parsed))
        self._accept = self._state()
        self._next[end].append(self._accept)

    def search(self, text: str, before: str = "") -> int:
        """Return the index of the leftmost non-empty match, or -1; `before`: the character in front of the text."""
        found: int | None = None
        active: dict[int, int] = {}  # state -> where its match began
        for i in range(len(text) + 1):
            last = text[i - 1] if i else before
            following = text[i] if i < len(text) else ""
            if found is None:
                active.setdefault(self._start, i)
            reached = self._closure(active, last, following)
            begun = reached.get(self._accept)
            if begun is not None and begun < i and (found is None or begun < found):
                found = begun
            if not following:
                break
            active = {}
            for state, begin in reached.items():
                test = self._tests[state]
                if test is not None and (found is None or begin < found) and test(following):
                    for target in self._next[state]:
                        active[target] = min(active.get(target, begin), begin)
            if found is not None and not active:
                break
        return -1 if found is None else found

    def _closure(self, active: dict[int, int], last: str, following: str) -> dict[int, int]:
        """Return all states that are reached without a further character, with the earliest begin."""
        reached: dict[int, int] = {}
        stack = sorted(active.items(), key=lambda item: item[1], reverse=True)
        while stack:
            state, begin = stack.pop()
            if reached.get(state, begin + 1) <= begin:
                continue
            reached[state] = begin
            place = self._places[state]
            if self._tests[state] is None and (place is None or place(last, following)):
                stack.extend((target, begin) for target in self._next[state])
        return reached

    # --- building: every part has an entry and an exit state ---------------------------------------------------------
    def _state(self, test: Test | None = None, place: Callable[[str, str], bool] | None = None) -> int:
        if len(self._next) >= MAX_STATES:
            raise PatternError("is too large")
        self._tests.append(test)
        self._places.append(place)
        self._next.append([])
        return len(self._next) - 1

    def _sequence(self, parts: Sequence[Any]) -> tuple[int, int]:
        start = end = self._state()
        for op, value in parts:
            first, last = self._part(op, value)
            self._next[end].append(first)
            end = last
        return start, end

    def _part(self, op: Any, value: Any) -> tuple[int, int]:
        if op in (c.MAX_REPEAT, c.MIN_REPEAT):
            return self._repeat(*value)
        if op is c.SUBPATTERN:
            _, add, drop, parts = value
            if add or drop:
                raise PatternError("has flags inside; use the field for patterns that ignore case")
            return self._sequence(list(parts))
        if op is c.BRANCH:
            start, end = self._state(), self._state()
            for parts in value[1]:
                first, last = self._sequence(list(parts))
                self._next[start].append(first)
                self._next[last].append(end)
            return start, end
        if op is c.AT:
            first = self._state(place=_place(value))
        else:
            first = self._state(self._test(op, value))
        last = self._state()
        self._next[first].append(last)
        return first, last

    def _repeat(self, least: int, most: Any, parts: Any) -> tuple[int, int]:
        start = end = self._state()
        for _ in range(least):
            first, last = self._sequence(list(parts))
            self._next[end].append(first)
            end = last
        if most is c.MAXREPEAT:
            first, last = self._sequence(list(parts))
            loop = self._state()
            self._next[end].append(loop)
            self._next[loop].append(first)
            self._next[last].append(loop)
            return start, loop
        out = self._state()
        for _ in range(most - least):
            self._next[end].append(out)
            first, last = self._sequence(list(parts))
            self._next[end].append(first)
            end = last
        self._next[end].append(out)
        return start, out

    def _test(self, op: Any, value: Any) -> Test:
        if op is c.ANY:
            return lambda x: x not in "\n\r\u2028\u2029"
        if op in (c.LITERAL, c.NOT_LITERAL):
            return self._either_case(_one(value, value), op is c.NOT_LITERAL)
        if op is c.IN:
            negate = bool(value) and value[0][0] is c.NEGATE
            tests = [_member(item_op, item) for item_op, item in value[negate:]]
            return self._either_case(lambda x: any(test(x) for test in tests), negate)
        raise PatternError("has look-around, a back reference or something else that is not supported")

    def _either_case(self, test: Test, negate: bool) -> Test:
        if not self._ignore_case:
            return (lambda x: not test(x)) if negate else test
        return lambda x: (test(x) or test(x.lower()) or test(x.upper())) != negate


def _one(low: int, high: int) -> Test:
    return lambda x: len(x) == 1 and low <= ord(x) <= high


_CATEGORIES: dict[Any, Test] = {
    c.CATEGORY_DIGIT: lambda x: x in "0123456789",
    c.CATEGORY_SPACE: str.isspace,
    c.CATEGORY_WORD: lambda x: x == "_" or (x.isascii() and x.isalnum()),
}
_OPPOSITES = {
    c.CATEGORY_NOT_DIGIT: c.CATEGORY_DIGIT,
    c.CATEGORY_NOT_SPACE: c.CATEGORY_SPACE,
    c.CATEGORY_NOT_WORD: c.CATEGORY_WORD,
}


def _member(op: Any, value: Any) -> Test:
    if op is c.LITERAL:
        return _one(value, value)
    if op is c.RANGE:
        return _one(*value)
    if value in _OPPOSITES:
        test = _CATEGORIES[_OPPOSITES[value]]
        return lambda x: not test(x)
    return _CATEGORIES[value]


def _place(at: Any) -> Callable[[str, str], bool]:
    word = _CATEGORIES[c.CATEGORY_WORD]

    def boundary(last: str, following: str) -> bool:
        return (bool(last) and word(last)) != (bool(following) and word(following))

    places: dict[Any, Callable[[str, str], bool]] = {
        c.AT_BEGINNING: lambda last, _: not last,
        c.AT_BEGINNING_STRING: lambda last, _: not last,
        c.AT_END: lambda _, following: not following,
        c.AT_END_STRING: lambda _, following: not following,
        c.AT_BOUNDARY: boundary,
        c.AT_NON_BOUNDARY: lambda last, following: not boundary(last, following),
    }
    return places[at]
