"""Pieces of new tensors: rows of checkpoint tensors, chosen, rearranged or computed.

Tensors are read in slabs of rows, so memory does not depend on their size. Where values cannot be read row by row (a
transposed matrix), the piece is one matrix (an expert, a head), which is kept while its rows are read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.convert.source import Array, CheckpointSource
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import tensor_n_bytes
from ikcli.quant.encode import bf16

Floats = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]
Value = Callable[[Floats], Floats]

TYPES_OF = {"F32": GGMLType.F32, "F16": GGMLType.F16, "BF16": GGMLType.BF16, "F64": GGMLType.F32}
"""dtype of a checkpoint -> tensor type that holds the same values (doubles are rounded)."""
TYPES_OF |= {"I32": GGMLType.I32, "I64": GGMLType.I32}  # tables of ids
KEPT = {"MXFP4": GGMLType.MXFP4, "NVFP4": GGMLType.NVFP4, "Q4_0": GGMLType.Q4_0}
"""Types of blocks that a dequantized source has, asked for the blocks themselves."""
TYPES_OF |= KEPT
_WHOLE = {GGMLType.I32: "<i4", GGMLType.I64: "<i8"}  # tables of ids, and ids that a conversion computed


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows of a tensor seen as a matrix: from `first` on, or those in `order`; `columns` rearranges each row.

    `factor` multiplies the numbers.
    """

    name: str
    n_rows: int
    width: int
    first: int = 0
    order: Order | None = field(default=None, compare=False)
    columns: Order | None = field(default=None, compare=False)
    factor: float = 1.0

    def read(self, source: CheckpointSource, first: int, last: int) -> Array:
        """Return rows [first, last) of the piece, as stored, without the factor."""
        if self.order is None:
            rows = source.rows(self.name, self.first + first, self.first + last)
        else:
            rows = _rows_of(source, self.name, self.order[first:last])
        return rows if self.columns is None else rows[:, self.columns]


def _rows_of(source: CheckpointSource, name: str, order: Order) -> Array:
    """Read rows in any order: with one read if they lie close together, else run by run."""
    low, high = int(order.min()), int(order.max()) + 1
    if high - low <= 4 * len(order) + 64:
        return source.rows(name, low, high)[order - low]
    cuts = np.flatnonzero(np.diff(order) != 1) + 1
    runs = np.split(order, cuts)
    return np.concatenate([source.rows(name, int(run[0]), int(run[-1]) + 1) for run in runs])


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that is computed as a whole: `make` of rows [first, last) of a tensor."""

    name: str
    n_rows: int
    width: int
    first: int
    last: int
    make: Callable[[Array], Array] = field(compare=False)

    def read(self, source: CheckpointSource, first: int, last: int) -> Array:
        """Return rows [first, last) of the piece, as stored."""
        return _MADE.get(self, source)[first:last]


def turn(rows: Array) -> Array:
    """Return the transposed matrix."""
    return np.ascontiguousarray(rows.T)


class _Made:
    """A cache of the last two computed matrices, shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._matrices: dict[int, tuple[Matrix, Array]] = {}

    def get(self, piece: Matrix, source: CheckpointSource) -> Array:
        with self._lock:
            found = self._matrices.get(id(piece))
            if found is None or found[0] is not piece:
                while len(self._matrices) > 1:
                    self._matrices.pop(next(iter(self._matrices)))
                made = piece.make(source.rows(piece.name, piece.first, piece.last))
                found = self._matrices[id(piece)] = (piece, made)
            return found[1]


_MADE = _Made()


@dataclass(frozen=True, slots=True)
class Constant:
    """Values computed by the conversion (factors of rotations, ids)."""

    values: Floats | Order

    @property
    def dtype(self) -> str:
        """Return the type as checkpoints name it."""
        return "I64" if self.values.dtype == np.int64 else "F32"

    @property
    def n_rows(self) -> int:
        return 1

    @property
    def width(self) -> int:
        return self.values.size

    def read(self, source: CheckpointSource, first: int, last: int) -> Array:
        """Return the row."""
        return self.values.reshape(1, -1)[first:last]


@dataclass(frozen=True, slots=True)
class Numbers:
    """A row of numbers from small tensors: an element of each, times those of `times`."""

    places: tuple[tuple[str, int], ...]
    times: Piece | None = None
    dtype: str = "F32"
    n_rows: int = 1

    @property
    def width(self) -> int:
        return len(self.places)

    def read(self, source: CheckpointSource, first: int, last: int) -> Array:
        """Return the row."""
        found = np.array([source.read(name).reshape(-1)[i] for name, i in self.places], np.float32)
        if self.times is not None:
            name = getattr(self.times, "name", None)
            found = found * as_float32(self.times.read(source, 0, 1), source.dtype(name) if name else "F32")
        return found.reshape(1, -1)[first:last]


Piece = TensorRows | Matrix | Constant | Numbers


@dataclass(frozen=True, slots=True)
class NewRows:
    """A tensor to be written: GGUF shape (row length first), the type it is read as, and the pieces of its rows."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    pieces: Sequence[Piece]
    value: Value | None = None

    @property
    def n_bytes(self) -> int:
        return tensor_n_bytes(self.type, self.shape)

    def read(self, source: CheckpointSource, first: int, last: int) -> Array:
        """Return rows [first, last) in the tensor's type: (last - first, ne0)."""
        found: list[Array] = []
        start = 0
        for piece in self.pieces:
            low, high = max(first - start, 0), min(last - start, piece.n_rows)
            if low < high:
                dtype = piece.dtype if isinstance(piece, Constant | Numbers) else source.dtype(piece.name)
                factor = piece.factor if isinstance(piece, TensorRows) else 1.0
                found.append(self._typed(piece.read(source, low, high), dtype, factor))
            start += piece.n_rows
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _typed(self, rows: Array, dtype: str, factor: float) -> Array:
        if self.type in _WHOLE:
            return np.ascontiguousarray(rows, _WHOLE[self.type])
        if TYPES_OF[dtype] == self.type and self.value is None and dtype != "F64" and factor == 1.0:
            return np.ascontiguousarray(rows)
        if self.type == GGMLType.BF16:
            return bf16(np.ascontiguousarray(rows, np.float32)).view("<u2")
        values = as_float32(rows, dtype)
        if factor != 1.0:
            values = values * np.float32(factor)
        if self.value is not None:
            values = self.value(values)
            if dtype == "F16":  # round to the precision of the checkpoint
                values = values.astype("<f2").astype("<f4")
        return np.ascontiguousarray(values, "<f4")


def as_float32(rows: Array, dtype: str) -> Floats:
    """Return values of a checkpoint as float32."""
    if dtype == "BF16":
        return (rows.astype("<u4") << 16).view("<f4")
    return rows.astype("<f4")


def n_rows_of(shape: Sequence[int]) -> int:
    """Return the number of rows of a checkpoint tensor, seen as a matrix."""
    return math.prod(shape[:-1])
