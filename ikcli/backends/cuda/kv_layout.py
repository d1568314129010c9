"""Lay out KV cache rows in device memory, and convert from and to the rows of the host.

f32, f16 and bf16 tensors lie as on the host. Quantized ones are planar over the whole tensor (kernels/kv_formats.cuh):
all codes first, then all high bits, then all scales, each [cell][block][bytes], so that codes are aligned to 16 bytes
and a row of any head can be read in whole vectors. The number of bytes is the same as on the host. A tensor is a list
of planes with one row per cell; a transposed one has a plane per column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache
from ikcli.quant.formats import format_by_name
from ikcli.settings.run import KV_TYPES

Bytes = npt.NDArray[np.uint8]
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
KERNEL_TYPES: dict[GGMLType, int] = {format_by_name(name).type: i for i, name in enumerate(KV_TYPES)}
"""`KvType` of kernels/kv_formats.cuh."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Part of every cell's row: `row_bytes` per cell, adjacent, from `offset` bytes into the tensor on."""

    offset: int
    row_bytes: int


def kernel_type(type_: GGMLType) -> int:
    """Return the kernels' number of a cache type; raise UnsupportedError if caches cannot have that type."""
    if type_ not in KERNEL_TYPES:
        names = ", ".join(TYPES[t].name for t in KERNEL_TYPES)
        raise UnsupportedError(f"the CUDA backend has no KV cache of type {TYPES[type_].name}; use one of {names}")
    return KERNEL_TYPES[type_]


def cache_bytes(cache: Cache, n_cells: int) -> int:
    """Return the bytes of a tensor, equal to the host's."""
    if cache.transposed:
        return cache.cols * row_n_bytes(cache.type, n_cells)
    return n_cells * row_n_bytes(cache.type, cache.cols)


def planes(cache: Cache, n_cells: int) -> tuple[Plane, ...]:
    """Return the planes of a tensor of `n_cells` cells."""
    kernel_type(cache.type)
    traits = TYPES[cache.type]
    if cache.transposed:
        return tuple(Plane(c * n_cells * traits.type_size, traits.type_size) for c in range(cache.cols))
    found, at = [], 0
    for n_bytes in _plane_bytes(cache):
        found.append(Plane(at, n_bytes))
        at += n_cells * n_bytes
    return tuple(found)


def to_device(cache: Cache, rows: Bytes) -> list[Bytes]:
    """Turn host rows (n, bytes of a row) into an array (n, row_bytes) per plane.

    Transposed tensors come as host columns (cols, n bytes).
    """
    if cache.transposed:
        size = TYPES[cache.type].type_size
        return [np.ascontiguousarray(column).reshape(-1, size) for column in rows]
    n = len(rows)
    if cache.type == GGMLType.Q8_KV:
        return [np.ascontiguousarray(rows[:, 8:]), np.ascontiguousarray(rows[:, :8])]
    if cache.type in FLOATS:
        return [np.ascontiguousarray(rows)]
    t = TYPES[cache.type]
    blocks = rows.reshape(n, -1, t.type_size)
    return [np.ascontiguousarray(blocks[..., at : at + size]).reshape(n, -1) for at, size in t.cuda]


def from_device(cache: Cache, parts: Sequence[Bytes]) -> Bytes:
    """Invert `to_device`."""
    n = len(parts[0])
    if cache.transposed:
        return np.stack([p.reshape(-1) for p in parts])
    if cache.type == GGMLType.Q8_KV:
        return np.concatenate([parts[1], parts[0]], axis=1)
    if cache.type in FLOATS:
        return np.ascontiguousarray(parts[0])
    n_blocks = cache.cols // 32
    return np.concatenate([p.reshape(n, n_blocks, -1) for p in reversed(parts)], axis=2).reshape(n, -1)


def _plane_bytes(cache: Cache) -> tuple[int, ...]:
    if cache.type in FLOATS:
        return (row_n_bytes(cache.type, cache.cols),)
    if cache.type == GGMLType.Q8_KV:
        return cache.cols, 8
    return tuple(cache.cols // 32 * size for _, size in TYPES[cache.type].cuda)
