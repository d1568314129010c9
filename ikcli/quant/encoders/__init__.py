"""Encoders of every storage type: which function writes a type, and one entry point that runs it on many rows.

`ENCODERS` maps a type to `module:function` inside this package; modules are imported when a type is first needed.
Such a function is called as `encode(values, type, imatrix, options)`: `values` (n_rows, ne0) float32, C-contiguous and
finite; `imatrix` (ne0,) float32, finite and >= 0, or None; the result is uint8 with n_rows * row_size bytes. Rows do
not depend on each other (a type of its own layout gets multiples of its group height); the function releases the GIL.
Types without entry: the closed-form encoders of `ikcli.quant.encode`; interleaved types: their plain type, regrouped.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ikcli.errors import NonFiniteError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.quant import encode
from ikcli.quant.formats import FORMATS, row_size

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """Q4_0 codes limited to -7..7 without importance weights; exhaustive IQ2_KS search; scales of least squared error
    where rows would be made unbiased (`unbiased`)."""

    symmetric_q40: bool = False
    slow_iq2ks: bool = False
    least_squares: bool = False


RowEncoder = Callable[[Floats, GGMLType, Floats | None, EncodeOptions], Bytes]

# Type -> "module:function" below ikcli.quant.encoders.
ENCODERS: dict[GGMLType, str] = {
    GGMLType.F16: "floats:encode",
    GGMLType.BF16: "floats:encode",
    GGMLType.Q4_0: "legacy:encode",
    GGMLType.Q4_1: "legacy:encode",
    GGMLType.Q5_0: "legacy:encode",
    GGMLType.Q5_1: "legacy:encode",
    GGMLType.Q6_0: "legacy:encode",
    GGMLType.Q8_0: "legacy:encode",
    GGMLType.MXFP4: "legacy:encode",
    GGMLType.IQ4_NL: "legacy:encode",
    GGMLType.Q8_KV: "int8:encode_rows",
    GGMLType.Q8_K_R8: "int8:encode_groups",
    GGMLType.Q8_K_R16: "int8:encode_groups",
    GGMLType.Q2_K: "kquants:encode",
    GGMLType.Q3_K: "kquants:encode",
    GGMLType.Q4_K: "kquants:encode",
    GGMLType.Q5_K: "kquants:encode",
    GGMLType.Q6_K: "kquants:encode",
    GGMLType.IQ4_XS: "kquants:encode",
    GGMLType.IQ2_K: "iqk:encode",
    GGMLType.IQ3_K: "iqk:encode",
    GGMLType.IQ4_K: "iqk:encode",
    GGMLType.IQ5_K: "iqk:encode",
    GGMLType.IQ6_K: "iqk:encode",
    GGMLType.IQ2_KS: "iqk:encode",
    GGMLType.IQ3_KS: "iqk:encode",
    GGMLType.IQ4_KS: "iqk:encode",
    GGMLType.IQ5_KS: "iqk:encode",
    GGMLType.IQ4_KSS: "iqk:encode",
    GGMLType.IQ2_KL: "iqk:encode",
    GGMLType.IQ2_XXS: "iquants:encode",
    GGMLType.IQ2_XS: "iquants:encode",
    GGMLType.IQ2_S: "iquants:encode",
    GGMLType.IQ3_XXS: "iquants:encode",
    GGMLType.IQ3_S: "iquants:encode",
    GGMLType.IQ1_S: "iquants:encode",
    GGMLType.IQ1_M: "iquants:encode",
    GGMLType.IQ1_S_R4: "iquants:encode",
    GGMLType.IQ1_M_R4: "iquants:encode",
    GGMLType.IQ1_KT: "trellis:encode",
    GGMLType.IQ2_KT: "trellis:encode",
    GGMLType.IQ3_KT: "trellis:encode",
    GGMLType.IQ4_KT: "trellis:encode",
    GGMLType.IQ1_BN: "bitnet:encode",
    GGMLType.IQ2_BN: "bitnet:encode",
}

# Written byte for byte as the reference does where there are no importance weights.
_AS_THE_REFERENCE = frozenset({GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1})

_PIECES_PER_THREAD = 4
_COMPILED_SIZE = 1 << 16  # such pieces come from large tensors: compiled regrouping is worth its loading
_DEFAULT_OPTIONS = EncodeOptions()


def available_types() -> frozenset[GGMLType]:
    """Types that `quantize_rows` can write, interleaved ones included."""
    plain = frozenset(ENCODERS) | encode.encodable_types()
    return plain | {t for t, f in FORMATS.items() if f.base in plain}


def quantize_rows(
    values: npt.NDArray[np.float32],
    type: GGMLType,
    imatrix: npt.NDArray[np.float32] | None = None,
    *,
    n_threads: int = 1,
    options: EncodeOptions = _DEFAULT_OPTIONS,
) -> Bytes:
    """Encode (n_rows, ne0) float32, weighted by `imatrix` (ne0,), into the n_rows * row_size bytes of those rows.

    For interleaved types n_rows is a multiple of the group height. NonFiniteError names the first row with NaN or Inf,
    UnsupportedError a type without encoder, UsageError rows that do not suit the type.
    """
    fmt = FORMATS[type]
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
    """Row ranges of whole groups, some per thread, so that threads finish at about the same time."""
    n_groups = n_rows // group
    n_pieces = min(n_groups, n_threads * _PIECES_PER_THREAD) if n_threads > 1 else 1
    cuts = [n_groups * i // max(1, n_pieces) * group for i in range(max(1, n_pieces) + 1)]
    return list(itertools.pairwise(cuts))


def check_finite(rows: Floats, first: int = 0) -> None:
    """NonFiniteError with the number of the first row that holds NaN or Inf; rows are counted from `first`."""
    good = np.isfinite(rows)
    if not good.all():
        row = int(np.argmin(good.all(axis=1)))
        raise NonFiniteError(f"row {first + row} holds NaN or Inf")


@cache
def _row_encoder(type: GGMLType) -> RowEncoder:
    where = ENCODERS.get(type)
    if where is not None:
        module, _, name = where.partition(":")
        found: RowEncoder = getattr(importlib.import_module(f"{__name__}.{module}"), name)
        return _unbiased(found)
    if type in encode.encodable_types():
        return _closed_form
    base = FORMATS[type].base
    if base is not None and (base in ENCODERS or base in encode.encodable_types()):
        return _interleaved
    raise UnsupportedError(f"there is no encoder for {FORMATS[type].name}; choose another type")


def _unbiased(encode_rows: RowEncoder) -> RowEncoder:
    """The encoder, followed by scales that leave rows as long as they were."""
    from ikcli.quant.encoders.unbiased import unbias

    def encode_unbiased(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
        rows = encode_rows(values, type, imatrix, options)
        weighted = imatrix is not None and imatrix.max(initial=0) > 0 and not options.symmetric_q40
        if options.least_squares or (type in _AS_THE_REFERENCE and not weighted):
            return rows
        return unbias(rows, values, type, imatrix if weighted else None)

    return encode_unbiased


def _closed_form(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    return encode.quantize(values, type)


def _interleaved(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    from ikcli.quant.repack import repack_rows

    base = FORMATS[type].base
    assert base is not None
    rows = _row_encoder(base)(values, base, imatrix, options)
    return repack_rows(rows, type, values.shape[1], compiled=values.size >= _COMPILED_SIZE or None)
