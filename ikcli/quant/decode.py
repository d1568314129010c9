"""Dequantize tensors in NumPy, exactly: bytes in, float32 out. Slow and readable; the oracle of every kernel.

The record of a type names its decoder (`TensorType.decode`), which takes rows of bytes (n_rows, row bytes) and returns
float32 (n_rows, ne0). Types without row headers only need a function on blocks, (n, type_size) -> (n, block_size),
which `block_decoder` turns into a decoder. `row_scale_decoder` also passes the scale of the row. Rows of interleaved
types are separated first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, TensorType
from ikcli.quant.formats import row_size, tensor_size
from ikcli.quant.repack import unrepack_rows
from ikcli.references import load

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Decoder = Callable[[Bytes, TensorType, int], Floats]

_CHUNK_ELEMENTS = 1 << 18  # bounds the temporaries, which take some ten times their output


def block_decoder(fn: Callable[[Bytes], Floats]) -> Decoder:
    """Make a decoder from a function on blocks: (n, type_size) -> (n, block_size)."""

    def decode(rows: Bytes, type: TensorType, ne0: int) -> Floats:
        return fn(rows.reshape(-1, type.type_size)).reshape(-1, ne0)

    return decode


def row_scale_decoder(fn: Callable[[Floats, Bytes], Floats]) -> Decoder:
    """Make a decoder from a function of row scales (n, 1) and blocks (n, type_size) -> (n, block_size)."""

    def decode(rows: Bytes, type: TensorType, ne0: int) -> Floats:
        blocks = np.ascontiguousarray(rows[:, type.row_meta_size :]).reshape(-1, type.type_size)
        scales = row_scales(rows, type.row_meta_size).repeat(ne0 // type.block_size)
        return fn(scales[:, None], blocks).reshape(-1, ne0)

    return decode


def row_scales(rows: Bytes, row_meta_size: int) -> Floats:
    """Read the scale at the start of every row, (n_rows,): f16 in a header of 2 bytes, f32 in a longer one."""
    size = min(row_meta_size, 4)
    return np.ascontiguousarray(rows[:, :size]).view(f"<f{size}").reshape(-1).astype(np.float32)


def tensor_decoder(fn: Callable[[Bytes], Floats]) -> Decoder:
    """Make a decoder from a function on whole tensors, for types without rows: bytes -> (n_elements,)."""

    def decode(rows: Bytes, type: TensorType, ne0: int) -> Floats:
        return fn(rows.reshape(-1))

    return decode


def decodable_types() -> frozenset[GGMLType]:
    """Return the types that `dequantize` supports."""
    return frozenset(t.type for t in TYPES.values() if TYPES[t.plain].decode)


def dequantize(data: npt.NDArray[Any], type: GGMLType, shape: tuple[int, ...]) -> Floats:
    """Decode the bytes of a tensor of GGUF `shape` (ne0, ne1, ...) to float32 of shape (..., ne1, ne0).

    Raises UnsupportedError for a type without decoder, FormatError if the number of bytes does not fit the shape.
    """
    fmt = TYPES[type]
    plain, ne0 = TYPES[fmt.plain], shape[0]
    if not plain.decode:
        raise UnsupportedError(f"tensors of type {fmt.name} cannot be decoded by this build")
    decode: Decoder = load(plain.decode)
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if raw.size != tensor_size(type, shape):
        raise FormatError(f"a {fmt.name} tensor of shape {list(shape)} has {raw.size} bytes of data")
    if fmt.tensor_meta_size:
        return decode(raw, fmt, ne0).reshape(shape[::-1])
    rows = raw.reshape(-1, row_size(type, ne0))
    n_rows = len(rows)
    if n_rows % fmt.rows:
        raise FormatError(f"a {fmt.name} tensor of shape {list(shape)} has rows that are not a multiple of {fmt.rows}")
    step = max(1, _CHUNK_ELEMENTS // ne0 // fmt.rows) * fmt.rows
    out = np.empty((n_rows, ne0), np.float32)
    with np.errstate(all="ignore"):  # NaN and Inf in scales are data here, reported by `validate.check_tensors`
        for i in range(0, n_rows, step):
            some = rows[i : i + step]
            out[i : i + step] = decode(unrepack_rows(some, type, ne0) if fmt.is_interleaved else some, plain, ne0)
    return out.reshape(shape[::-1])
