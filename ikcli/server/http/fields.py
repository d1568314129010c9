"""Checks of single JSON values; each returns the value or raises ApiError 400 naming the field and what it expects."""

from __future__ import annotations

import math
from typing import Any

from ikcli.server.http.errors import bad_request


def boolean(value: Any, name: str) -> bool:
    """Return a JSON boolean."""
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false, not {shown(value)}")
    return value


def integer(value: Any, name: str, low: float | None = None, high: float | None = None) -> int:
    """Return a JSON number without a fraction, within limits."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_request(f"{name} must be an integer, not {shown(value)}")
    if not -(2**63) <= value < 2**64:
        raise bad_request(f"{name} is out of range")
    if (low is not None and value < low) or (high is not None and value > high):
        raise bad_request(f"{name} must be {range_text(low, high)}, not {shown(value)}")
    return value


def real(value: Any, name: str) -> float:
    """Return a finite JSON number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad_request(f"{name} must be a number, not {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > 3.4e38:
        raise bad_request(f"{name} must be a finite number")
    return number


def text(value: Any, name: str) -> str:
    """Return a JSON string."""
    if not isinstance(value, str):
        raise bad_request(f"{name} must be a string, not {shown(value)}")
    return value


def texts(value: Any, name: str) -> tuple[str, ...]:
    """Return the texts of a JSON string or an array of strings, without empty strings."""
    if isinstance(value, str):
        return (value,) if value else ()
    if not isinstance(value, list):
        raise bad_request(f"{name} must be a string or an array of strings, not {shown(value)}")
    return tuple(item for i, item in enumerate(value) if text(item, f"{name}[{i}]"))


def array(value: Any, name: str) -> list[Any]:
    """Return a JSON array."""
    if not isinstance(value, list):
        raise bad_request(f"{name} must be an array, not {shown(value)}")
    return value


def table(value: Any, name: str) -> dict[str, Any]:
    """Return a JSON object."""
    if not isinstance(value, dict):
        raise bad_request(f"{name} must be an object, not {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Return a value as error messages show it: shortened, containers by their kind."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value[:40]}"' + ("..." if len(value) > 40 else "")
    return str(value)[:40]


def range_text(low: float | None, high: float | None, above: float | None = None) -> str:
    """Describe the numbers that a range allows."""
    if above is not None:
        return f"greater than {above:.12g}"
    if low is not None and high is not None:
        return f"from {low:.12g} to {high:.12g}"
    return f"at least {low:.12g}" if low is not None else f"at most {high:.12g}"
