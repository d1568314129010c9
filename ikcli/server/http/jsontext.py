"""JSON text as llama-server reads and writes it: compact, UTF-8, no NaN, no broken Unicode, bounded nesting."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from json.encoder import encode_basestring
from typing import Any

from ikcli.server.http.long_strings import LongStrings

MAX_DEPTH = 512
"""Maximum nesting depth of arrays and objects in a request."""


def dump(value: Any) -> str:
    """Return compact JSON; infinities and NaN become null."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(_finite(value))


def dump_bytes(value: Any) -> bytes:
    """Return compact JSON in UTF-8; characters that UTF-8 cannot encode become `?`."""
    return dump(value).encode("utf-8", "replace")


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    return encode_basestring(text)


def parse(data: bytes) -> Any:
    """Parse a JSON text. Raise ValueError with one sentence if it is invalid."""
    if long := LongStrings(data):
        with suppress(ValueError):  # with its place in the whole text, below
            value = _parse(long.rest)
            if isinstance(value, dict | list) and long.put_back(value):
                return value
    return _parse(data)


def _parse(data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"the body is not UTF-8 (byte {e.start})") from None
    if text.startswith("\ufeff"):
        text = text[1:]
    if _depth(text) > MAX_DEPTH:
        raise ValueError(f"the body nests arrays or objects more than {MAX_DEPTH} deep")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as e:
        raise ValueError(f"the body is not JSON: {e.msg} at line {e.lineno}, column {e.colno}") from None
    except RecursionError:
        raise ValueError("the body nests arrays or objects too deep") from None
    if "\\" in text and ("\\ud" in text or "\\uD" in text):  # one character is found much sooner than three
        _check_unicode(value)
    return value


_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]+|\\.)*+"|[\[\]{}]', re.S)
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":")).encode


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"the body is not JSON: {name} is no JSON value")


def _depth(text: str) -> int:
    """Return the deepest nesting, or 0 if the text has too few brackets to exceed the limit.

    That first count includes brackets within strings, so only texts with many brackets are examined closely.
    """
    if sum(_count(text, c) for c in "[{") <= MAX_DEPTH:
        return 0
    depth = deepest = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        c = found.group()
        if c in "[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_DEPTH:
                break
        elif c in "]}":
            depth -= 1
    return deepest


def _count(text: str, c: str) -> int:
    """Return how often a character occurs, at most once more than `MAX_DEPTH`; finding is faster than `str.count`."""
    at = -1
    for n in range(MAX_DEPTH + 1):
        at = text.find(c, at + 1)
        if at < 0:
            return n
    return MAX_DEPTH + 1


def _check_unicode(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError("the body holds half of a surrogate pair (\\uD800 to \\uDFFF)") from None
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
