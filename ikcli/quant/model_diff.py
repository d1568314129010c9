"""Compare two models: metadata, tensors, types, and the decoded values, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.gguf.values import Typed
from ikcli.quant.decode import dequantize
from ikcli.quant.formats import row_size

_PIECE = 1 << 21  # elements decoded at a time
_ROWS = 16  # a multiple of the rows that any interleaved type groups


@dataclass(frozen=True, slots=True)
class KeyDiff:
    """A key whose value or type differs; None: absent from that model.

    `where`: for arrays of one length, the first element that differs and the number of those that do.
    """

    key: str
    a: Typed | None
    b: Typed | None
    where: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor of both models that differs.

    The errors are None if the shapes differ or a type cannot be decoded (`problem`). `relative` is the norm of the
    difference over the norm of the first model's tensor.
    """

    name: str
    a: TensorInfo
    b: TensorInfo
    relative: float | None = None
    rms: float | None = None
    largest: float | None = None
    at: tuple[int, ...] = ()
    values: tuple[float, float] = (math.nan, math.nan)
    n_different: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelDiff:
    """All differences; tensors in the order of the first model."""

    keys: tuple[KeyDiff, ...]
    only_a: tuple[TensorInfo, ...]
    only_b: tuple[TensorInfo, ...]
    tensors: tuple[TensorDiff, ...]
    n_same: int

    @property
    def identical(self) -> bool:
        return not (self.keys or self.only_a or self.only_b or self.tensors)


@dataclass(slots=True)
class _Sums:
    squares: float = 0.0
    reference: float = 0.0
    largest: float = -1.0
    at: int = 0
    values: tuple[float, float] = (math.nan, math.nan)
    n_different: int = 0
    n_bad: int = 0

    def add(self, a: Any, b: Any, first: int) -> None:
        """Add numbers from the flat index `first` on; equal NaNs or infinities do not differ."""
        differs = ~((a == b) | (np.isnan(a) & np.isnan(b)))
        self.n_different += int(np.count_nonzero(differs))
        finite = np.isfinite(a) & np.isfinite(b)
        self.n_bad += int(np.count_nonzero(differs & ~finite))
        a64, b64 = np.where(finite, a, 0).astype(np.float64), np.where(finite, b, 0).astype(np.float64)
        error = np.abs(a64 - b64)
        self.squares += float(np.dot(error, error))
        self.reference += float(np.dot(a64, a64))
        at = int(np.argmax(error))
        if error[at] > self.largest:
            self.largest, self.at, self.values = float(error[at]), first + at, (float(a[at]), float(b[at]))


def compare(a: GGUFFile, b: GGUFFile, advance: Callable[[float], None] = lambda n_bytes: None) -> ModelDiff:
    """Compare two models; `advance` gets the bytes of the first model that were read."""
    diffs: list[TensorDiff] = []
    n_same = 0
    for name, info in a.tensors.items():
        if name in b.tensors:
            found = compare_tensor(a, b, name)
            diffs += [found] if found is not None else []
            n_same += found is None
        advance(info.n_bytes)
    return ModelDiff(
        tuple(compare_metadata(a, b)),
        tuple(t for t in a.tensors.values() if t.name not in b.tensors),
        tuple(t for t in b.tensors.values() if t.name not in a.tensors),
        tuple(diffs),
        n_same,
    )


def compare_metadata(a: GGUFFile, b: GGUFFile) -> list[KeyDiff]:
    """Return the keys that differ: those of the first model in its order, then new ones."""
    left, right = a.typed_metadata(), b.typed_metadata()
    out: list[KeyDiff] = []
    for key in dict.fromkeys((*left, *right)):
        x, y = left.get(key), right.get(key)
        if x is None or y is None:
            out.append(KeyDiff(key, x, y))
        elif (x.type, x.item_type) != (y.type, y.item_type) or not _same(x.value, y.value):
            out.append(KeyDiff(key, x, y, _where(x.value, y.value)))
    return out


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, list | np.ndarray) and isinstance(y, list | np.ndarray):
        return len(x) == len(y) and all(_same(v, w) for v, w in zip(x, y, strict=True))
    return bool(x == y or (x != x and y != y))


def _where(x: Any, y: Any) -> tuple[int, int] | None:
    if not isinstance(x, list | np.ndarray) or not isinstance(y, list | np.ndarray) or len(x) != len(y):
        return None
    places = [i for i, (v, w) in enumerate(zip(x, y, strict=True)) if not _same(v, w)]
    return (places[0], len(places)) if places else None


def compare_tensor(a: GGUFFile, b: GGUFFile, name: str) -> TensorDiff | None:
    """Return the difference of one tensor; None if type, shape and bytes are the same."""
    x, y = a.tensors[name], b.tensors[name]
    if x.shape != y.shape:
        return TensorDiff(name, x, y, problem="the shapes differ")
    if x.type == y.type and _same_bytes(a, b, x, y):
        return None
    sums = _Sums()
    ne0, n_rows = x.shape[0], x.n_elements // x.shape[0]
    whole = any(TYPES[t.type].tensor_meta_size for t in (x, y))
    step = n_rows if whole else max(1, _PIECE // ne0 // _ROWS) * _ROWS
    try:
        for start in range(0, n_rows, step):
            rows = min(step, n_rows - start)
            left, right = (_decode(file, t, start, rows, whole) for file, t in ((a, x), (b, y)))
            sums.add(left, right, start * ne0)
    except (UnsupportedError, FormatError) as problem:
        return TensorDiff(name, x, y, problem=str(problem))
    index = tuple(int(i) for i in np.unravel_index(sums.at, x.shape[::-1]))[::-1]
    return TensorDiff(
        name, x, y,
        relative=math.sqrt(sums.squares / sums.reference) if sums.reference else 0.0 if not sums.squares else math.inf,
        rms=math.sqrt(sums.squares / x.n_elements), largest=sums.largest, at=index, values=sums.values,
        n_different=sums.n_different,
        problem=f"{sums.n_bad} values are NaN or infinite in one of them" if sums.n_bad else "",
    )  # fmt: skip


def _same_bytes(a: GGUFFile, b: GGUFFile, x: TensorInfo, y: TensorInfo) -> bool:
    left, right = a.data(x.name), b.data(y.name)
    for start in range(0, x.n_bytes, _PIECE):
        if not np.array_equal(left[start : start + _PIECE], right[start : start + _PIECE]):
            return False
        for file in (a, b):
            file.release(x.name, start, start + _PIECE)
    return True


def _decode(file: GGUFFile, t: TensorInfo, start: int, rows: int, whole: bool) -> Any:
    data = file.data(t.name)
    if whole:
        return dequantize(data, t.type, t.shape).reshape(-1)
    size = row_size(t.type, t.shape[0])
    out = dequantize(data[start * size : (start + rows) * size], t.type, (t.shape[0], rows)).reshape(-1)
    file.release(t.name, start * size, (start + rows) * size)
    return out
