"""Encode the trellis types IQ1_KT, IQ2_KT, IQ3_KT and IQ4_KT.

The search (`trellis_kernels`) returns the scale of a row, per sub-block of 32 a multiplier and a table, and a table row
per group. It minimises sum(w * (x - x')^2), x' as stored (see `TensorType.matmul_scale`), w the importance weights, or
1. Layouts: `decoders.trellis`. Corresponds to iqk_quantize.cpp, which scores with weights that also contain the values
and searches fixed cells of the table only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.encoders.native_call import run
from ikcli.quant.encoders.trellis_clusters import Codebook, codebook
from ikcli.quant.tables import IQ4_VALUES, TRELLIS_OFFSET, TRELLIS_OFFSET_HIGH

_KERNELS = "ikcli.quant.encoders.trellis_kernels"
_CHUNK_ELEMENTS = 1 << 18
_LEAST_WEIGHT = np.float32(1e-6)  # of the mean weight: elements without weight still get sensible values
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TrellisSearch:
    """Table of a type and how it is searched.

    `scales`: first trial scale of a sub-block (of rms / deviation of the table), ratio to the next, number of fours;
    `reach`: how much farther than the nearest centre a visited cluster may be, for the trials and for the rest;
    `clip`: trial row scales, of the least one without clipping; `n_windows`: fours of multipliers tried per sign in the
    first of `n_rounds` rounds.
    """

    size: int
    n_rows: int
    n_clusters: int
    offsets: tuple[int, ...]
    multipliers: tuple[float, ...]
    scales: tuple[float, float, int]
    reach: tuple[float, float]
    clip: tuple[float, float]
    magnitude: bool = False
    linear: bool = True
    n_rounds: int = 2
    n_windows: int = 1

    def codebooks(self) -> list[Codebook]:
        """Return the tables, clustered."""
        return [
            codebook(self.size, self.n_rows, self.n_clusters, magnitude=self.magnitude, offset=offset)
            for offset in self.offsets
        ]


_LOW, _BOTH = (TRELLIS_OFFSET,), (TRELLIS_OFFSET, TRELLIS_OFFSET_HIGH)
_IQ3, _SIGNED = tuple(map(float, range(16))), tuple(map(float, range(-64, 64)))
_IQ4 = tuple(float(v) for v in IQ4_VALUES[0])
SEARCHES = {
    GGMLType.IQ1_KT: TrellisSearch(
        8, 8192, 256, _LOW, _IQ4, (0.7, 1.12, 1), (8.0, 36.0), (0.8, 4.0), linear=False, n_rounds=1
    ),
    GGMLType.IQ2_KT: TrellisSearch(
        8, 65536, 512, _LOW, _IQ4, (0.75, 1.12, 1), (5.0, 21.0), (0.8, 4.0), linear=False, n_rounds=1
    ),
    GGMLType.IQ3_KT: TrellisSearch(
        8, 65536, 512, _LOW, _IQ3, (0.7, 1.12, 2), (6.0, 20.0), (0.8, 3.0), magnitude=True, n_rounds=1, n_windows=2
    ),
    GGMLType.IQ4_KT: TrellisSearch(4, 32768, 512, _BOTH, _SIGNED, (0.7, 1.08, 2), (8.0, 16.0), (0.9, 2.0)),
}


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode rows (n_rows, ne0) into the bytes of `type`."""
    return encode_with(values, type, imatrix, SEARCHES[type])


def encode_with(values: Floats, type: GGMLType, imatrix: Floats | None, search: TrellisSearch) -> Bytes:
    """Do `encode` with a search of the caller's choice."""
    n_rows, ne0 = values.shape
    weights = mean_one_weights(imatrix)
    step = max(1, _CHUNK_ELEMENTS // ne0)
    chunks = [_encode_rows(values[i : i + step], type, weights, search) for i in range(0, n_rows, step)]
    return np.concatenate(chunks).reshape(-1) if chunks else np.empty(0, np.uint8)


def mean_one_weights(imatrix: Floats | None) -> Floats | None:
    """Return weights of mean 1, none of them 0, or None where all are alike."""
    if imatrix is None:
        return None
    wide = np.asarray(imatrix, np.float64)
    mean = wide.mean()
    if mean <= 0.0 or (wide == wide[0]).all():
        return None
    return np.maximum((wide / mean).astype(np.float32), _LEAST_WEIGHT)


class TrellisFound(NamedTuple):
    """Of n rows: scales d (n,), per sub-block multiplier and table (n * subs,), table rows (n * subs, groups)."""

    d: Floats
    m: Bytes
    book: Bytes
    rows: Ints


def _encode_rows(values: Floats, type: GGMLType, weights: Floats | None, search: TrellisSearch) -> Bytes:
    return pack(values, type, find(values, weights, search))


def pack(values: Floats, type: GGMLType, found: TrellisFound) -> Bytes:
    """Return the bytes (n_rows, row bytes); IQ3_KT takes the signs of `values`."""
    n_groups = 8 * found.rows.shape[1]
    blocks = _PACKERS[type](values, found.m.reshape(-1, 8), found.book.reshape(-1, 8), found.rows.reshape(-1, n_groups))
    header = found.d.astype("<f4").view(np.uint8).reshape(-1, 4)
    return np.concatenate((header, blocks.reshape(len(header), -1)), axis=1)


def find(values: Floats, weights: Floats | None, search: TrellisSearch) -> TrellisFound:
    """Search rows (n_rows, ne0); weights (ne0,) have mean 1."""
    n_rows, ne0 = values.shape
    n_subs = ne0 // 32
    books = search.codebooks()
    table = np.array(search.multipliers, np.float32)
    options = np.array([*search.scales, *search.reach, *search.clip, search.n_rounds, search.n_windows], np.float32)
    d = np.zeros(n_rows, np.float32)
    m, book = np.zeros((n_rows * n_subs), np.uint8), np.zeros((n_rows * n_subs), np.uint8)
    rows = np.zeros((n_rows * n_subs, 32 // search.size), np.int32)
    buffers = np.empty(20 * ne0 + 128 * n_subs, np.uint8)
    scratch = np.empty(2048 + 4 * search.n_clusters * (1 + 2 * (32 // search.size) * len(books)), np.uint8)
    book_slots = np.array([book.addresses() for book in books], np.int64)
    slots = [_at(values), 0 if weights is None else _at(weights), n_rows, ne0, _at(book_slots), len(books)]
    slots += [_at(table), len(table), _at(options), _at(buffers), _at(scratch), _at(d), _at(m), _at(book), _at(rows)]
    both_signs = int(search.multipliers[0] < 0)
    args = (search.size, int(weights is not None), int(search.linear), both_signs)
    params = np.array(slots, np.int64)
    run(KernelKey(_KERNELS, "make_search", args), _at(params))
    return TrellisFound(d, m, book, rows)


def _at(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _high_nibbles(index: Ints) -> Bytes:
    """Pack bits 8..11 of indices (n, k): byte i holds those of i and i + k/2."""
    high = (index >> 8 & 15).astype(np.uint8)
    half = high.shape[1] // 2
    return high[:, :half] | high[:, half:] << np.uint8(4)


def _words(values: npt.NDArray[Any], dtype: str) -> Bytes:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def _two_multipliers(m: Bytes) -> Bytes:
    return m[:, :4] | m[:, 4:] << np.uint8(4)


def _pack_iq1_kt(values: Floats, m: Bytes, book: Bytes, index: Ints) -> Bytes:
    top = (index >> 12 & 1).reshape(-1, 8, 4) << np.arange(4, 8, dtype=np.int32)
    sh = m | top.sum(axis=2).astype(np.uint8)
    return np.concatenate((sh, (index & 255).astype(np.uint8), _high_nibbles(index)), axis=1)


def _pack_iq2_kt(values: Floats, m: Bytes, book: Bytes, index: Ints) -> Bytes:
    return np.concatenate((_two_multipliers(m), _words(index, "<u2")), axis=1)


def _pack_iq3_kt(values: Floats, m: Bytes, book: Bytes, index: Ints) -> Bytes:
    negative = (values.reshape(-1, 8, 32) < 0).astype(np.uint8) << np.arange(8, dtype=np.uint8)[:, None]
    signs = np.bitwise_or.reduce(negative, axis=1)
    return np.concatenate((_two_multipliers(m), _words(index, "<u2"), signs), axis=1)


def _pack_iq4_kt(values: Floats, m: Bytes, book: Bytes, index: Ints) -> Bytes:
    top = (index >> 12 & 7).astype(np.uint32).reshape(-1, 8, 8) << np.arange(8, 32, 3, dtype=np.uint32)
    shb = m.astype(np.uint32) << np.uint32(1) | book | np.bitwise_or.reduce(top, axis=2)
    return np.concatenate((_words(shb, "<u4"), (index & 255).astype(np.uint8), _high_nibbles(index)), axis=1)


_Packer = Callable[[Floats, Bytes, Bytes, Ints], Bytes]
_PACKERS: dict[GGMLType, _Packer] = {
    GGMLType.IQ1_KT: _pack_iq1_kt,
    GGMLType.IQ2_KT: _pack_iq2_kt,
    GGMLType.IQ3_KT: _pack_iq3_kt,
    GGMLType.IQ4_KT: _pack_iq4_kt,
}
