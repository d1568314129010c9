"""Metadata values with their GGUF types, and the inference of types of plain Python values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ikcli.errors import FormatError
from ikcli.gguf.constants import SCALAR_CODES, GGUFValueType

_TYPE_OF_DTYPE: dict[np.dtype[Any], GGUFValueType] = {np.dtype(c): t for t, (c, _) in SCALAR_CODES.items()}


@dataclass(frozen=True, slots=True)
class Typed:
    """A `value` to be stored as `type`; `item_type` is the element type of an ARRAY (None: inferred from the value)."""

    value: Any
    type: GGUFValueType
    item_type: GGUFValueType | None = None


def infer_type(value: Any, key: str) -> GGUFValueType:
    """Return the GGUF type of a plain value: bool, u32/i32/u64/i64 by range, f32, string or array."""
    if isinstance(value, bool | np.bool_):
        return GGUFValueType.BOOL
    if isinstance(value, np.generic):
        return _TYPE_OF_DTYPE[value.dtype]
    if isinstance(value, int):
        if 0 <= value < 2**32:
            return GGUFValueType.UINT32
        if -(2**31) <= value < 0:
            return GGUFValueType.INT32
        return GGUFValueType.UINT64 if value > 0 else GGUFValueType.INT64
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    if isinstance(value, str | bytes):
        return GGUFValueType.STRING
    if isinstance(value, list | tuple | np.ndarray):
        return GGUFValueType.ARRAY
    raise FormatError(f"key {key}: a value of type {type(value).__name__} cannot be stored in a GGUF file")


def infer_item_type(value: Any, key: str) -> GGUFValueType:
    """Return the element type of an array: from the dtype of an ndarray, else from the first element."""
    if isinstance(value, np.ndarray):
        found = _TYPE_OF_DTYPE.get(value.dtype.newbyteorder("<"))
        if found is None:
            raise FormatError(f"key {key}: arrays of {value.dtype} cannot be stored in a GGUF file")
        return found
    if not len(value):
        return GGUFValueType.STRING
    if any(isinstance(v, int) and not isinstance(v, bool) for v in value):
        small = all(isinstance(v, int) and -(2**31) <= v < 2**31 for v in value)
        floats = any(isinstance(v, float) for v in value)
        return GGUFValueType.FLOAT32 if floats else GGUFValueType.INT32 if small else GGUFValueType.INT64
    return infer_type(value[0], key)
