"""Encode F32, F16, BF16, Q8_0 and Q4_0 in NumPy, byte for byte as the reference writes them.

`TensorType.encode_numpy` names the function: float32 blocks (n, block_size) -> (n, type_size) uint8. Corresponds to
quantize_row_*_ref of ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.formats import row_size, tensor_size
from ikcli.references import load

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Encoder = Callable[[Floats], Bytes]

_CHUNK_ELEMENTS = 1 << 20


def quantize(values: npt.NDArray[np.float32], type: GGMLType) -> Bytes:
    """Encode (..., ne0) float32 into the 1-D bytes of a tensor; raise UnsupportedError for a type without encoder."""
    fmt = TYPES[type]
    if not fmt.encode_numpy:
        raise UnsupportedError(f"tensors of type {fmt.name} cannot be encoded by this build")
    encode: Encoder = load(fmt.encode_numpy)
    ne0 = values.shape[-1]
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, ne0)
    out = np.empty(tensor_size(type, (ne0, len(rows))), np.uint8).reshape(len(rows), row_size(type, ne0))
    step = max(1, _CHUNK_ELEMENTS // ne0)
    with np.errstate(all="ignore"):  # overflow to f16 Inf is reported by `validate.check_tensors`
        for i in range(0, len(rows), step):
            chunk = rows[i : i + step]
            out[i : i + step] = encode(chunk.reshape(-1, fmt.block_size)).reshape(len(chunk), -1)
    return out.reshape(-1)


def f32(blocks: Floats) -> Bytes:
    return blocks.astype("<f4").view(np.uint8)


def f16(blocks: Floats) -> Bytes:
    return blocks.astype("<f2").view(np.uint8)


def bf16(blocks: Floats) -> Bytes:
    bits = np.ascontiguousarray(blocks).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    quiet_nan = bits >> 16 | 64
    return np.where(np.isnan(blocks), quiet_nan, rounded).astype("<u2").view(np.uint8)


def q8_0(blocks: Floats) -> Bytes:
    d = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    x = blocks * inverse
    q = np.trunc(x)
    q += np.where(np.abs(x - q) >= 0.5, np.sign(x), np.float32(0))  # ties away from zero
    return np.concatenate((d.astype("<f2").view(np.uint8), q.astype(np.int8).view(np.uint8)), axis=1)


def q4_0(blocks: Floats) -> Bytes:
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)  # with its sign
    d = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    codes = np.minimum(np.trunc(blocks * inverse + np.float32(8.5)), 15).astype(np.uint8)
    return np.concatenate((d.astype("<f2").view(np.uint8), codes[:, :16] | codes[:, 16:] << 4), axis=1)
