"""Read BitNet's weights: matrices of -1, 0 and 1 and a number that multiplies each of them.

A published checkpoint holds four rows per byte (`Packed`: row r of a quarter has bits 2 i and 2 i + 1 for quarter i, as
value + 1) with the number beside them, or weights as they were trained (`Rounded`): their mean magnitude is the number,
and each becomes the nearest of its multiples. The matrix and the number are logical tensors, `<x>.weight` and
`<x>.weight_scale`, so that the matrix loses nothing in a type with few bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikcli.convert.float8 import Floats
from ikcli.convert.pieces import as_float32
from ikcli.convert.source import CheckpointSource
from ikcli.errors import FormatError, UnsupportedError

_SLAB = 1 << 22  # numbers that are read at a time


@dataclass(slots=True)
class Packed:
    """A matrix with four rows per row of bytes."""

    source: CheckpointSource
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        n, width = self.source.shape(self.name)
        return 4 * n, width

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last)."""
        quarter = self.shape[0] // 4
        found, at = [], first
        while at < last:
            i, start = divmod(at, quarter)
            stop = min(quarter, start + last - at)
            codes = (self.source.rows(self.name, start, stop) >> (2 * i)) & 3
            found.append(codes.astype(np.float32) - np.float32(1))
            at += stop - start
        return np.concatenate(found)


@dataclass(slots=True)
class Number:
    """The number of a packed matrix, or its inverse."""

    source: CheckpointSource
    name: str
    inverse: bool
    shape: tuple[int, ...] = (1,)

    def rows(self, first: int, last: int) -> Floats:
        """Return the number as a row."""
        found = as_float32(self.source.read(self.name).reshape(1, 1), self.source.dtype(self.name))
        return np.float32(1) / found if self.inverse else found


@dataclass(slots=True)
class MeanMagnitude:
    """The mean magnitude of a matrix, at least 1e-5."""

    source: CheckpointSource
    name: str
    shape: tuple[int, ...] = (1,)
    _found: float | None = None

    def value(self) -> np.float32:
        """Return the number; the first call reads the matrix."""
        if self._found is None:
            n, width = self.source.shape(self.name)
            step, total, dtype = max(1, _SLAB // width), 0.0, self.source.dtype(self.name)
            for first in range(0, n, step):
                rows = as_float32(self.source.rows(self.name, first, min(first + step, n)), dtype)
                total += float(np.abs(rows).sum(dtype=np.float64))
            self._found = max(total / (n * width), 1e-5)
        return np.float32(self._found)

    def rows(self, first: int, last: int) -> Floats:
        """Return the number as a row."""
        return np.full((1, 1), self.value(), np.float32)


@dataclass(slots=True)
class Rounded:
    """A matrix rounded to multiples of its mean magnitude, in units of it."""

    source: CheckpointSource
    name: str
    unit: MeanMagnitude

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape(self.name)

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last)."""
        values = as_float32(self.source.rows(self.name, first, last), self.source.dtype(self.name))
        found: Floats = np.clip(np.rint(values / self.unit.value()), -1, 1).astype(np.float32)
        return found


Pair = tuple[str, str, "Packed | Rounded | Number | MeanMagnitude", Sequence[str]]


def find(source: CheckpointSource, settings: Mapping[str, Any]) -> Iterator[Pair]:
    """Find all ternary matrices and their numbers."""
    mode, kind = settings.get("quantization_mode", "offline"), settings.get("linear_class", "bitlinear")
    if mode not in ("offline", "online") or kind not in ("bitlinear", "autobitlinear") or settings.get("use_rms_norm"):
        raise UnsupportedError(
            f"quant_method 'bitnet': quantization_mode {mode!r} with linear_class {kind!r} and use_rms_norm "
            f"{bool(settings.get('use_rms_norm'))} is not read"
        )
    there = set(source.names)
    for name in source.names:
        if not name.endswith("_proj.weight"):
            continue
        scale = name + "_scale"
        if source.dtype(name) == "U8":
            if scale not in there:
                raise FormatError(f"tensor {name} has no {scale} beside it")
            yield name, name, Packed(source, name), []
            yield scale, scale, Number(source, scale, kind == "bitlinear"), []
        elif mode == "online":
            unit = MeanMagnitude(source, name)
            yield name, name, Rounded(source, name, unit), []
            yield scale, name, unit, []
