"""Take long strings out of JSON text before it is parsed: the base64 of images, which a parser reads letter by letter.

Whether a stretch between two quotes is a string of its own shows when the rest is parsed: only then is its placeholder
one of the values.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

_LEAST_TEXT, _LEAST_STRING = 1 << 17, 1 << 13
_MOST_QUOTES = 1 << 16  # a text with more before its long strings is parsed as it is
_NONCE = secrets.token_hex(8)


class LongStrings:
    """JSON text without its long strings, and these."""

    def __init__(self, data: bytes) -> None:
        """Cut `data`; strings with escapes or other letters than those of ASCII stay in it."""
        self.rest, self._found = data, list[str]()
        if len(data) < _LEAST_TEXT:
            return
        parts, end, start = [], 0, data.find(b'"') + 1
        for _ in range(_MOST_QUOTES):
            stop = data.find(b'"', start)
            if not start or stop < 0:
                break
            if stop - start >= _LEAST_STRING and _is_plain(data, start, stop):
                parts += [data[end:start], self._placeholder(len(self._found)).encode()]
                self._found.append(data[start:stop].decode("ascii"))
                end = stop
            start = stop + 1
        if parts:
            self.rest = b"".join([*parts, data[end:]])

    def __bool__(self) -> bool:
        return bool(self._found)

    @staticmethod
    def _placeholder(i: int) -> str:
        return f"<{_NONCE}.{i}>"

    def put_back(self, value: Any) -> bool:
        """Put the strings in the places of their placeholders in a parsed value; return whether all had one."""
        places = {self._placeholder(i): text for i, text in enumerate(self._found)}
        todo = [value]
        while todo:
            inner = todo.pop()
            items = inner.items() if isinstance(inner, dict) else enumerate(inner)
            for key, item in list(items):
                if isinstance(item, dict | list):
                    todo.append(item)
                elif isinstance(item, str) and item in places:
                    inner[key] = places.pop(item)
        return not places


def _is_plain(data: bytes, start: int, stop: int) -> bool:
    """Return whether a stretch is ASCII without control characters and escapes, those of its quotes included."""
    if data.find(b"\\", max(start - 2, 0), stop) >= 0:
        return False
    codes = np.frombuffer(data, np.uint8, stop - start, start)
    return bool(codes.min() >= ord(" ") and codes.max() < 128)
