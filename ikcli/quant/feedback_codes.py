"""Choose codes of rows for each family of types, as GPTQ/LDLQ error feedback needs them (`ikcli.quant.feedback`).

Scales are found first, for as many columns as share them. Codes are then chosen under these scales, as often as asked.
The families are: value tables per 16 columns, IQ4_KSS (whose codes depend on each other), grid points, trellis rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant import tables
from ikcli.quant.code_fields import code_space, is_replaceable, replace_codes
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, iqk, iquants, iquants_pack, quantize_rows, trellis
from ikcli.quant.encoders.iquants import grid_format
from ikcli.quant.encoders.native_call import run
from ikcli.quant.formats import row_size

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Chosen = tuple[npt.NDArray[Any], ...]
T = GGMLType

_SUB = 16  # columns that share all scales, in every type
_LANES = 16
_FAR = np.float32(1e30)
_LEAST_SQUARES = EncodeOptions(least_squares=True)
_GRIDS: dict[GGMLType, tuple[str, tuple[int, ...]]] = {  # kernels: factory and its arguments
    T.IQ2_XXS: ("make_grid", (8, 256, 1)),
    T.IQ2_XS: ("make_grid", (8, 512, 1)),
    T.IQ2_S: ("make_grid", (8, 1024, 0)),
    T.IQ3_XXS: ("make_grid", (4, 256, 1)),
    T.IQ3_S: ("make_grid", (4, 512, 0)),
    T.IQ1_S: ("make_ternary", (2048, 0)),
    T.IQ1_M: ("make_ternary", (2048, 1)),
}


class Step(NamedTuple):
    """A search among columns [first, last): a matrix (n, n) that passes errors on, and weights of squares (n,)."""

    first: int
    last: int
    passed: Floats
    weights: Floats


class FeedbackCodes(Protocol):
    """Codes and scales of rows (n_rows, ne0); `unit` columns (a divisor of 256) get their scales at a time."""

    unit: int

    def scale(self, step: Step, targets: Floats) -> None:
        """Find the scales of a unit as the plain encoder does; do nothing where a scale belongs to the whole row."""

    def search(self, step: Step, x: Floats, targets: Floats) -> tuple[Chosen, Floats]:
        """Choose codes for targets (n_rows, n), which are changed in place.

        Returns the codes and their errors (n_rows, n): x minus the decoded values.
        """

    def keep(self, step: Step, chosen: Chosen, rows: npt.NDArray[np.bool_] | slice) -> None:
        """Store what `search` found for these rows."""

    def pack(self) -> Bytes:
        """Return the n_rows * row size bytes."""


def group_size(type: GGMLType) -> int:
    """Return the number of columns that are chosen together; 0 for types without search."""
    if type in _GRIDS:
        return 4 if type == T.IQ3_S else 8
    if type in trellis.SEARCHES:
        return trellis.SEARCHES[type].size
    space = code_space(type)
    return 4 if type == T.IQ4_KSS else space.group if space is not None and is_replaceable(type) else 0


def column_order(type: GGMLType, ne0: int) -> npt.NDArray[np.intp] | None:
    """Return the order in which columns are searched and passed to `new_codes`; None for file order.

    Four codes of IQ4_KSS that depend on each other are two neighbours and the two columns 16 further.
    """
    if type != T.IQ4_KSS:
        return None
    return np.arange(ne0).reshape(-1, 2, 8, 2).transpose(0, 2, 1, 3).reshape(-1)


def new_codes(values: Floats, type: GGMLType, weights: Floats) -> FeedbackCodes:
    """Create the codes of rows (n_rows, ne0) of a type with a `group_size`; `weights` (ne0,) serve row scales."""
    if type in _GRIDS:
        return _Points(values, type)
    if type in trellis.SEARCHES:
        return _TrellisRows(values, type, weights)
    if type == T.IQ4_KSS:
        return _EvenCodes(values, weights)
    return _RowTables(values, type, weights) if TYPES[type].row_meta_size else _BlockTables(values, type)


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


# --- values of their own ----------------------------------------------------------------------------------------------
class _Tables:
    """Codes with tabled values: tables (n_rows, ne0 / 16, columns per code, codes), codes (n_rows, any)."""

    unit = 256
    _kernel: tuple[str, tuple[int, ...]]

    def __init__(self, values_of: Floats) -> None:
        self._values_of = values_of
        n_rows, n_subs, size, _ = values_of.shape
        self._size = 1 if self._kernel[0] == "make_parity" else size
        self._codes = np.zeros((n_rows, n_subs * _SUB // self._size), np.int32)

    def scale(self, step: Step, targets: Floats) -> None:
        pass

    def search(self, step: Step, x: Floats, targets: Floats) -> tuple[Chosen, Floats]:
        n_rows, n = targets.shape
        values_of = np.ascontiguousarray(self._values_of[:, step.first // _SUB : step.last // _SUB])
        n_codes = values_of.shape[3]
        codes, errors = np.empty((n_rows, n // self._size), np.int32), np.empty((n_rows, n), np.float32)
        scratch = np.empty(n_codes, np.float32)
        key = KernelKey("ikcli.quant.encoders.feedback_kernels", *self._kernel)
        arrays = (x, targets, step.passed, step.weights, values_of, codes, errors, scratch)
        a, t, p, w, v, c, e, s = (_address(array) for array in arrays)
        run(key, a, t, n_rows, n, p, w, v, n_codes, c, e, s)
        return (codes,), errors

    def keep(self, step: Step, chosen: Chosen, rows: npt.NDArray[np.bool_] | slice) -> None:
        self._codes[rows, step.first // self._size : step.last // self._size] = chosen[0][rows]


class _BlockTables(_Tables):
    """Types whose scales are stored in the blocks."""

    def __init__(self, values: Floats, type: GGMLType) -> None:
        space, (n_rows, ne0) = code_space(type), values.shape
        assert space is not None
        self._type = type
        self._kernel = ("make_tables", (space.group,))
        self.unit = max(TYPES[type].block_size, 2 * _SUB)
        self._rows = np.empty((n_rows, row_size(type, ne0)), np.uint8)
        super().__init__(np.empty((n_rows, ne0 // _SUB, space.group, max(_LANES, space.n_codes)), np.float32))

    def scale(self, step: Step, targets: Floats) -> None:
        fmt = TYPES[self._type]
        data = quantize_rows(targets, self._type, step.weights, options=_LEAST_SQUARES).reshape(len(targets), -1)
        self._rows[:, step.first // fmt.block_size * fmt.type_size : step.last // fmt.block_size * fmt.type_size] = data
        self._values_of[:, step.first // _SUB : step.last // _SUB] = value_tables(data, self._type, targets.shape[1])

    def pack(self) -> Bytes:
        return _with_codes(self._rows, self._type, self._codes)


class _RowTables(_Tables):
    """Types with a scale per row, which are encoded once before the search."""

    def __init__(self, values: Floats, type: GGMLType, weights: Floats) -> None:
        self._type = type
        data = quantize_rows(values, type, weights, options=_LEAST_SQUARES)
        self._rows = data.reshape(len(values), -1)
        values_of = value_tables(self._rows, type, values.shape[1])
        self._kernel = ("make_tables", (values_of.shape[2],))
        super().__init__(values_of)

    def pack(self) -> Bytes:
        return _with_codes(self._rows, self._type, self._codes)


class _EvenCodes(_Tables):
    """IQ4_KSS: four codes with an even number of bits at a time, under the scales of the plain encoder.

    Columns arrive, and codes are kept, in the order of `column_order`.
    """

    _kernel = ("make_parity", ())

    def __init__(self, values: Floats, weights: Floats) -> None:
        n_rows, ne0 = values.shape
        order = column_order(T.IQ4_KSS, ne0)
        assert order is not None
        self._back = np.argsort(order)
        plain = np.ascontiguousarray(values[:, self._back])
        mean_one = np.ascontiguousarray(iqk.mean_one_weights(weights[self._back], ne0))
        self._found = iqk.find(plain, T.IQ4_KSS, mean_one, iqk.SEARCHES[T.IQ4_KSS])
        scales = np.repeat(self._found.d[:, None] * self._found.m.astype(np.float32), 2, axis=1)
        levels = tables.IQ4_VALUES[np.repeat(self._found.t, 2, axis=1)].reshape(n_rows, -1, 1, 16)
        super().__init__(scales.reshape(n_rows, -1, 1, 1) * levels.astype(np.float32))

    def pack(self) -> Bytes:
        new = np.ascontiguousarray(self._codes[:, self._back], np.uint8).reshape(self._found.codes.shape)
        return iqk.PACKERS[T.IQ4_KSS](*self._found._replace(codes=new), len(self._codes)).reshape(-1)


def _with_codes(rows: Bytes, type: GGMLType, codes: npt.NDArray[np.int32]) -> Bytes:
    """Return rows (n_rows, row size) with their codes replaced by (n_rows, any)."""
    fmt, out = TYPES[type], rows.copy()
    blocks = np.ascontiguousarray(rows[:, fmt.row_meta_size :]).reshape(-1, fmt.type_size)
    new = replace_codes(blocks, type, codes.reshape(len(blocks), -1))
    out[:, fmt.row_meta_size :] = new.reshape(len(rows), -1)
    return out.reshape(-1)


def value_tables(rows: Bytes, type: GGMLType, ne0: int) -> Floats:
    """Return the value of every code in these rows: (n_rows, ne0 / 16, columns per code, codes), at least 16 codes.

    Decodes copies of the rows in which the columns under one scale hold one code after the other.
    """
    fmt, space = TYPES[type], code_space(type)
    assert space is not None
    n_rows, size = len(rows), space.group
    per_sub = _SUB // size
    n_codes = max(_LANES, space.n_codes)
    out = np.full((n_rows, ne0 // _SUB, size, n_codes), _FAR, np.float32)
    blocks = np.ascontiguousarray(rows[:, fmt.row_meta_size :]).reshape(-1, fmt.type_size)
    codes = np.arange(fmt.block_size // size) % per_sub
    for first in range(0, space.n_codes, per_sub):
        n = min(per_sub, space.n_codes - first)
        tried = np.broadcast_to(first + codes % n, (len(blocks), len(codes)))
        new = replace_codes(blocks, type, tried).reshape(n_rows, -1)
        data = np.concatenate((rows[:, : fmt.row_meta_size], new), axis=1)
        decoded = dequantize(data.reshape(-1), type, (ne0, n_rows)).reshape(n_rows, ne0 // _SUB, per_sub, size)
        out[:, :, :, first : first + n] = decoded[:, :, :n].transpose(0, 1, 3, 2)
    return out


# --- grid points ------------------------------------------------------------------------------------------------------
class _Points:
    """Points and signs of grid types under the scales of their super-blocks."""

    def __init__(self, values: Floats, type: GGMLType) -> None:
        self._type, self._format = type, grid_format(type)
        self.unit = self._format.span
        self._grid = np.ascontiguousarray(tables.grid(self._format.grid).T)
        self._kernel = KernelKey("ikcli.quant.encoders.feedback_grids", *_GRIDS[type])
        self._scratch_bytes = 512 + 16 * self._grid.shape[1]
        n_rows, ne0 = values.shape
        self._found: list[iquants_pack.GridFound] = []
        self._scales = np.empty((n_rows, ne0 // 8), np.float32)
        self._points = np.empty((n_rows, ne0 // len(self._grid)), np.int32)
        self._signs = np.empty((n_rows, ne0 // 8), np.uint8)

    def scale(self, step: Step, targets: Floats) -> None:
        fmt, found = self._format, iquants.find(targets, self._type, step.weights)
        d = found.d.astype(np.float16).astype(np.float32)
        self._found.append(found)
        self._scales[:, step.first // 8 : step.last // 8] = np.repeat(
            d * fmt.multipliers[found.scales], fmt.sub // 8, axis=1
        )
        self.keep(step, (found.points, found.signs), slice(None))

    def search(self, step: Step, x: Floats, targets: Floats) -> tuple[Chosen, Floats]:
        n_rows, n = targets.shape
        dims = len(self._grid)
        scales = np.ascontiguousarray(self._scales[:, step.first // 8 : step.last // 8])
        points = self._points[:, step.first // dims : step.last // dims].copy()
        signs, errors = np.empty((n_rows, n // 8), np.uint8), np.empty((n_rows, n), np.float32)
        scratch = np.empty(self._scratch_bytes, np.uint8)
        arrays = (step.passed, step.weights, scales, self._grid, points, signs, errors, scratch)
        run(self._kernel, _address(x), _address(targets), n_rows, n, *(_address(a) for a in arrays))
        return (points, signs), errors

    def keep(self, step: Step, chosen: Chosen, rows: npt.NDArray[np.bool_] | slice) -> None:
        dims = len(self._grid)
        self._points[rows, step.first // dims : step.last // dims] = chosen[0][rows]
        self._signs[rows, step.first // 8 : step.last // 8] = chosen[1][rows]

    def pack(self) -> Bytes:
        out, n_units = [], len(self._found)
        pieces = zip(self._found, *(np.split(a, n_units, axis=1) for a in (self._points, self._signs)), strict=True)
        for found, points, signs in pieces:
            now = found._replace(points=np.ascontiguousarray(points), signs=np.ascontiguousarray(signs))
            out.append(iquants_pack.pack(self._type, now))
        return np.concatenate(out, axis=1).reshape(-1)


# --- trellis ----------------------------------------------------------------------------------------------------------
class _TrellisRows:
    """Trellis rows under the row scale, multipliers and table choice of the plain encoder."""

    unit = 256

    def __init__(self, values: Floats, type: GGMLType, weights: Floats) -> None:
        self._type, self._search = type, trellis.SEARCHES[type]
        n_rows, ne0 = values.shape
        self._found = trellis.find(values, trellis.mean_one_weights(weights), self._search)
        multipliers = np.array(self._search.multipliers, np.float32)[self._found.m].reshape(n_rows, -1)
        self._scales = self._found.d[:, None] * multipliers
        self._books = self._found.book.reshape(n_rows, -1)
        self._slots = np.array([book.addresses() for book in self._search.codebooks()], np.int64)
        self._rows = np.empty((n_rows, ne0 // self._search.size), np.int32)
        self._values = np.empty_like(values)

    def scale(self, step: Step, targets: Floats) -> None:
        pass

    def search(self, step: Step, x: Floats, targets: Floats) -> tuple[Chosen, Floats]:
        s, (n_rows, n) = self._search, targets.shape
        scales, books = (
            np.ascontiguousarray(a[:, step.first // 32 : step.last // 32]) for a in (self._scales, self._books)
        )
        rows, errors = np.empty((n_rows, n // s.size), np.int32), np.empty((n_rows, n), np.float32)
        scratch = np.empty(256 + 4 * s.n_clusters, np.uint8)
        words = [_address(a) for a in (step.passed, step.weights, scales, books, self._slots)]
        words += [round(1000 * s.reach[1]), *(_address(a) for a in (rows, errors, scratch))]
        key = KernelKey("ikcli.quant.encoders.feedback_trellis", "make_rows", (s.size, int(s.magnitude)))
        run(key, _address(x), _address(targets), n_rows, n, *words)
        return (rows, x - errors), errors

    def keep(self, step: Step, chosen: Chosen, rows: npt.NDArray[np.bool_] | slice) -> None:
        size = self._search.size
        self._rows[rows, step.first // size : step.last // size] = chosen[0][rows]
        self._values[rows, step.first : step.last] = chosen[1][rows]

    def pack(self) -> Bytes:
        found = self._found._replace(rows=self._rows.reshape(-1, 32 // self._search.size))
        return trellis.pack(self._values, self._type, found).reshape(-1)
