"""Random stored weights of every type that the CPU backend computes with."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ikcli.backends.cpu.lower import FLOAT_TYPES
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import get_format, row_size
from ikcli.quant.repack import repack_rows

Array = npt.NDArray[Any]
QUANTIZED = [t.type for t in TYPES.values() if t.cpu]
# Types tested by default: every tile mode, and both kinds of rows; `-m slow` adds all others.
_COMMON = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_K", "q6_K", "q2_K", "q8_0_r8", "q4_k_r4"]
# Products of experts find their rows and then go through the tiles of the plain products.
_COMMON_OF_EXPERTS = ["f32", "f16", "q8_0", "q4_K", "q4_k_r4"]


def params(types: Iterable[GGMLType], common: Container[str] = _COMMON) -> list[Any]:
    """Test parameters for types; all but the common ones are slow."""
    names = {t: get_format(t).name for t in types}
    return [pytest.param(t, id=n, marks=() if n in common else pytest.mark.slow) for t, n in names.items()]


ALL_TYPES = params([*FLOAT_TYPES, *QUANTIZED])
OF_EXPERTS = params([*FLOAT_TYPES, *QUANTIZED], _COMMON_OF_EXPERTS)


@functools.cache
def good_blocks(type_: GGMLType) -> Array:
    """Random blocks (n, bytes) whose values are of ordinary size; all bit patterns of codes occur."""
    rng = np.random.default_rng(int(type_))
    fmt = get_format(type_)
    blocks = rng.integers(0, 256, (20000, fmt.type_size), dtype=np.uint8)
    values = np.abs(dequantize(blocks, type_, (fmt.block_size, len(blocks)))).max(axis=1)
    return blocks[(values > 0.05) & (values < 5)]


def stored(type_: GGMLType, n_rows: int, k: int, seed: int = 1) -> Array:
    """Bytes of n_rows x k random values of ordinary size."""
    rng = np.random.default_rng([seed, n_rows, k])
    fmt = get_format(type_)
    if fmt.base is not None:
        return repack_rows(stored(fmt.base, n_rows, k, seed).reshape(n_rows, -1), type_, k).reshape(-1)
    if type_ in FLOAT_TYPES:
        x = rng.standard_normal((n_rows, k)).astype(np.float32)
        top = (x.view(np.uint32) >> 16).astype(np.uint16)
        return (
            {GGMLType.F32: x, GGMLType.F16: x.astype(np.float16), GGMLType.BF16: top}[type_].view(np.uint8).reshape(-1)
        )
    if fmt.is_interleaved:  # a format of its own: half-float scales of all rows first, in each group or unit
        n_bytes = row_size(type_, k) if fmt.row_meta_size else fmt.type_size
        units = rng.integers(
            0, 256, (n_rows * row_size(type_, k) // (n_bytes * fmt.rows), n_bytes * fmt.rows), np.uint8
        )
        scales = rng.uniform(0.005, 0.02, (len(units), fmt.rows)).astype(np.float16)
        units[:, : 2 * fmt.rows] = scales.view(np.uint8)
        return units.reshape(-1)
    if not fmt.row_meta_size:
        pool = good_blocks(type_)
        return pool[rng.integers(0, len(pool), n_rows * k // fmt.block_size)].reshape(-1)
    rows = rng.integers(0, 256, (n_rows, row_size(type_, k)), dtype=np.uint8)
    scale = np.float16 if fmt.row_meta_size == 2 else np.float32
    rows[:, : fmt.row_meta_size] = 0
    size = np.dtype(scale).itemsize
    rows[:, :size] = np.ones((n_rows, 1), scale).view(np.uint8)
    largest = np.abs(dequantize(rows, type_, (k, n_rows))).max(axis=1, keepdims=True)
    rows[:, :size] = (2 / largest).astype(scale).view(np.uint8)
    return rows.reshape(-1)


def fitting(type_: GGMLType, n_rows: int) -> int:
    """n_rows rounded up to whole groups of an interleaved type."""
    return -(-n_rows // get_format(type_).rows) * get_format(type_).rows
