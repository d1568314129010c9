"""Read weights of 8 bits (floats or integers) times a scale per tensor, row, group of a row, or block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.convert.float8 import Floats, decode, finite
from ikcli.convert.source import CheckpointSource
from ikcli.errors import FormatError

_Index = npt.NDArray[np.int64]


@dataclass(slots=True)
class Scaled:
    """`weight` times `scale`. A zero point, if present, has the shape of the scale and is subtracted first."""

    source: CheckpointSource
    weight: str
    scale: str
    zero: str | None
    block: tuple[int, ...] | None
    shape: tuple[int, ...] = field(init=False)
    _steps: tuple[int, ...] = field(init=False)
    _grid: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.source.shape(self.weight)
        if not self.shape:
            raise FormatError(f"tensor {self.weight} is a scalar with a scale")
        grid = self.source.shape(self.scale)
        if len(grid) == 2 * len(self.shape) and set(grid[1::2]) == {1}:
            grid = grid[::2]  # ModelOpt's blocks keep both dimensions
        if len(grid) < len(self.shape):
            # one value per tensor, expert or row: leading dimensions are those of the weight
            grid = grid + (1,) * (len(self.shape) - len(grid)) if math.prod(grid) > 1 else (1,) * len(self.shape)
        if len(grid) != len(self.shape):
            raise self._misfit()
        if self.zero is not None and math.prod(self.source.shape(self.zero)) != math.prod(grid):
            raise FormatError(f"tensor {self.zero} does not have the shape of {self.scale}")
        self._grid = grid
        self._steps = tuple(self._step(i, n, parts) for i, (n, parts) in enumerate(zip(self.shape, grid, strict=True)))

    def _step(self, i: int, n: int, parts: int) -> int:
        """Return the number of elements along a dimension that share a scale."""
        if parts in (1, n):
            return n if parts == 1 else 1
        from_end = i - len(self.shape)
        if self.block is not None and from_end >= -2:
            size = self.block[from_end]
            if -(-n // size) == parts:
                return size
        if parts < 1 or n % parts:
            raise self._misfit()
        return n // parts

    def _misfit(self) -> FormatError:
        return FormatError(
            f"tensor {self.scale}: scales of {list(self.source.shape(self.scale))} do not fit {self.weight} of "
            f"{list(self.shape)}" + (f" in blocks of {list(self.block)}" if self.block else "")
        )

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight as a matrix."""
        values = decode(self.source.rows(self.weight, first, last), self.source.dtype(self.weight))
        if self.zero is not None:
            values = values - self._spread(self.zero, first, last)
        return values * self._spread(self.scale, first, last)

    def _spread(self, name: str, first: int, last: int) -> Floats:
        """Return one value per element of the rows."""
        # beside 8-bit floats, a byte is a power of two
        dtype = "F8_E8M0" if self.source.dtype(name) == "U8" and name == self.scale else self.source.dtype(name)
        if self.source.shape(name) == self._grid and self._grid[:-1] == self.shape[:-1]:
            chosen = finite(decode(self.source.rows(name, first, last), dtype), name)
            return chosen[:, np.arange(self.shape[-1]) // self._steps[-1]] if self._grid[-1] > 1 else chosen
        values = finite(decode(self.source.read(name), dtype).reshape(self._grid), name)
        outer = np.unravel_index(np.arange(first, last), self.shape[:-1]) if len(self.shape) > 1 else ()
        at: list[_Index] = [np.asarray(i) // step for i, step in zip(outer, self._steps, strict=False)]
        chosen = values[tuple(at)] if at else values.reshape(1, -1)
        return chosen[:, np.arange(self.shape[-1]) // self._steps[-1]] if self._grid[-1] > 1 else chosen
