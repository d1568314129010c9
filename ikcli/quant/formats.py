"""Look up tensor types by number or name, and compute the bytes of rows and tensors.

Errors are worded for a type that a user asked for. The record of a type is in `ikcli.gguf.types`; its byte layout is
documented in its decoder (`decode_*.py`).
"""

from __future__ import annotations

from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, TensorType, row_n_bytes, tensor_n_bytes
from ikcli.suggest import near_names

READ_BY_ROW = ("token_embd.weight", ".nextn.embed_tokens.weight")
"""Endings of the names of tensors of which single rows are read, so that interleaved types do not suit them."""


def get_format(type: GGMLType | int) -> TensorType:
    """Return the record of a type id; raise UsageError for an unknown id."""
    try:
        return TYPES[GGMLType(type)]
    except ValueError:
        raise UsageError(f"unknown tensor type id {int(type)}") from None


def format_by_name(name: str) -> TensorType:
    """Return the record of a storage type by name in any case; raise UsageError with the nearest names when unknown."""
    asked, known = name.strip().lower(), {t.name.lower(): t for t in TYPES.values() if t.storage}
    if asked in known:
        return known[asked]
    near = near_names(asked, known)
    if near:
        hint = "did you mean " + " or ".join(known[n].name for n in near) + "?"
    else:
        hint = "known types: " + ", ".join(t.name for t in known.values())
    raise UsageError(f"unknown tensor type '{name}'; {hint}")


def row_size(type: GGMLType, ne0: int) -> int:
    """Return the bytes of one row of `ne0` elements; raise UsageError if `ne0` is not a multiple of the block size."""
    try:
        return row_n_bytes(type, ne0)
    except ValueError as e:
        raise UsageError(str(e)) from None


def tensor_size(type: GGMLType, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor of `shape` = (ne0, ne1, ...); same errors as `row_size`."""
    try:
        return tensor_n_bytes(type, shape)
    except ValueError as e:
        raise UsageError(str(e)) from None


def interleaved_type(type: GGMLType) -> GGMLType | None:
    """Return the row-interleaved twin of a plain type, or None."""
    return next((t for t, f in TYPES.items() if f.base == type), None)
