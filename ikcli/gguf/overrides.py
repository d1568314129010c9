"""Parse `--override-kv KEY=TYPE:VALUE`, check it against a file and apply it to the metadata."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ikcli.errors import UsageError
from ikcli.gguf.constants import FLOAT_TYPES, INTEGER_TYPES, SCALAR_CODES, GGUFValueType

_EXAMPLE = "expected KEY=TYPE:VALUE with TYPE int, float, bool or str, e.g. deepseek2.expert_used_count=int:6"


def parse_override(text: str) -> tuple[str, int | float | bool | str]:
    """Return (key, value) of `KEY=TYPE:VALUE`; raise a UsageError that quotes a malformed text."""
    key, eq, rest = text.strip().partition("=")
    kind, colon, value = rest.partition(":")
    if not key or not eq or not colon:
        raise UsageError(f"--override-kv '{text}': {_EXAMPLE}")
    try:
        if kind == "int":
            number = int(value)
            if -(2**63) <= number < 2**64:
                return key, number
        elif kind == "float":
            return key, float(value)
        elif kind == "bool" and value in ("true", "false"):
            return key, value == "true"
        elif kind == "str":
            return key, value
    except ValueError:
        pass
    known = kind in ("int", "float", "bool", "str")
    problem = f"'{value}' is not a valid {kind}" if known else f"unknown type '{kind}'"
    raise UsageError(f"--override-kv '{text}': {problem}; {_EXAMPLE}")


def apply_overrides(
    metadata: dict[str, Any],
    value_types: dict[str, GGUFValueType],
    item_types: dict[str, GGUFValueType],
    overrides: Sequence[str],
    path: str,
) -> None:
    """Set the overridden keys in place; raise a UsageError for a value that the key's type in the file cannot hold."""
    for text in overrides:
        key, value = parse_override(text)
        old = value_types.get(key)
        if old == GGUFValueType.ARRAY:
            old = item_types.pop(key)  # a scalar then applies to every layer
        value_types[key], metadata[key] = _fit(value, old, text, path)


def _fit(value: int | float | bool | str, old: GGUFValueType | None, text: str, path: str) -> tuple[GGUFValueType, Any]:
    """Return value and stored type: the type in the file if the key exists, else the usual type of the value."""
    if isinstance(value, bool):
        fits, new = old in (None, GGUFValueType.BOOL), GGUFValueType.BOOL
    elif isinstance(value, int):
        fits, new = old is None or old in INTEGER_TYPES, _int_type(value) if old is None else old
        if fits:
            limits = np.iinfo(SCALAR_CODES[new][0])
            fits = int(limits.min) <= value <= int(limits.max)
    elif isinstance(value, float):
        fits, new = old is None or old in FLOAT_TYPES, GGUFValueType.FLOAT32 if old is None else old
        if fits and new == GGUFValueType.FLOAT32:
            with np.errstate(over="ignore"):
                single = float(np.float32(value))
            fits = math.isfinite(single) or not math.isfinite(value)
            value = single
    else:
        fits, new = old in (None, GGUFValueType.STRING), GGUFValueType.STRING
    if not fits:
        assert old is not None or isinstance(value, float)
        kind = old.name.lower() if old is not None else "float32"
        raise UsageError(f"--override-kv '{text}': the key is of type {kind} in {path} and cannot hold this value")
    return new, value


def _int_type(value: int) -> GGUFValueType:
    if -(2**31) <= value < 2**31:
        return GGUFValueType.INT32
    return GGUFValueType.INT64 if value < 2**63 else GGUFValueType.UINT64
