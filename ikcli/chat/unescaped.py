"""Read text without escapes: its closing text ends it only if what comes next may follow.

`Until` defines what may follow, for this reader and for the grammar alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from ikcli.chat.reader import SPACE, Reader, Sink
from ikcli.grammar.spec import Gap, Pattern, Until

_GAPS = {gap: re.compile(gap.value) for gap in (Gap.SPACES, Gap.NAME, Gap.KEY)}
_LONGEST_NAME = 256
_WAIT = -2
_NO = -1


def text_until(
    reader: Reader, untils: Until | tuple[Until, ...], sink: Sink, *, trim: bool = False, strip: bool = False
) -> Generator[None, None, str]:
    """Pass text to `sink` until one of the ends (read, returned); "" if none comes.

    `trim` drops a line break directly before the end, `strip` all white space there (it is then `reader.stripped`).
    """
    search = _Search(untils if isinstance(untils, tuple) else (untils,))
    while True:
        found = search.step(reader)
        last = found is None and reader.ended
        to = found if found is not None else len(reader.text) if last else reader.pos + search.certain
        text = reader.text[reader.pos : to]
        kept = text if last else text.rstrip(SPACE) if strip else text[: -1 if trim and text[-1:] == "\n" else None]
        if kept:
            sink(kept)
            search.certain -= len(kept)
            reader.pos += len(kept)
        if found is not None:
            reader.stripped = text[len(kept) :]
            reader.pos = found + len(search.end)
            return search.end
        if last:
            return ""
        yield


def value_until(reader: Reader, until: Until, whole: Callable[[str], bool]) -> Generator[None, None, str | None]:
    """Read up to the first end with a `whole` value before it, else up to the first end; None if none comes."""
    search = _Search((until,))
    first = ""
    while True:
        found = search.step(reader)
        if found is not None:
            raw = reader.text[reader.pos : found]
            if whole(raw):
                reader.pos = found + len(until.end)
                return raw
            first = first or raw + until.end
            search.certain = found + len(until.end) - reader.pos
            continue
        if reader.ended:
            break
        yield
    if not first:
        return None
    reader.pos += len(first)
    return first[: -len(until.end)]


class _Search:
    """Searches for the end of a text that begins at the reader's position."""

    def __init__(self, untils: tuple[Until, ...]) -> None:
        self._followers = {until.end: until.followers for until in untils}
        self._nested = untils[0].nested
        self._marks = (*self._followers, *((str(self._nested[0][0]),) if self._nested else ()))
        self._inside = False
        self.end = ""
        """The end that was found."""
        self.certain = 0
        """How many characters after the position are certainly text."""

    def step(self, reader: Reader) -> int | None:
        """Return the position of the end, or None (with `certain` advanced) if it has not come yet."""
        while True:
            start = reader.pos + self.certain
            found = [(at, mark) for mark in self._marks if (at := reader.text.find(mark, start)) >= 0]
            if not found:
                self.certain = reader.safe_end(self._marks, start) - reader.pos
                return None
            at, mark = min(found)
            self.certain = at - reader.pos
            if mark not in self._followers:
                to = self._opened(reader, at)
            else:
                after = at + len(mark)
                verdict = _any_matches(self._possible(mark), reader.text, after, reader.ended)
                if verdict:
                    self.end = mark
                    return at
                to = _WAIT if verdict is None else self._closed(reader, at, after)
            if to == _WAIT:
                return None
            self.certain = to - reader.pos

    def _possible(self, end: str) -> tuple[Pattern, ...]:
        """Return what may follow `end` here: within an example only what ends all text."""
        patterns = self._followers[end]
        return tuple(pattern for pattern in patterns if pattern[-1] is Gap.END) if self._inside else patterns

    def _opened(self, reader: Reader, at: int) -> int:
        """Return where to go on after the possible start of an example call."""
        assert self._nested is not None
        to = _NO if self._inside else _match(self._nested[0], reader.text, at, reader.ended)
        if to == _NO:
            return at + 1
        self._inside = to != _WAIT
        return to

    def _closed(self, reader: Reader, at: int, after: int) -> int:
        """Return where to go on after a closing text that belongs to the value."""
        if not self._inside:
            return after
        assert self._nested is not None
        closed = _match(self._nested[1], reader.text, at, reader.ended)
        if closed == _WAIT:
            return _WAIT
        self._inside = closed == _NO
        return max(after, closed)


def _any_matches(patterns: tuple[Pattern, ...], text: str, at: int, ended: bool) -> bool | None:
    """Return whether one of `patterns` (none: always) matches at `at`; None if the text is too short to tell."""
    if not patterns:
        return True
    found = [_match(pattern, text, at, ended) for pattern in patterns]
    if max(found) >= 0:
        return True
    return None if _WAIT in found else False


def _match(pattern: Pattern, text: str, at: int, ended: bool) -> int:
    """Match `pattern` at `at` and return its end; `_NO`, or `_WAIT` if more text is needed to tell.

    At the end of all text it may be cut off.
    """
    more = len(text) if ended else _WAIT
    for part in pattern:
        if part is Gap.END:
            return _NO if at < len(text) else more
        if isinstance(part, str):
            if not text.startswith(part, at):
                return more if part.startswith(text[at:]) else _NO
            at += len(part)
            continue
        gap = _GAPS[part].match(text, at)
        size = gap.end() - at if gap else 0
        at += size
        if at >= len(text) and size <= _LONGEST_NAME:
            return more
        if part is not Gap.SPACES and not 0 < size <= _LONGEST_NAME:
            return _NO
    return at


__all__ = ["text_until", "value_until"]
