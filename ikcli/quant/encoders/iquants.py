"""Encode the grid quants: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, IQ1_S_R4, IQ1_M_R4.

The encoder minimises sum(w (x - decoded)^2) with the importance weights themselves (1 without them). For each group of
4 or 8 values the kernels find every grid point that is best at some scale, exactly, with the true levels of the grid
and the sign rule included. They then search the scale of each super-block (row for IQ1_*_R4) together with all
sub-block scales. See `iquants_kernels` and `iquants_search_kernels`; `iquants_pack` assembles the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant import tables
from ikcli.quant.encoders import EncodeOptions, iquants_pack
from ikcli.quant.encoders.native_call import run

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_LIST_BYTES = 208  # this and the next two lines as in the kernels, which cannot be imported without Numba
_FREE, _EVEN, _TERNARY = 0, 1, 2
_SINGLE, _PAIR, _PER_BLOCK, _PER_GROUP = 0, 1, 2, 3
_SCRATCH_BYTES = 1 << 20  # of lists at a time, to stay in the second-level cache
_WEIGHT_FLOOR = 1e-9  # of the mean: values without weight follow the others


@dataclass(frozen=True, slots=True)
class GridFormat:
    """The search of a type: `span` elements share a scale (0: a row), `sub` a sub-block scale."""

    grid: str
    kind: int
    mode: int
    sub: int
    multipliers: Floats  # sub-block scales / d, for levels as in the grid
    scales: tuple[float, float]  # range of useful scales, in units of the RMS of a sub-block
    span: int = 256
    rest: int = 0  # grid point of least energy

    @property
    def variants(self) -> int:
        return 1 if self.mode == _SINGLE else 2


def _odd(n: int, divisor: float) -> Floats:
    return np.array((2 * np.arange(n) + 1) / divisor, np.float32)


_T = GGMLType
_RANGE2, _RANGE3X, _RANGE3S, _RANGE1 = (1 / 32.5, 1 / 8.5), (1 / 40, 1 / 9.5), (1 / 11, 1 / 2.4), (0.65, 3.0)
_FORMATS: dict[GGMLType, GridFormat] = {
    _T.IQ2_XXS: GridFormat("IQ2_XXS", _EVEN, _SINGLE, 32, _odd(16, 8), _RANGE2),
    _T.IQ2_XS: GridFormat("IQ2_XS", _EVEN, _SINGLE, 16, _odd(16, 8), _RANGE2),
    _T.IQ2_S: GridFormat("IQ2_S", _FREE, _SINGLE, 16, _odd(16, 8), _RANGE2),
    _T.IQ3_XXS: GridFormat("IQ3_XXS", _EVEN, _PAIR, 32, _odd(16, 4), _RANGE3X),
    _T.IQ3_S: GridFormat("IQ3_S", _FREE, _SINGLE, 32, _odd(16, 1), _RANGE3S),
    _T.IQ1_S: GridFormat("IQ1_S", _TERNARY, _PER_BLOCK, 32, _odd(8, 1), _RANGE1, rest=1029),
    _T.IQ1_M: GridFormat("IQ1_S", _TERNARY, _PER_GROUP, 16, _odd(8, 1), _RANGE1, rest=1029),
    _T.IQ1_S_R4: GridFormat("IQ1_S", _TERNARY, _PER_BLOCK, 32, _odd(8, 1), _RANGE1, span=0, rest=1029),
    _T.IQ1_M_R4: GridFormat(
        "IQ1_S", _TERNARY, _PER_GROUP, 16, np.arange(16, dtype=np.float32), _RANGE1, span=0, rest=1029
    ),
}


class _Tables(NamedTuple):
    """Input of the kernels: grid (dims, points), scales tried per group, multipliers, factors of block scales."""

    grid: Floats
    ratios: Floats
    multipliers: Floats
    coarse: Floats
    fine: Floats


class _Work(NamedTuple):
    """Normalised rows and their results; `amax` divided the values of a span, `rms` is per sub-block."""

    x: Floats
    amax: Floats
    rms: Floats
    d: Floats
    scales: Bytes
    points: npt.NDArray[np.int32]
    signs: Bytes


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode (n_rows, ne0) float32 into the bytes of `type`; see `ikcli.quant.encoders`."""
    return iquants_pack.pack(type, find(values, type, imatrix)).reshape(-1)


def find(values: Floats, type: GGMLType, imatrix: Floats | None) -> iquants_pack.GridFound:
    """Find scales, points and signs of rows (n_rows, ne0)."""
    fmt, t = _FORMATS[type], _tables(type)
    n_rows, ne0 = values.shape
    span = fmt.span or ne0
    weights = _weights(imatrix, ne0, span)
    work = _new_work(n_rows, ne0, span, fmt.sub, len(t.grid))
    words = [_at(values), n_rows, ne0 // span, span, fmt.sub, _at(weights), _at(work.x), _at(work.amax), _at(work.rms)]
    _call(_key("make_prepare"), words)
    _search(fmt, t, work, weights, span)
    empty = work.amax == 0
    if empty.any():
        work.points.reshape(n_rows, ne0 // span, -1)[empty] = fmt.rest
        work.scales.reshape(n_rows, ne0 // span, -1)[empty] = 0
    if fmt.kind != _TERNARY:
        words = [_at(work.x), n_rows, ne0 // 8, _at(weights), _at(tables.grid(fmt.grid)), _at(work.points)]
        _call(_key("make_signs", len(t.grid) if fmt.kind == _EVEN else 8, fmt.kind), [*words, _at(work.signs)])
    return iquants_pack.GridFound(work.d, work.scales, work.points, work.signs)


def grid_format(type: GGMLType) -> GridFormat:
    """Return how a type is searched."""
    return _FORMATS[type]


def _weights(imatrix: Floats | None, ne0: int, span: int) -> Floats:
    """Return weights (ne0,) with mean 1 per span."""
    if imatrix is None:
        return np.ones(ne0, np.float32)
    w = imatrix.astype(np.float64).reshape(-1, span)
    mean = w.mean(axis=1, keepdims=True)
    scaled = np.divide(w, mean, out=np.ones_like(w), where=mean > 0)
    return np.ascontiguousarray(np.maximum(scaled, _WEIGHT_FLOOR), np.float32).reshape(-1)


def _new_work(n_rows: int, ne0: int, span: int, sub: int, dims: int) -> _Work:
    return _Work(
        x=np.empty((n_rows, ne0), np.float32),
        amax=np.empty((n_rows, ne0 // span), np.float32),
        rms=np.empty((n_rows, ne0 // sub), np.float32),
        d=np.empty((n_rows, ne0 // span), np.float32),
        scales=np.empty((n_rows, ne0 // sub), np.uint8),
        points=np.empty((n_rows, ne0 // dims), np.int32),
        signs=np.empty((n_rows, ne0 // 8), np.uint8),
    )


def _search(fmt: GridFormat, t: _Tables, work: _Work, weights: Floats, span: int) -> None:
    """Fill d, scales and points for a few rows of one span at a time, so that their lists stay in the cache."""
    n_rows, ne0 = work.x.shape
    dims, n_points = t.grid.shape
    list_bytes = span // dims * fmt.variants * _LIST_BYTES
    batch = min(n_rows, max(4, _SCRATCH_BYTES // list_bytes))
    lists = np.empty(batch * list_bytes, np.uint8)
    scratch = np.empty(max(1024 + 16 * n_points, 128 + 8 * (span // fmt.sub)), np.uint8)
    candidates = _key("make_candidates", dims, n_points, fmt.kind)
    search = _key("make_search", fmt.mode, module="iquants_search_kernels")
    for row in range(0, n_rows, batch):
        n = min(batch, n_rows - row)
        for i in range(ne0 // span):
            sub = i * (span // fmt.sub)
            rms = [_at(work.rms, row, sub), work.rms.strides[0]]
            words = [_at(work.x, row, i * span), work.x.strides[0], n, span // 8, _at(weights, i * span), _at(t.grid)]
            words += [_at(t.ratios), *rms, fmt.sub // 8, fmt.rest, _at(lists), list_bytes, _at(scratch)]
            _call(candidates, words)
            words = [_at(lists), list_bytes, n, span // fmt.sub, fmt.sub // dims, _at(t.multipliers), _at(t.ratios)]
            words += [*rms, _at(work.amax, row, i), work.amax.strides[0], _at(work.d, row, i), work.d.strides[0]]
            words += [_at(work.scales, row, sub), work.scales.strides[0]]
            words += [_at(work.points, row, i * (span // dims)), work.points.strides[0]]
            words += [_at(t.coarse), len(t.coarse), _at(t.fine), len(t.fine), _at(scratch), len(fmt.multipliers)]
            _call(search, words)


def _at(array: npt.NDArray[Any], *index: int) -> int:
    """Return the address of an element, of the first one without index."""
    offset = sum(i * stride for i, stride in zip(index, array.strides, strict=False))
    return int(array.ctypes.data) + offset


def _call(key: KernelKey, words: list[int]) -> None:
    params = np.array(words, np.int64)
    run(key, params.ctypes.data)


def _key(factory: str, *args: int, module: str = "iquants_kernels") -> KernelKey:
    return KernelKey(f"ikcli.quant.encoders.{module}", factory, args)


@cache
def _tables(type: GGMLType) -> _Tables:
    fmt = _FORMATS[type]
    grid = np.ascontiguousarray(tables.grid(fmt.grid).T)
    ratios = np.geomspace(*fmt.scales, 16).astype(np.float32)
    if type == GGMLType.IQ3_S:
        ratios[-1] = 1  # constant blocks: only the lowest level has a point with four equal ones
    coarse = np.geomspace(1.25, 0.4, 14) if fmt.span else np.geomspace(1.25, 0.1, 24)
    step = coarse[1] / coarse[0]
    fine = np.geomspace(step, 1 / step, 9)
    multipliers = np.resize(fmt.multipliers, 16)
    return _Tables(grid, ratios, multipliers, coarse.astype(np.float32), fine.astype(np.float32))
