"""Encode the IQ*_K, KS, KSS and KL types: parameters of the search and the layouts of its results.

The search (`iqk_kernels`) works on units: a block of 256, or a row for types with a row scale. Per unit it returns the
scale d, and per sub-block a multiplier m, a table row t and codes. It minimises sum(w * (x - x')^2) with w the
importance weights, or 1. Corresponds to iqk_quantize.cpp, whose weights also contain the values themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.encoders.iqk_pack import PACKERS
from ikcli.quant.encoders.iqk_tables import STATE_BYTES, kernel_table
from ikcli.quant.encoders.native_call import run

_KERNELS, _JOINT_KERNELS = "ikcli.quant.encoders.iqk_kernels", "ikcli.quant.encoders.iqk_joint_kernels"
_CHUNK_ELEMENTS = 1 << 18
_LEAST_WEIGHT = np.float32(1e-6)  # of the mean weight: elements without weight still get sensible codes


@dataclass(frozen=True, slots=True)
class IqkSearch:
    """The search of a type: table, sub-block size, multipliers low..high, and how much is tried.

    `grid`: largest element of a sub-block in table units: first, last, number. `reach`: first, last and number of trial
    scales d, as factors of (largest sub-block scale / largest multiplier), of both signs if `signs` is 2.
    """

    table: str
    n: int
    low: int
    high: int
    grid: tuple[float, float, int]
    reach: tuple[float, float, int]
    odd: bool = False
    codes_per_sub: int = 0  # 0: as many as elements
    n_rows: int = 2
    per_row: bool = False
    half: bool = True
    signs: int = 1
    n_refine: int = 1
    n_keep: int = 2
    n_rounds: int = 3
    n_options: int = 4
    span: int = 1


SEARCHES = {
    GGMLType.IQ2_K: IqkSearch("iq2", 16, -8, 7, (10.0, 50.0, 12), (0.4, 2.0, 64), signs=2, n_keep=3),
    GGMLType.IQ3_K: IqkSearch("iq3", 16, -31, 31, (22.0, 100.0, 16), (0.35, 1.5, 96), odd=True, n_keep=3),
    GGMLType.IQ4_K: IqkSearch("iq4", 16, -32, 31, (50.0, 200.0, 24), (0.4, 1.5, 64), signs=2, n_keep=3),
    GGMLType.IQ5_K: IqkSearch("iq5", 16, -32, 31, (50.0, 180.0, 32), (0.4, 1.5, 64), signs=2, n_keep=3),
    GGMLType.IQ6_K: IqkSearch("iq6", 16, -127, 127, (60.0, 170.0, 40), (0.4, 1.5, 64), n_keep=4, n_rounds=2),
    GGMLType.IQ2_KS: IqkSearch("iq2", 32, -16, 15, (10.0, 50.0, 12), (0.28, 1.5, 64), per_row=True, signs=2),
    GGMLType.IQ3_KS: IqkSearch("iq3", 32, -16, 15, (22.0, 100.0, 16), (0.28, 1.5, 64), per_row=True, signs=2, n_keep=3),
    GGMLType.IQ4_KS: IqkSearch(
        "iq4", 32, -127, 127, (50.0, 200.0, 24), (0.2, 1.5, 64), odd=True, per_row=True, half=False
    ),
    GGMLType.IQ5_KS: IqkSearch(
        "iq5", 32, -127, 127, (50.0, 180.0, 32), (0.2, 1.5, 64), odd=True, per_row=True, half=False
    ),
    GGMLType.IQ4_KSS: IqkSearch(
        "iq4 parity", 32, -127, 127, (50.0, 200.0, 24), (0.2, 1.5, 64), odd=True, per_row=True, half=False
    ),
    GGMLType.IQ2_KL: IqkSearch(
        "iq2 pairs",
        32,
        -32,
        31,
        (24.0, 100.0, 16),
        (0.28, 1.5, 64),
        n_rows=1,
        per_row=True,
        signs=2,
        codes_per_sub=16,
        n_options=2,
    ),
}

# Multipliers far from the real scales are tried as well, from more values of d.
SLOW_IQ2_KS = replace(SEARCHES[GGMLType.IQ2_KS], grid=(6.0, 50.0, 48), n_refine=2, n_keep=8, n_rounds=4, span=4)


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode rows (n_rows, ne0) into the bytes of `type`."""
    slow = options.slow_iq2ks and type == GGMLType.IQ2_KS
    return encode_with(values, type, imatrix, SLOW_IQ2_KS if slow else SEARCHES[type])


def encode_with(values: Floats, type: GGMLType, imatrix: Floats | None, search: IqkSearch) -> Bytes:
    """Do `encode` with a search of the caller's choice."""
    n_rows, ne0 = values.shape
    weights = mean_one_weights(imatrix, ne0)
    step = max(1, _CHUNK_ELEMENTS // ne0)
    chunks = [_encode_rows(values[i : i + step], type, weights, search) for i in range(0, n_rows, step)]
    return np.concatenate(chunks).reshape(-1) if chunks else np.empty(0, np.uint8)


def mean_one_weights(imatrix: Floats | None, ne0: int) -> Floats:
    """Return weights of mean 1, none of them 0."""
    if imatrix is None:
        return np.ones(ne0, np.float32)
    wide = np.asarray(imatrix, np.float64)
    mean = wide.mean()
    if mean <= 0.0:
        return np.ones(ne0, np.float32)
    return np.maximum((wide / mean).astype(np.float32), _LEAST_WEIGHT)


def _grid(search: IqkSearch) -> Floats:
    first, last, number = search.grid
    return (1.0 / np.linspace(first, last, number)).astype(np.float32)


def _factors(search: IqkSearch) -> Floats:
    first, last, number = search.reach
    one = np.geomspace(first, last, number).astype(np.float32)
    return one if search.signs == 1 else np.concatenate((one, -one[::-1]))


class IqkFound(NamedTuple):
    """Scales d (units,), multipliers m and table rows t (units, subs), codes (units, subs, codes per sub-block)."""

    d: Floats
    m: npt.NDArray[np.int8]
    t: Bytes
    codes: Bytes


def _encode_rows(values: Floats, type: GGMLType, weights: Floats, search: IqkSearch) -> Bytes:
    return PACKERS[type](*find(values, type, weights, search), len(values))


def find(values: Floats, type: GGMLType, weights: Floats, search: IqkSearch) -> IqkFound:
    """Search rows (n_rows, ne0); weights (ne0,) have mean 1."""
    ne0 = values.shape[1]
    unit = ne0 if search.per_row else TYPES[type].block_size
    n_units, n_subs = values.size // unit, unit // search.n
    n_groups = -(-n_subs // 16)
    codes = np.zeros((n_units, n_subs, search.codes_per_sub or search.n), np.uint8)
    m, t = np.zeros((n_units, n_subs), np.int8), np.zeros((n_units, n_subs), np.uint8)
    d = np.zeros(n_units, np.float32)
    scratch = np.empty(4096 + n_groups * (2 * 64 * search.n + STATE_BYTES), np.uint8)
    table, grid, factors = kernel_table(search.table), _grid(search), _factors(search)
    params = [
        _at(values),
        _at(weights),
        n_units,
        ne0 // unit,
        unit,
        _at(table),
        _at(scratch),
        _at(codes),
        _at(m),
        _at(t),
    ]
    params += [_at(d), _at(grid), len(grid), search.n_refine, _at(factors), len(factors)]
    params += [min(search.n_keep, len(factors)), search.n_rounds, search.n_options, search.span]
    slots = np.array(params, np.int64)
    run(_key(search), _at(slots))
    return IqkFound(d, m, t, codes)


def _key(search: IqkSearch) -> KernelKey:
    if search.table == "iq4 parity":
        return KernelKey(_JOINT_KERNELS, "make_search_parity")
    if search.table == "iq2 pairs":
        return KernelKey(_JOINT_KERNELS, "make_search_pairs")
    args = (search.table, search.n, search.low, search.high, int(search.odd), search.n_rows, int(search.half))
    return KernelKey(_KERNELS, "make_search", args)


def _at(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data
