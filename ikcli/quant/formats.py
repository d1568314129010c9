"""Registry of tensor formats: one record per storage type, looked up by type id or by name in any case.

Byte layouts are documented where they are decoded (`decode.py`); this file knows names and sizes only.
Answers to `type_traits[]` and `interleaved_properties` of ik_llama.cpp.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from ikcli.errors import UsageError
from ikcli.gguf.constants import (
    ACTIVATION_TYPES,
    INTERLEAVED,
    STANDARD_TYPES,
    TYPE_TRAITS,
    GGMLType,
    row_n_bytes,
    tensor_n_bytes,
)


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """Name and sizes of one type; `base` is the plain type an interleaved one regroups, `rows` its group height."""

    type: GGMLType
    name: str  # exact upstream spelling
    block_size: int  # elements
    type_size: int  # bytes per block
    row_meta_size: int  # bytes once per row
    base: GGMLType | None = None  # None: not interleaved, or a format of its own (iq1_s_r4, q8_k_r8, ...)
    rows: int = 1
    storage: bool = True  # False: activation buffers only
    standard: bool = True  # False: only ik_llama.cpp and this toolkit read it

    @property
    def bpw(self) -> float:
        """Nominal bits per weight, row header excluded."""
        return 8 * self.type_size / self.block_size

    @property
    def is_interleaved(self) -> bool:
        return self.rows > 1

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


def _format(type: GGMLType) -> QuantFormat:
    t = TYPE_TRAITS[type]
    base, rows = INTERLEAVED.get(type, (None, 1))
    return QuantFormat(
        type=type,
        name=t.name,
        block_size=t.block_size,
        type_size=t.type_size,
        row_meta_size=t.row_meta_size,
        base=base,
        rows=rows,
        storage=type not in ACTIVATION_TYPES,
        standard=type in STANDARD_TYPES,
    )


FORMATS: dict[GGMLType, QuantFormat] = {t: _format(t) for t in GGMLType}
_BY_NAME: dict[str, QuantFormat] = {f.name.lower(): f for f in FORMATS.values()}


def get_format(type: GGMLType | int) -> QuantFormat:
    """The record of a type id; an unknown id is a UsageError."""
    try:
        return FORMATS[GGMLType(type)]
    except ValueError:
        raise UsageError(f"unknown tensor type id {int(type)}") from None


def format_by_name(name: str) -> QuantFormat:
    """The record of a storage type by name in any case; UsageError with the nearest names when unknown."""
    found = _BY_NAME.get(name.strip().lower())
    if found is not None and found.storage:
        return found
    known = [f.name for f in FORMATS.values() if f.storage]
    near = difflib.get_close_matches(name.strip().lower(), [k.lower() for k in known], n=3, cutoff=0.6)
    if near:
        hint = "did you mean " + " or ".join(_BY_NAME[n].name for n in near) + "?"
    else:
        hint = "known types: " + ", ".join(known)
    raise UsageError(f"unknown tensor type '{name}'; {hint}")


def row_size(type: GGMLType, ne0: int) -> int:
    """Bytes of one row of `ne0` elements; UsageError if `ne0` is not a multiple of the block size."""
    try:
        return row_n_bytes(type, ne0)
    except ValueError as e:
        raise UsageError(str(e)) from None


def tensor_size(type: GGMLType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of `shape` = (ne0, ne1, ...); same errors as `row_size`."""
    try:
        return tensor_n_bytes(type, shape)
    except ValueError as e:
        raise UsageError(str(e)) from None


def plain_type(type: GGMLType) -> GGMLType:
    """The type with the same values and no row interleaving (`type` itself if it is plain or has no plain twin)."""
    return FORMATS[type].base or type


def interleaved_type(type: GGMLType) -> GGMLType | None:
    """The row-interleaved twin of a plain type, or None."""
    return next((t for t, f in FORMATS.items() if f.base == type), None)
