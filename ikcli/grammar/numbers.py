"""Check numbers in schemas: llguidance reads them as float64 and computes integers with signed 64 bits.

A bound beyond 2**53 may not be representable: it moves outwards to the next one that is, never inwards.
An integer upper bound of 2**63 or more limits only the number of digits. Every other number that would change meaning
(llguidance saturates, and some numbers crash it) is refused here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

MOST_DIGITS = 16
"""Digits in a row that a JSON number may have, as in llama-server; more if its schema has more."""

_EXACT, _END = 2**53, 2**63
_FORMATS = {"int64": 19, "uint64": 20}
UPPER = frozenset({"maximum", "exclusiveMaximum"})
BOUNDS = UPPER | {"minimum", "exclusiveMinimum"}


class UnusableError(ValueError):
    """A value that a keyword cannot take; the text says why."""


def shown(value: Any) -> str:
    """Format a value of a schema for messages."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def bound(key: str, value: Any, types: Any) -> int | float | bool | None:
    """Return a bound that llguidance can hold, for numbers of these `types`; None without one."""
    if isinstance(value, bool) and key.startswith("exclusive"):
        return value  # draft 4
    value = checked_number(value)
    names = types if isinstance(types, list) else [types]
    integers = "integer" in names and "number" not in names
    if not integers:
        if abs(value) >= _END:
            raise UnusableError(f"{shown(value)} is beyond what can be followed, -2^63 to 2^63 (both excluded)")
        return value if abs(value) <= _EXACT else float(value)
    if key in UPPER and value >= _END:
        return None
    if abs(value) >= _END:
        raise UnusableError(f"{shown(value)} is beyond what can be followed, integers from -2^63+1024 to 2^63-1")
    if abs(value) <= _EXACT or int(float(value)) == value != _END - 1:
        return value
    outwards = math.inf if key in UPPER else -math.inf
    held = float(value)
    if (held < value) if key in UPPER else (held > value):
        held = math.nextafter(held, outwards)
    if held <= -_END:
        raise UnusableError(f"{shown(value)} is beyond what can be followed, integers from -2^63+1024 to 2^63-1")
    return int(held)  # floats are not always read exactly


def checked_number(value: Any) -> int | float:
    """Return `value`; raise UnusableError if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnusableError(f"must be a number, not {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableError(f"must be a finite number, not {value}")
    return value


def check_literals(value: Any) -> None:
    """Refuse a JSON value with numbers that would change."""
    for number in _numbers(value):
        checked_number(number)
        if isinstance(number, int) and number != _written(number):
            raise UnusableError(f"{shown(number)} cannot be held exactly; write it as text")


def _written(number: int) -> int | None:
    """Return the text that llguidance writes for a whole number."""
    if -_END <= number < _END:
        held = min(int(float(number)), _END - 1)
        return None if held <= -_END else held
    return int(Decimal(repr(float(number)))) if abs(number) < 10**308 else None


def most_digits(schema: Any) -> int:
    """Return how many digits in a row numbers under a schema may need."""
    most = MOST_DIGITS
    for part in _parts(schema):
        if isinstance(part, Mapping) and isinstance(part.get("format"), str):
            most = max(most, _FORMATS.get(part["format"], 0))
        if isinstance(part, int | float) and not isinstance(part, bool) and abs(part) < 1e100 and part == part:
            shown = str(part) if isinstance(part, int) else format(Decimal(repr(part)), "f")
            most = max(most, *(len(digits) for digits in re.findall("[0-9]+", shown)))
    return most


def _numbers(value: Any) -> list[int | float]:
    return [part for part in _parts(value) if isinstance(part, int | float) and not isinstance(part, bool)]


def _parts(value: Any) -> list[Any]:
    """Return a JSON value and everything in it."""
    found, waiting = [], [value]
    while waiting:
        part = waiting.pop()
        found.append(part)
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
    return found
