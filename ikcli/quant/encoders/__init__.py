"""Encode rows in every storage type: the table of encoders, and one entry point that runs them on many rows.

`TensorType.encode` names the function; its module is imported when a type is first needed. It is called as
`encode(values, type, imatrix, options)`: `values` (n_rows, ne0) float32, C-contiguous and finite; `imatrix` (ne0,)
float32, finite and >= 0, or None; the result is uint8 with n_rows * row_size bytes. Rows do not depend on each other (a
type with a separate layout gets multiples of its group height). The function releases the GIL. Types without one: the
closed-form encoders of `ikcli.quant.encode`; interleaved types: their plain type, regrouped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ikcli.errors import NonFiniteError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, TensorType
from ikcli.quant import encode
from ikcli.quant.formats import row_size
from ikcli.references import load

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """Options of the encoders.

    Q4_0 codes limited to -7..7 without importance weights; exhaustive IQ2_KS search; scales of least squared error
    instead of unbiased rows (`unbiased`).
    """

    symmetric_q40: bool = False
    slow_iq2ks: bool = False
    least_squares: bool = False


RowEncoder = Callable[[Floats, GGMLType, Floats | None, EncodeOptions], Bytes]

_PIECES_PER_THREAD = 4
_COMPILED_SIZE = 1 << 16  # such pieces come from large tensors: compiled regrouping is worth its loading
_DEFAULT_OPTIONS = EncodeOptions()


def available_types() -> frozenset[GGMLType]:
    """Return the types that `quantize_rows` can write, interleaved ones included."""
    return frozenset(t.type for t in TYPES.values() if _has_encoder(TYPES[t.plain]))


def _has_encoder(type: TensorType) -> bool:
    return bool(type.encode or type.encode_numpy)


def quantize_rows(
    values: npt.NDArray[np.float32],
    type: GGMLType,
    imatrix: npt.NDArray[np.float32] | None = None,
    *,
    n_threads: int = 1,
    options: EncodeOptions = _DEFAULT_OPTIONS,
) -> Bytes:
    """Encode (n_rows, ne0) float32, weighted by `imatrix` (ne0,), into the n_rows * row_size bytes of those rows.

    For interleaved types n_rows is a multiple of the group height. Raises NonFiniteError that names the first row with
    NaN or Inf, UnsupportedError for a type without encoder, UsageError for rows that do not suit the type.
    """
    fmt = TYPES[type]
    rows = np.ascontiguousarray(values, np.float32)
    n_bytes = row_size(type, rows.shape[1])
    if len(rows) % fmt.rows:
        raise UsageError(f"{fmt.name} takes rows in groups of {fmt.rows}, not {len(rows)}")
    encode_rows = _row_encoder(type)
    pieces = _pieces(len(rows), n_threads, fmt.rows)
    if len(pieces) == 1:
        check_finite(rows)
        return encode_rows(rows, type, imatrix, options).reshape(-1)
    out = np.empty((len(rows), n_bytes), np.uint8)

    def run(start: int, stop: int) -> None:
        check_finite(rows[start:stop], start)
        out[start:stop] = encode_rows(rows[start:stop], type, imatrix, options).reshape(stop - start, n_bytes)

    with ThreadPoolExecutor(n_threads) as pool:
        for done in [pool.submit(run, *piece) for piece in pieces]:
            done.result()
    return out.reshape(-1)


def _pieces(n_rows: int, n_threads: int, group: int) -> list[tuple[int, int]]:
    """Return row ranges of whole groups, several per thread, so that threads finish at about the same time."""
    n_groups = n_rows // group
    n_pieces = min(n_groups, n_threads * _PIECES_PER_THREAD) if n_threads > 1 else 1
    cuts = [n_groups * i // max(1, n_pieces) * group for i in range(max(1, n_pieces) + 1)]
    return list(itertools.pairwise(cuts))


def check_finite(rows: Floats, first: int = 0) -> None:
    """Raise NonFiniteError with the number of the first row that holds NaN or Inf, counted from `first`."""
    good = np.isfinite(rows)
    if not good.all():
        row = int(np.argmin(good.all(axis=1)))
        raise NonFiniteError(f"row {first + row} holds NaN or Inf")


@cache
def _row_encoder(type: GGMLType) -> RowEncoder:
    t = TYPES[type]
    if t.base is not None and _has_encoder(TYPES[t.base]):
        return _interleaved
    if t.encode:
        return _unbiased(load(t.encode))
    if t.encode_numpy:
        return _closed_form
    raise UnsupportedError(f"{t.name} has no encoder; choose another type")


def _unbiased(encode_rows: RowEncoder) -> RowEncoder:
    """Return the encoder followed by a correction of scales that keeps the length of rows."""
    from ikcli.quant.encoders.unbiased import unbias

    def encode_unbiased(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
        rows = encode_rows(values, type, imatrix, options)
        weighted = imatrix is not None and imatrix.max(initial=0) > 0 and not options.symmetric_q40
        if options.least_squares or (TYPES[type].keeps_length == "weighted" and not weighted):
            return rows
        return unbias(rows, values, type, imatrix if weighted else None)

    return encode_unbiased


def _closed_form(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    return encode.quantize(values, type)


def _interleaved(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    from ikcli.quant.repack import repack_rows

    base = TYPES[type].base
    assert base is not None
    rows = _row_encoder(base)(values, base, imatrix, options)
    return repack_rows(rows, type, values.shape[1], compiled=values.size >= _COMPILED_SIZE or None)
