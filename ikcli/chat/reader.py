"""Read generated text that arrives in pieces, with generators that pause where the text ends and resume with more.

What they return and pass to sinks depends only on the whole text, never on where the pieces were cut.
`Malformed` means that the text breaks its format; the parser then takes it as plain content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

Wait = Generator[None, None, None]
Sink = Callable[[str], None]

SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = frozenset("-+.0123456789eEtrufalsn")
_MAX_DEPTH = 200
_MAX_SCALAR = 4000
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class Malformed(Exception):
    """The text breaks the format that its marker announced."""


class Reader:
    """A position in text that grows until `ended`."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.stripped = ""
        """White space dropped by the last `until` with `strip`."""
        self.keep = -1
        """Position from which text is kept for going back; -1 keeps none."""

    def feed(self, text: str) -> None:
        """Append `text`."""
        start = self.pos if self.keep < 0 else self.keep
        if start > 4096:
            self.text = self.text[start:]
            self.pos -= start
            self.keep = min(self.keep, 0)
        self.text += text

    def at_end(self) -> Generator[None, None, bool]:
        """Return True if the text ends here and no more will come."""
        while self.pos >= len(self.text) and not self.ended:
            yield
        return self.pos >= len(self.text)

    def one_of(self, texts: tuple[str, ...]) -> Generator[None, None, str | None]:
        """Read the longest of `texts` that comes next; None (and nothing read) if none does."""
        while not self.ended:
            rest = len(self.text) - self.pos
            if not any(len(t) > rest and t.startswith(self.text[self.pos :]) for t in texts):
                break
            yield
        for t in sorted(texts, key=len, reverse=True):
            if self.text.startswith(t, self.pos):
                self.pos += len(t)
                return t
        return None

    def optional(self, text: str) -> Generator[None, None, bool]:
        """Read `text` if it comes next."""
        found = yield from self.one_of((text,))
        return found is not None

    def literal(self, text: str) -> Wait:
        """Read `text`, which has to come next; at the end of all text a prefix of it is enough."""
        if not (yield from self.closing(text)):
            raise Malformed(text)

    def closing(self, text: str) -> Generator[None, None, bool]:
        """Read `text` if it comes next, or what there is of it where all text ends."""
        found = yield from self.optional(text)
        if not found and self.ended and text.startswith(self.text[self.pos :]):
            self.pos = len(self.text)
        return found

    def spaces(self) -> Generator[None, None, str]:
        """Read white space, if there is any."""
        out = ""
        while not (yield from self.at_end()):
            char = self.text[self.pos]
            if char not in SPACE:
                break
            out += char
            self.pos += 1
        return out

    def until(self, ends: tuple[str, ...], sink: Sink, *, strip: bool = False) -> Generator[None, None, str | None]:
        """Pass text to `sink` until one of `ends` (read, returned) or the end of all text (None).

        `strip` drops the white space directly before an end.
        """
        while True:
            found = min(((at, -len(e), e) for e in ends if (at := self.text.find(e, self.pos)) >= 0), default=None)
            safe = len(self.text) if self.ended else self.safe_end(ends, self.pos)
            if found is not None and (self.ended or safe > found[0]):
                before = self.text[self.pos : found[0]]
                self.pos = found[0] + len(found[2])
                out = before.rstrip() if strip else before
                self.stripped = before[len(out) :]
                if out:
                    sink(out)
                return found[2]
            out = self.text[self.pos : safe]
            if strip and not self.ended:
                out = out.rstrip()
            if out:
                sink(out)
                self.pos += len(out)
            if self.ended:
                return None
            yield

    def safe_end(self, ends: tuple[str, ...], start: int) -> int:
        """Return the first position from `start` on at which one of `ends` may have begun."""
        size = len(self.text)
        safe = size
        for end in ends:
            for n in range(min(len(end) - 1, size - start), 0, -1):
                if size - n < safe and self.text.endswith(end[:n]):
                    safe = size - n
                    break
        return max(safe, start)

    def collect(self, ends: tuple[str, ...]) -> Generator[None, None, str]:
        """Read up to and including one of `ends` and return the text before it; Malformed if none comes."""
        parts: list[str] = []
        if (yield from self.until(ends, parts.append)) is None:
            raise Malformed(ends[0])
        return "".join(parts)

    def name(self, ends: str, limit: int = 256) -> Generator[None, None, str]:
        """Read a function or parameter name: the characters before one of `ends`, which is left unread."""
        out = ""
        while not (yield from self.at_end()):
            char = self.text[self.pos]
            if char in ends:
                break
            out += char
            self.pos += 1
            if len(out) > limit:
                raise Malformed("name")
        if not out.strip():
            raise Malformed("name")
        return out

    def peek(self) -> Generator[None, None, str]:
        """Return the next character without reading it, or "" at the end."""
        return "" if (yield from self.at_end()) else self.text[self.pos]

    # JSON

    def json_value(self, sink: Sink, depth: int = 0) -> Wait:
        """Read one JSON value and pass its text to `sink` as it is."""
        char = yield from self.peek()
        if depth > _MAX_DEPTH:
            raise Malformed("depth")
        if char == '"':
            yield from self._json_string(lambda raw, _: sink(raw))
        elif char and char in "{[":
            yield from self._json_container(char, sink, depth)
        else:
            yield from self._json_scalar(sink)

    def _json_container(self, opening: str, sink: Sink, depth: int) -> Wait:
        closing = "}" if opening == "{" else "]"
        self.pos += 1
        sink(opening + (yield from self.spaces()))
        if (yield from self.optional(closing)):
            sink(closing)
            return
        while True:
            if opening == "{":
                if (yield from self.peek()) != '"':
                    raise Malformed("key")
                yield from self._json_string(lambda raw, _: sink(raw))
                before = yield from self.spaces()
                yield from self.literal(":")
                sink(before + ":" + (yield from self.spaces()))
            yield from self.json_value(sink, depth + 1)
            before = yield from self.spaces()
            mark = yield from self.one_of((",", closing))
            if mark is None:
                raise Malformed(closing)
            if mark == closing:
                sink(before + closing)
                return
            sink(before + "," + (yield from self.spaces()))

    def _json_scalar(self, sink: Sink) -> Wait:
        out = ""
        while not (yield from self.at_end()):
            char = self.text[self.pos]
            if char not in _SCALAR_CHARS or len(out) > _MAX_SCALAR:
                break
            out += char
            self.pos += 1
        if not _SCALAR.fullmatch(out):
            raise Malformed("value")
        sink(out)

    def json_string(self, sink: Sink) -> Wait:
        """Read one JSON string and pass the text it stands for to `sink`."""
        if (yield from self.peek()) != '"':
            raise Malformed("string")
        yield from self._json_string(lambda _, meaning: sink(meaning) if meaning else None)

    def string(self) -> Generator[None, None, str]:
        """Read a JSON string and return the text it stands for."""
        parts: list[str] = []
        yield from self.json_string(parts.append)
        return "".join(parts)

    def key(self) -> Generator[None, None, str]:
        """Read a JSON string and the colon after it, with white space around them; return the string."""
        yield from self.spaces()
        found = yield from self.string()
        yield from self.spaces()
        yield from self.literal(":")
        yield from self.spaces()
        return found

    def _json_string(self, sink: Callable[[str, str], None]) -> Wait:
        self.pos += 1
        sink('"', "")
        while not (yield from self.at_end()):
            plain = _PLAIN.match(self.text, self.pos)
            if plain:
                self.pos = plain.end()
                sink(plain.group(), plain.group())
                continue
            char = self.text[self.pos]
            if char == '"':
                self.pos += 1
                sink('"', "")
                return
            if char != "\\":
                raise Malformed("string")
            raw = yield from self._escape()
            sink(raw, _ESCAPES[raw[1]] if len(raw) == 2 else _decoded(raw))
        raise Malformed("string")

    def _escape(self) -> Generator[None, None, str]:
        """Read the next escape sequence, both halves of a surrogate pair."""
        raw = yield from self._take(2)
        if raw[1] in _ESCAPES:
            return raw
        if raw[1] != "u":
            raise Malformed("escape")
        raw += yield from self._hex()
        if 0xD800 <= int(raw[2:], 16) < 0xDC00:
            second = yield from self._take(2)
            if second != "\\u":
                raise Malformed("surrogate")
            raw += second + (yield from self._hex())
            if not 0xDC00 <= int(raw[8:], 16) < 0xE000:
                raise Malformed("surrogate")
        elif 0xDC00 <= int(raw[2:], 16) < 0xE000:
            raise Malformed("surrogate")
        return raw

    def _hex(self) -> Generator[None, None, str]:
        digits = yield from self._take(4)
        if not re.fullmatch(r"[0-9a-fA-F]{4}", digits):
            raise Malformed("escape")
        return digits

    def _take(self, n: int) -> Generator[None, None, str]:
        while len(self.text) - self.pos < n and not self.ended:
            yield
        if len(self.text) - self.pos < n:
            raise Malformed("end")
        self.pos += n
        return self.text[self.pos - n : self.pos]


def _decoded(raw: str) -> str:
    return str(json.loads(f'"{raw}"'))
