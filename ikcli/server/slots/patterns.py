"""Regular expressions of clients, searched for by RE2 in linear time: no pattern and no text makes a search slow.

The syntax is that of RE2, read as ECMAScript reads it: `.` matches no line end of any kind, `\\s` any Unicode space,
`\\u4e2d` is a character. RE2 refuses look-around and back references, which nothing linear can follow. It cannot tell
whether text could still become a match. That is not needed: the server holds back a number of tokens (`Bans.n_held`).
"""

from __future__ import annotations

import re

import re2

MAX_LENGTH = 1000
"""Characters of a pattern; as many tokens are held back for it."""
_MAX_MEMORY = 1 << 20
"""Bytes that RE2 may use per pattern, for the program and for the states it keeps."""
_NOT_LINEAR = ("invalid perl operator", "invalid escape sequence")
_PARTS = re.compile(r"\\u([0-9a-fA-F]{4})|(\\.)|(\(\?[a-zA-Z-]+[:)])|\[:\^?[a-z]+:\]|(\[\^?)(\]?)|(\])|(\.)", re.DOTALL)
_SPACE = r"\s\v\x{1c}-\x{1f}\x{85}\p{Z}"
_ESCAPES = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]", r"\Z": r"\z"}
_ESCAPES_IN_CLASS = {
    r"\s": _SPACE,
    r"\S": r"\x00-\x08\x0e-\x1b!-\x{84}\x{86}-\x{9f}\x{a1}-\x{167f}\x{1681}-\x{1fff}\x{200b}-\x{2027}\x{202a}-\x{202e}"
    r"\x{2030}-\x{205e}\x{2060}-\x{2fff}\x{3001}-\x{10ffff}",
}


class PatternError(ValueError):
    """A pattern that cannot be used; the text says why."""


class Pattern:
    """A compiled pattern."""

    def __init__(self, text: str, *, ignore_case: bool = False) -> None:
        """Compile `text`; PatternError if RE2 cannot."""
        if len(text) > MAX_LENGTH:
            raise PatternError(f"is longer than {MAX_LENGTH} characters")
        self.text = text
        options = re2.Options()
        options.case_sensitive = not ignore_case
        options.longest_match = True  # or `a??` would match nothing where it could match a character
        options.max_mem = _MAX_MEMORY
        options.log_errors = False
        try:
            self._compiled = re2.compile(_as_re2(text), options)
        except UnicodeEncodeError:
            raise PatternError("is not a regular expression: it has half a surrogate pair") from None
        except re2.error as error:
            reason = error.args[0].decode(errors="replace")[:100]
            if reason.startswith(_NOT_LINEAR):
                reason += " (look-around, a back reference or something else that is not supported)"
            raise PatternError(f"is not a regular expression of RE2: {reason}") from None

    def search(self, text: str, before: str = "") -> int:
        """Return the index of the leftmost match that is not empty, or -1; `before` is the character before `text`."""
        for match in self._compiled.finditer(before + text, len(before)):
            if match.end() > match.start():
                return int(match.start()) - len(before)
        return -1


def _as_re2(text: str) -> str:
    """Write the parts of a pattern that RE2 reads otherwise, or not at all, as it reads them."""
    in_class = False

    def replaced(part: re.Match[str]) -> str:
        nonlocal in_class
        code, escape, flags, opening, first, closing, dot = part.groups()
        if code:
            return rf"\x{{{code}}}"
        if escape in (r"\C", r"\Q"):
            raise PatternError(f"has {escape} inside, which is not supported")
        if escape:
            return (_ESCAPES_IN_CLASS if in_class else _ESCAPES).get(escape, escape)
        if flags and not in_class:
            raise PatternError("has flags inside; use the field for patterns that ignore case")
        if opening:
            in_class = not (in_class and first)  # a "]" is a member where it comes first
        elif closing:
            in_class = False
        elif dot and not in_class:
            return r"[^\n\r\x{2028}\x{2029}]"
        return part[0]

    return _PARTS.sub(replaced, text)
