"""Read weights of 4-bit floats (E2M1): two per byte, the first in the low half, with a scale per block of a row.

NVFP4: blocks of 16 with E4M3 scales and one factor per tensor, which multiplies (`weight_scale_2`) or divides
(`weight_global_scale`) the values. MXFP4: blocks of 32 with powers of two. GGUF's MXFP4 block is the scale and 16
bytes, of which byte j has element j low and element j + 16 high; its NVFP4 block is 4 scales and 32 bytes, 8 for 16
elements in the same way. The codes of elements and scales are those of checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ikcli.convert.float8 import E2M1, FLOAT8, Floats, Recent, decode, finite, read_floats
from ikcli.convert.source import CheckpointSource
from ikcli.errors import FormatError

Bytes = npt.NDArray[np.uint8]


def _unpack(data: Bytes) -> Bytes:
    """Return the codes in rows of bytes, two per byte."""
    codes = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    codes[..., 0::2] = data & 15
    codes[..., 1::2] = data >> 4
    return codes


def _to_gguf(data: Bytes, scales: Bytes, name: str) -> Bytes:
    """Return rows of GGUF's MXFP4 blocks from rows of bytes and rows of scales, which are of tensor `name`."""
    if (scales == 255).any():
        raise _not_finite(name)
    n, n_blocks = scales.shape
    codes = _unpack(data).reshape(n, n_blocks, 32)
    out = np.empty((n, n_blocks, 17), np.uint8)
    out[..., 0] = scales
    out[..., 1:] = codes[..., :16] | codes[..., 16:] << 4
    return out.reshape(n, n_blocks * 17)


def _not_finite(name: str) -> FormatError:
    return FormatError(f"tensor {name}: a scale is not a finite number")


@dataclass(slots=True)
class MxFp4Rows:
    """Rows of a weight as GGUF's MXFP4 blocks; `shape` counts elements."""

    type: ClassVar[str] = "MXFP4"
    source: CheckpointSource
    blocks: str
    scales: str
    shape: tuple[int, ...]

    def rows(self, first: int, last: int) -> Bytes:
        """Return rows [first, last): 17 bytes for every 32 elements."""
        n_blocks = self.shape[-1] // 32
        per_row = math.prod(self.source.shape(self.blocks)) // math.prod(self.shape[:-1])
        per_read = self.source.shape(self.blocks)[-1]
        reads = per_row // per_read  # only gpt-oss has a dimension for the blocks of a row
        data = self.source.rows(self.blocks, first * reads, last * reads).reshape(last - first, per_row)
        scales = self.source.rows(self.scales, first, last).reshape(last - first, n_blocks)
        return _to_gguf(data.view(np.uint8), scales.view(np.uint8), self.scales)


@dataclass(slots=True)
class Factors:
    """The factors of an NVFP4 weight, or of its activations: one for all, or one per matrix. `inverse`: 1 over them."""

    source: CheckpointSource
    name: str
    inverse: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (math.prod(self.source.shape(self.name)),)

    def rows(self, first: int, last: int) -> Floats:
        """Return the factors as a row."""
        found = finite(read_floats(self.source, self.name).reshape(1, -1), self.name)
        if self.inverse and not found.all():
            raise FormatError(f"tensor {self.name}: a factor that divides is 0")
        return np.float32(1) / found if self.inverse else found


@dataclass(slots=True)
class NvFp4Rows:
    """Rows of a weight as GGUF's NVFP4 blocks, without the factors; `shape` counts elements."""

    type: ClassVar[str] = "NVFP4"
    source: CheckpointSource
    blocks: str
    scales: str
    shape: tuple[int, ...]
    factors: Factors | None
    inputs: Factors | None

    def rows(self, first: int, last: int) -> Bytes:
        """Return rows [first, last): 36 bytes for every 64 elements."""
        n, width = last - first, self.shape[-1]
        scales = self.source.rows(self.scales, first, last).reshape(n, width // 16)
        if ((scales & 127) == 127).any():
            raise _not_finite(self.scales)
        codes = _unpack(self.source.rows(self.blocks, first, last).view(np.uint8)).reshape(n, width // 16, 16)
        codes ^= (scales >> 7 << 3)[:, :, None]  # GGUF's scales have no sign
        out = np.empty((n, width // 64, 36), np.uint8)
        out[..., :4] = (scales & 127).reshape(n, -1, 4)
        out[..., 4:] = (codes[..., :8] | codes[..., 8:] << 4).reshape(n, -1, 32)
        return out.reshape(n, -1)


@dataclass(slots=True)
class Fp4:
    """A weight of bytes and its scales; NVFP4 or, where scales are powers of two, MXFP4.

    `inputs`: factors of activations, which are kept beside NVFP4 blocks.
    """

    source: CheckpointSource
    weight: str
    scale: str
    times: str | None
    over: str | None
    inputs: Factors | None = None
    shape: tuple[int, ...] = field(init=False)
    packed: MxFp4Rows | NvFp4Rows | None = field(init=False, default=None)
    _power: bool = field(init=False)

    def __post_init__(self) -> None:
        stored, grid = self.source.shape(self.weight), self.source.shape(self.scale)
        self._power = self.source.dtype(self.scale) in ("U8", "F8_E8M0")
        size = 32 if self._power else 16
        if len(stored) < 2 or grid != (*stored[:-1], stored[-1] * 2 // size) or stored[-1] * 2 % size:
            raise FormatError(
                f"tensor {self.scale}: scales of {list(grid)} do not fit {self.weight} of {list(stored)} bytes in "
                f"blocks of {size}"
            )
        self.shape = (*stored[:-1], stored[-1] * 2)
        if self._power and self.times is None and self.over is None:
            self.packed = MxFp4Rows(self.source, self.weight, self.scale, self.shape)
        elif self._nvfp4():
            name = self.times or self.over
            factors = None if name is None else Factors(self.source, name, self.over is not None)
            self.packed = NvFp4Rows(self.source, self.weight, self.scale, self.shape, factors, self.inputs)

    def _nvfp4(self) -> bool:
        """Return whether the weight fits GGUF's NVFP4 blocks and the factor of a matrix."""
        if self.source.dtype(self.scale) != "F8_E4M3" or self.shape[-1] % 64 or (self.times and self.over):
            return False
        name = self.times or self.over
        n = 1 if name is None else math.prod(self.source.shape(name))
        return n > 0 and math.prod(self.shape[:-1]) % n == 0

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight as a matrix."""
        values = E2M1[_unpack(self.source.rows(self.weight, first, last).view(np.uint8))]
        dtype = "F8_E8M0" if self._power else self.source.dtype(self.scale)
        scales = finite(decode(self.source.rows(self.scale, first, last).view(np.uint8), dtype), self.scale)
        if self.times is not None:
            scales = scales * self._factor(self.times, first, last)
        if self.over is not None:
            scales = scales / self._factor(self.over, first, last)
        n, n_blocks = scales.shape
        return (values.reshape(n, n_blocks, -1) * scales[:, :, None]).reshape(n, -1)

    def _factor(self, name: str, first: int, last: int) -> Floats:
        """Return the factor of every row: one for all, or one per matrix."""
        factor = finite(read_floats(self.source, name).reshape(-1), name)
        if factor.size == 1:
            return factor.reshape(1, 1)
        n_rows = math.prod(self.shape[:-1])
        if not factor.size or n_rows % factor.size:
            raise FormatError(f"tensor {name}: {factor.size} factors do not fit {self.weight} of {list(self.shape)}")
        return factor[np.arange(first, last) // (n_rows // factor.size)][:, None]


@dataclass(slots=True)
class MxFp4Experts:
    """Experts of gpt-oss: blocks of (expert, output, block, 16) bytes, whose weight is (expert, input, output)."""

    source: CheckpointSource
    blocks: str
    scales: str
    recent: Recent
    shape: tuple[int, ...] = field(init=False)
    packed: MxFp4Rows = field(init=False)

    def __post_init__(self) -> None:
        stored, grid = self.source.shape(self.blocks), self.source.shape(self.scales)
        if len(stored) != 4 or stored[3] != 16 or grid != stored[:3] or self.source.dtype(self.blocks) != "U8":
            raise FormatError(
                f"tensor {self.blocks} of {list(stored)} and its scales of {list(grid)} are not blocks of 32 of experts"
            )
        n_expert, n_out, n_blocks, _ = stored
        self.shape = (n_expert, n_blocks * 32, n_out)
        self.packed = MxFp4Rows(self.source, self.blocks, self.scales, (n_expert, n_out, n_blocks * 32))

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight as a matrix; a whole expert is decoded and kept for the next rows."""
        n_in = self.shape[1]
        out = np.empty((last - first, self.shape[2]), np.float32)
        for expert in range(first // n_in, -(-last // n_in)):
            low, high = max(first, expert * n_in), min(last, (expert + 1) * n_in)
            matrix = self.recent.get((self.blocks, expert), partial(self._matrix, expert))
            out[low - first : high - first] = matrix[low - expert * n_in : high - expert * n_in]
        return out

    def _matrix(self, expert: int) -> Floats:
        _, n_in, n_out = self.shape
        n_blocks = n_in // 32
        data = self.source.rows(self.blocks, expert * n_out * n_blocks, (expert + 1) * n_out * n_blocks)
        codes = self.source.rows(self.scales, expert * n_out, (expert + 1) * n_out)
        scales = finite(FLOAT8["F8_E8M0"][codes], self.scales)
        values = E2M1[_unpack(data)].reshape(n_out, n_blocks, 32) * scales[:, :, None]
        return values.reshape(n_out, n_in).T
