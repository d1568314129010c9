"""Exact dequantizers in NumPy: bytes of a tensor in, float32 out. Slow, readable, the oracle for every kernel.

A decoder takes rows of bytes (n_rows, row bytes) and returns (n_rows, ne0) float32; for interleaved types n_rows is
a multiple of the group height. `block_decoder` wraps a function on blocks (n, type_size) -> (n, block_size), which is
all that types without row headers need; `row_scale_decoder` hands the scale of the row over with the blocks.
Decoders live in one module per family and register themselves; interleaved types are separated into rows first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.quant.formats import FORMATS, row_size, tensor_size

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
BlockDecoder = Callable[[Bytes], Floats]
RowScaleDecoder = Callable[[Floats, Bytes], Floats]
RowDecoder = Callable[[Bytes, int], Floats]
TensorDecoder = Callable[[Bytes], Floats]

# Modules ikcli.quant.decode_<family>.
_FAMILIES = ("legacy", "kquants", "iquants", "iqk", "trellis", "bitnet", "interleaved")
_DECODERS: dict[GGMLType, RowDecoder] = {}
_TENSOR_DECODERS: dict[GGMLType, TensorDecoder] = {}
_CHUNK_ELEMENTS = 1 << 18  # bounds the temporaries, which take some ten times their output


def row_decoder(type: GGMLType) -> Callable[[RowDecoder], RowDecoder]:
    """Register a decoder of rows: (n_rows, row bytes), ne0 -> (n_rows, ne0)."""

    def register(fn: RowDecoder) -> RowDecoder:
        _DECODERS[type] = fn
        return fn

    return register


def block_decoder(type: GGMLType) -> Callable[[BlockDecoder], BlockDecoder]:
    """Register a decoder of blocks: (n, type_size) -> (n, block_size)."""
    type_size = FORMATS[type].type_size

    def register(fn: BlockDecoder) -> BlockDecoder:
        def rows(data: Bytes, ne0: int) -> Floats:
            return fn(data.reshape(-1, type_size)).reshape(-1, ne0)

        _DECODERS[type] = rows
        return fn

    return register


def row_scale_decoder(type: GGMLType) -> Callable[[RowScaleDecoder], RowScaleDecoder]:
    """Register a decoder of blocks under a row scale: scales (n, 1), blocks (n, type_size) -> (n, block_size)."""
    fmt = FORMATS[type]

    def register(fn: RowScaleDecoder) -> RowScaleDecoder:
        def rows(data: Bytes, ne0: int) -> Floats:
            blocks = np.ascontiguousarray(data[:, fmt.row_meta_size :]).reshape(-1, fmt.type_size)
            scales = row_scales(data, fmt.row_meta_size).repeat(ne0 // fmt.block_size)
            return fn(scales[:, None], blocks).reshape(-1, ne0)

        _DECODERS[type] = rows
        return fn

    return register


def row_scales(rows: Bytes, row_meta_size: int) -> Floats:
    """The scales that rows of bytes start with, f16 in a header of 2 bytes and f32 in a longer one: (n_rows,)."""
    size = min(row_meta_size, 4)
    return np.ascontiguousarray(rows[:, :size]).view(f"<f{size}").reshape(-1).astype(np.float32)


def tensor_decoder(type: GGMLType) -> Callable[[TensorDecoder], TensorDecoder]:
    """Register a decoder of whole tensors, for types without row structure: bytes -> (n_elements,)."""

    def register(fn: TensorDecoder) -> TensorDecoder:
        _TENSOR_DECODERS[type] = fn
        return fn

    return register


def plain_row_decoder(type: GGMLType) -> RowDecoder:
    """The registered decoder of rows of a type that an interleaved one regroups."""
    return _DECODERS[type]


@cache
def _decoders() -> dict[GGMLType, RowDecoder]:
    for family in _FAMILIES:
        importlib.import_module(f"ikcli.quant.decode_{family}")
    return _DECODERS


def decodable_types() -> frozenset[GGMLType]:
    """Types that `dequantize` can decode."""
    return frozenset(_decoders()) | frozenset(_TENSOR_DECODERS)


def dequantize(data: npt.NDArray[Any], type: GGMLType, shape: tuple[int, ...]) -> Floats:
    """Decode the bytes of a tensor of GGUF `shape` (ne0, ne1, ...) to float32 of shape (..., ne1, ne0).

    Raises UnsupportedError for a type without decoder, FormatError if the number of bytes does not fit the shape.
    """
    decode = _decoders().get(type)
    fmt = FORMATS[type]
    if decode is None and type not in _TENSOR_DECODERS:
        raise UnsupportedError(f"tensors of type {fmt.name} cannot be decoded by this build")
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if raw.size != tensor_size(type, shape):
        raise FormatError(f"a {fmt.name} tensor of shape {list(shape)} has {raw.size} bytes of data")
    if decode is None:
        return _TENSOR_DECODERS[type](raw).reshape(shape[::-1])
    rows = raw.reshape(-1, row_size(type, shape[0]))
    n_rows = len(rows)
    if n_rows % fmt.rows:
        raise FormatError(f"a {fmt.name} tensor of shape {list(shape)} has rows that are not a multiple of {fmt.rows}")
    step = max(1, _CHUNK_ELEMENTS // shape[0] // fmt.rows) * fmt.rows
    out = np.empty((n_rows, shape[0]), np.float32)
    with np.errstate(all="ignore"):  # NaN and Inf in scales are data here, reported by `validate.check_tensors`
        for i in range(0, n_rows, step):
            out[i : i + step] = decode(rows[i : i + step], shape[0])
    return out.reshape(shape[::-1])
