"""Encoders of the grid quants: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M, IQ1_S_R4, IQ1_M_R4.

Minimises sum(w (x - decoded)^2) with the importance weights themselves (1 without them). For each group of 4 or 8
values the compiled kernels find every grid point that is best at some scale, exactly, with the true levels of the grid
and the sign rule included; then they search the scale of each super-block (row for IQ1_*_R4) together with all
sub-block scales. See `iquants_kernels`, `iquants_search_kernels`; bytes are put together by `iquants_pack`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant import tables
from ikcli.quant.encoders import EncodeOptions, iquants_pack
from ikcli.quant.encoders.native_call import run

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_N_SCALES, _LIST_BYTES = 16, 208  # as in iquants_kernels, which cannot be imported without Numba
_FREE, _EVEN, _TERNARY = 0, 1, 2
_SINGLE, _PAIR, _PER_BLOCK, _PER_GROUP = 0, 1, 2, 3
_SCRATCH_BYTES = 1 << 20  # of lists at a time, to stay in the second-level cache
_WEIGHT_FLOOR = 1e-9  # of the mean: values without weight follow the others


@dataclass(frozen=True, slots=True)
class GridFormat:
    """How a type is searched: `span` elements share a scale (0: a row), `sub` a sub-block scale."""

    grid: GGMLType
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
    _T.IQ2_XXS: GridFormat(_T.IQ2_XXS, _EVEN, _SINGLE, 32, _odd(16, 8), _RANGE2),
    _T.IQ2_XS: GridFormat(_T.IQ2_XS, _EVEN, _SINGLE, 16, _odd(16, 8), _RANGE2),
    _T.IQ2_S: GridFormat(_T.IQ2_S, _FREE, _SINGLE, 16, _odd(16, 8), _RANGE2),
    _T.IQ3_XXS: GridFormat(_T.IQ3_XXS, _EVEN, _PAIR, 32, _odd(16, 4), _RANGE3X),
    _T.IQ3_S: GridFormat(_T.IQ3_S, _FREE, _SINGLE, 32, _odd(16, 1), _RANGE3S),
    _T.IQ1_S: GridFormat(_T.IQ1_S, _TERNARY, _PER_BLOCK, 32, _odd(8, 1), _RANGE1, rest=1029),
    _T.IQ1_M: GridFormat(_T.IQ1_S, _TERNARY, _PER_GROUP, 16, _odd(8, 1), _RANGE1, rest=1029),
    _T.IQ1_S_R4: GridFormat(_T.IQ1_S, _TERNARY, _PER_BLOCK, 32, _odd(8, 1), _RANGE1, span=0, rest=1029),
    _T.IQ1_M_R4: GridFormat(
        _T.IQ1_S, _TERNARY, _PER_GROUP, 16, np.arange(16, dtype=np.float32), _RANGE1, span=0, rest=1029
    ),
}


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode (n_rows, ne0) float32 into the bytes of `type`; see `ikcli.quant.encoders`."""
    fmt = _FORMATS[type]
    ne0 = values.shape[1]
    span = fmt.span or ne0
    weights = _weights(imatrix, ne0, span)
    found = _search(fmt, values, weights, span)
    return iquants_pack.pack(type, found).reshape(-1)


def _weights(imatrix: Floats | None, ne0: int, span: int) -> Floats:
    """(ne0,) weights with mean 1 per span."""
    if imatrix is None:
        return np.ones(ne0, np.float32)
    w = imatrix.astype(np.float64).reshape(-1, span)
    mean = w.mean(axis=1, keepdims=True)
    scaled = np.divide(w, mean, out=np.ones_like(w), where=mean > 0)
    return np.ascontiguousarray(np.maximum(scaled, _WEIGHT_FLOOR), np.float32).reshape(-1)


def _search(fmt: GridFormat, values: Floats, weights: Floats, span: int) -> iquants_pack.Found:
    n_rows, ne0 = values.shape
    dims = tables.grid(fmt.grid).shape[1]
    spans = ne0 // span
    x = np.empty((n_rows, ne0), np.float32)
    amax = np.empty((n_rows, spans), np.float32)
    base = np.empty((n_rows, ne0 // fmt.sub), np.float32)
    words = [values.ctypes.data, n_rows, spans, span, fmt.sub, weights.ctypes.data]
    _call(_key("make_prepare"), [*words, x.ctypes.data, amax.ctypes.data, base.ctypes.data])
    d = np.empty((n_rows, spans), np.float32)
    scales = np.empty((n_rows, ne0 // fmt.sub), np.uint8)
    points = np.empty((n_rows, ne0 // dims), np.int32)
    _run_kernels(fmt, x, weights, base, amax, d, scales, points, span)
    empty = amax == 0
    if empty.any():
        points.reshape(n_rows, spans, -1)[empty] = fmt.rest
        scales.reshape(n_rows, spans, -1)[empty] = 0
    signs = np.empty((n_rows, ne0 // 8), np.uint8)
    words = [x.ctypes.data, n_rows, ne0 // 8, weights.ctypes.data, tables.grid(fmt.grid).ctypes.data]
    _call(_key("make_signs", dims, fmt.kind), [*words, points.ctypes.data, signs.ctypes.data])
    return iquants_pack.Found(d, scales, points, signs)


def _run_kernels(
    fmt: GridFormat,
    x: Floats,
    weights: Floats,
    base: Floats,
    amax: Floats,
    d: Floats,
    scales: Bytes,
    points: npt.NDArray[np.int32],
    span: int,
) -> None:
    n_rows, ne0 = x.shape
    grid, ratios, mult, coarse, fine = _constants(fmt)
    dims, n_points = grid.shape
    list_bytes = span // dims * fmt.variants * _LIST_BYTES
    batch = max(1, min(n_rows, max(4, _SCRATCH_BYTES // list_bytes)))
    lists = np.empty(batch * list_bytes, np.uint8)
    scratch = np.empty(max(1024 + 16 * n_points, 128 + 8 * span // fmt.sub), np.uint8)
    candidates = _key("make_candidates", dims, n_points, fmt.kind)
    search = _key("make_search", fmt.mode, len(fmt.multipliers), module="iquants_search_kernels")
    for row in range(0, n_rows, batch):
        n = min(batch, n_rows - row)
        for i in range(ne0 // span):
            subs = i * (span // fmt.sub)
            base_at = base.ctypes.data + 4 * (row * base.shape[1] + subs)
            words = [
                x.ctypes.data + 4 * (row * ne0 + i * span),
                4 * ne0,
                n,
                span // 8,
                weights.ctypes.data + 4 * i * span,
            ]
            words += [grid.ctypes.data, ratios.ctypes.data, base_at, 4 * base.shape[1], fmt.sub // 8, fmt.rest]
            words += [lists.ctypes.data, list_bytes, scratch.ctypes.data]
            _call(candidates, words)
            words = [lists.ctypes.data, list_bytes, n, span // fmt.sub, fmt.sub // dims]
            words += [mult.ctypes.data, ratios.ctypes.data, base_at, 4 * base.shape[1]]
            words += [amax.ctypes.data + 4 * (row * amax.shape[1] + i), 4 * amax.shape[1]]
            words += [d.ctypes.data + 4 * (row * d.shape[1] + i), 4 * d.shape[1]]
            words += [scales.ctypes.data + row * scales.shape[1] + subs, scales.shape[1]]
            words += [points.ctypes.data + 4 * (row * points.shape[1] + i * span // dims), 4 * points.shape[1]]
            words += [coarse.ctypes.data, len(coarse), fine.ctypes.data, len(fine), scratch.ctypes.data]
            _call(search, words)


def _call(key: KernelKey, words: list[int]) -> None:
    params = np.array(words, np.int64)
    run(key, params.ctypes.data)


def _key(factory: str, *args: int, module: str = "iquants_kernels") -> KernelKey:
    return KernelKey(f"ikcli.quant.encoders.{module}", factory, args)


@cache
def _constants_of(type: GGMLType) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    fmt = _FORMATS[type]
    grid = np.ascontiguousarray(tables.grid(fmt.grid).T)
    low, high = fmt.scales
    ratios = np.geomspace(low, high, _N_SCALES).astype(np.float32)
    if type == GGMLType.IQ3_S:
        ratios[-1] = 1  # constant blocks: only the lowest level has a point with four equal ones
    mult = np.resize(fmt.multipliers, 16)
    coarse = np.geomspace(1.25, 0.4, 14) if fmt.span else np.geomspace(1.25, 0.1, 24)
    step = coarse[1] / coarse[0]
    fine = np.geomspace(step, 1 / step, 9)
    return grid, ratios, mult, coarse.astype(np.float32), fine.astype(np.float32)


def _constants(fmt: GridFormat) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    return _constants_of(next(t for t, f in _FORMATS.items() if f is fmt))
