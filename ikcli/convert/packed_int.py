"""Read weights of few bits, packed into 32-bit words with the first value lowest: compressed-tensors, GPTQ and AWQ.

compressed-tensors packs along rows (output features), so rows are read on demand. Its values of 4 bits without zero
points, in groups of 32 or a multiple, are those of GGUF's Q4_0 blocks: a scale of 16 bits, and 16 bytes of which byte j
has element j low and element j + 16 high. GPTQ packs along inputs and
AWQ along outputs of the transposed weight, so the packed words of one weight are held while its rows are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ikcli.convert.float8 import Floats, Recent, decode, read_floats
from ikcli.convert.source import Array, CheckpointSource
from ikcli.errors import FormatError, UnsupportedError

Codes = npt.NDArray[np.int32]
Index = npt.NDArray[np.int64]


def unpack(words: Array, bits: int, count: int, stream: bool = False) -> Codes:
    """Return the first `count` values of every row of words.

    A word holds as many whole values as fit; in a stream, values continue in the next word.
    """
    unsigned = words.astype(np.int64) & 0xFFFFFFFF
    mask = (1 << bits) - 1
    if not stream:
        shifts = np.arange(32 // bits) * bits
        values = unsigned[..., None] >> shifts & mask
        return values.reshape(*words.shape[:-1], -1)[..., :count].astype(np.int32)
    count = min(count, words.shape[-1] * 32 // bits)
    at = np.arange(count) * bits
    following = np.concatenate([unsigned, np.zeros_like(unsigned[..., :1])], axis=-1)
    pairs = following[..., at // 32] | (following[..., at // 32 + 1] & 0x7FFFFFFF) << 32
    return (pairs >> at % 32 & mask).astype(np.int32)


def _groups(source: CheckpointSource, name: str | None, width: int, n_groups: int, other: str) -> Index:
    """Return the group of every input."""
    if name is not None:
        found = source.read(name).astype(np.int64).reshape(-1)
        if found.size != width or found.min() < -1 or found.max() >= n_groups:
            raise FormatError(f"tensor {name} does not give each of {width} inputs one of {n_groups} groups")
        if (found >= 0).all():
            return found
    if n_groups < 1 or -(-width // -(-width // n_groups)) != n_groups:
        raise FormatError(f"tensor {other}: {n_groups} groups do not divide {width} inputs")
    return np.arange(width) // -(-width // n_groups)


@dataclass(slots=True)
class Q4Rows:
    """Rows of a weight as GGUF's Q4_0 blocks; `shape` counts elements.

    A scale in bfloat16 loses nothing as float16 from 2^-17 on; a smaller one is rounded, to a multiple of 2^-24.
    """

    type: ClassVar[str] = "Q4_0"
    source: CheckpointSource
    words: str
    scales: str
    shape: tuple[int, ...]

    def rows(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Return rows [first, last): 18 bytes for every 32 elements."""
        n, n_blocks = last - first, self.shape[-1] // 32
        codes = unpack(self.source.rows(self.words, first, last), 4, self.shape[-1]).reshape(n, n_blocks, 32)
        found = decode(self.source.rows(self.scales, first, last), self.source.dtype(self.scales))
        if not (np.abs(found) <= np.finfo(np.float16).max).all():
            raise FormatError(f"tensor {self.scales}: a scale is not a number below 65536, as Q4_0 needs it")
        scales = np.repeat(found.astype("<f2"), n_blocks // found.shape[1], axis=1)
        out = np.empty((n, n_blocks, 18), np.uint8)
        out[..., :2] = scales.reshape(n, n_blocks, 1).view(np.uint8)
        out[..., 2:] = codes[..., :16] | codes[..., 16:] << 4
        return out.reshape(n, -1)


@dataclass(slots=True)
class PackedRows:
    """The pack-quantized format of compressed-tensors: codes and zero points are integers plus half their range.

    In older files a word holds as many whole values as fit; in newer ones values continue in the next word. The number
    of words tells which.
    """

    source: CheckpointSource
    weight: str
    scale: str
    shape_name: str
    zero: str | None
    g_idx: str | None
    allowed: set[int]
    recent: Recent
    shape: tuple[int, ...] = field(init=False)
    packed: Q4Rows | None = field(init=False, default=None)
    _bits: int = field(init=False)
    _stream: bool = field(init=False)
    _n_groups: int = field(init=False)

    def __post_init__(self) -> None:
        self.shape = shape = tuple(int(n) for n in self.source.read(self.shape_name).reshape(-1))
        stored, grid = self.source.shape(self.weight), self.source.shape(self.scale)
        if len(shape) < 2 or min(shape) < 1 or len(stored) != len(shape) or stored[:-1] != shape[:-1]:
            raise FormatError(f"tensor {self.weight} of {list(stored)} words does not fit the shape {list(shape)}")
        self._bits, self._stream = self._layout(shape[-1], stored[-1])
        n_rows = math.prod(shape[:-1])
        self._n_groups = grid[-1] if len(grid) == len(shape) else 1
        if math.prod(grid) not in (self._n_groups, n_rows * self._n_groups):
            raise FormatError(f"tensor {self.scale}: scales of {list(grid)} do not fit {list(shape)}")
        self._columns()
        if self.zero is not None:
            packed = self.source.shape(self.zero)
            n_words = -(-shape[-2] * self._bits // 32) if self._stream else -(-shape[-2] // (32 // self._bits))
            if packed != (*shape[:-2], n_words, self._n_groups):
                raise FormatError(
                    f"tensor {self.zero} of {list(packed)} does not fit {self._n_groups} groups of {list(shape)}"
                )
        if self._q4_0():
            self.packed = Q4Rows(self.source, self.weight, self.scale, shape)

    def _q4_0(self) -> bool:
        """Return whether groups are Q4_0 blocks, or several with the same scale."""
        grid, width = self.source.shape(self.scale), self.shape[-1]
        plain = self._bits == 4 and self.zero is None and self.g_idx is None
        fits = grid == (*self.shape[:-1], self._n_groups) and width % (32 * self._n_groups) == 0
        return plain and fits and self.source.dtype(self.scale) in ("BF16", "F16")

    def _columns(self) -> Index:
        """Return the group of every input."""
        return _groups(self.source, self.g_idx, self.shape[-1], self._n_groups, self.scale)

    def _zeros(self) -> Codes:
        """Return the codes of the zero points of every row; they are packed along rows."""
        assert self.zero is not None
        packed = np.ascontiguousarray(self.source.read(self.zero).swapaxes(-1, -2))
        zeros = unpack(packed, self._bits, self.shape[-2], self._stream)
        return np.ascontiguousarray(zeros.swapaxes(-1, -2)).reshape(-1, self._n_groups)

    def _layout(self, width: int, n_words: int) -> tuple[int, bool]:
        """Return the bits of a value, and whether values continue in the next word."""
        for bits in sorted(self.allowed):
            if not 1 <= bits <= 8:
                continue
            dense, whole = -(-width * bits // 32), -(-width // (32 // bits))
            if n_words in (dense, whole) and (dense != whole or 32 % bits == 0):
                return bits, n_words == dense and 32 % bits != 0
        raise UnsupportedError(
            f"quant_method 'compressed-tensors': num_bits of tensor {self.weight} is ambiguous: "
            f"{sorted(self.allowed)} in config_groups, {n_words} words for {width} inputs"
        )

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight."""
        codes = unpack(self.source.rows(self.weight, first, last), self._bits, self.shape[-1], self._stream)
        columns = self._columns()
        if self.zero is None:
            codes -= 1 << (self._bits - 1)
        else:
            codes -= self.recent.get(self.zero, self._zeros)[first:last][:, columns]
        grid = self.source.shape(self.scale)
        if len(grid) == len(self.shape) and math.prod(grid) != self._n_groups:
            scales = decode(self.source.rows(self.scale, first, last), self.source.dtype(self.scale))
        else:
            scales = read_floats(self.source, self.scale).reshape(-1, self._n_groups)
            scales = scales if len(scales) == 1 else scales[first:last]
        return codes.astype(np.float32) * scales[:, columns]


@dataclass(slots=True)
class _Columns:
    """The common part of GPTQ and AWQ: scales and zeros of shape (group, output), and words whose rows are inputs."""

    source: CheckpointSource
    name: str
    parts: Mapping[str, str]
    settings: Mapping[str, Any]
    recent: Recent
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self._layout()

    def _layout(self) -> tuple[int, int]:
        """Check the parts; return outputs and inputs of the weight."""
        raise NotImplementedError

    def _grid(self) -> tuple[int, int]:
        grid = self.source.shape(self.parts["scales"])
        stored, zeros = self.source.shape(self.name), self.source.shape(self.parts["qzeros"])
        if len(grid) != 2 or len(stored) != 2 or len(zeros) != 2 or zeros[0] != grid[0]:
            raise FormatError(f"tensor {self.name} of {list(stored)} words does not fit its scales of {list(grid)}")
        if self.source.dtype(self.name) != "I32" or self.source.dtype(self.parts["qzeros"]) != "I32":
            raise FormatError(f"tensor {self.name} or its qzeros are not words of 32 bits (I32)")
        return grid[0], grid[1]

    def _setting(self, key: str, default: object, known: tuple[object, ...], method: str) -> object:
        value = self.settings.get(key, default)
        value = value.lower() if isinstance(value, str) else value
        if value not in known:
            raise UnsupportedError(
                f"quant_method {method!r}: {key} {value!r} cannot be read (known: {', '.join(map(str, known))})"
            )
        return value

    def _columns(self, n_in: int) -> Index:
        """Return the group of every input."""
        n_groups = self.source.shape(self.parts["scales"])[0]
        return _groups(self.source, self.parts.get("g_idx"), n_in, n_groups, self.parts["scales"])

    def _words(self) -> Array:
        """Return the packed words, kept in memory because the rows of a weight are read one after the other."""
        return self.recent.get(self.name, lambda: self.source.read(self.name))

    def _zeros(self, unpacked: Callable[[Array], Codes]) -> Codes:
        """Return the zero points (group, output)."""
        return self.recent.get(self.parts["qzeros"], lambda: unpacked(self.source.read(self.parts["qzeros"])))

    def _values(self, codes: Codes, zeros: Codes, first: int, last: int) -> Floats:
        """Return the values of rows [first, last), given their codes and the zero points of all rows."""
        columns = self._columns(self.shape[1])
        scales = self.recent.get(self.parts["scales"], lambda: read_floats(self.source, self.parts["scales"]))
        scales = scales[:, first:last].T
        return (codes - zeros[:, first:last].T[:, columns]).astype(np.float32) * scales[:, columns]


class Gptq(_Columns):
    """`qweight` (input / values per word, output); zeros are stored one too low, except in gptq_v2."""

    __slots__ = ("_bits", "_more")

    def _layout(self) -> tuple[int, int]:
        _, n_out = self._grid()
        self._bits = int(str(self._setting("bits", None, (2, 3, 4, 8), "gptq")))
        words = self.source.shape(self.parts["qzeros"])[1] * 32
        others = self.settings.get("extra_config") or self.settings.get("dynamic")
        if others and n_out and words % n_out == 0 and words // n_out in (2, 3, 4, 8):
            self._bits = words // n_out
        form = self._setting("checkpoint_format", self.settings.get("format", "gptq"), ("gptq", "gptq_v2"), "gptq")
        self._more = 1 if form == "gptq" else 0
        n_words, stored_out = self.source.shape(self.name)
        n_in = n_words * 32 // self._bits
        if stored_out != n_out or self.source.shape(self.parts["qzeros"])[1] * 32 // self._bits != n_out:
            raise FormatError(
                f"tensor {self.name}: {self._bits} bits do not fit {list(self.source.shape(self.name))} words with "
                f"{n_out} outputs"
            )
        self._columns(n_in)
        return n_out, n_in

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight, which are columns of the words."""
        n_out, n_in = self.shape
        words = np.ascontiguousarray(self._words()[:, first:last].T)
        codes = unpack(words, self._bits, n_in, stream=True)
        zeros = self._zeros(lambda words: unpack(words, self._bits, n_out, stream=True) + np.int32(self._more))
        return self._values(codes, zeros, first, last)


_AWQ_PLACE = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""The place of each of 8 outputs in its word."""


class Awq(_Columns):
    """`qweight` (input, output / 8) of the gemm version: the outputs of a word are in the order 0 2 4 6 1 3 5 7."""

    __slots__ = ()

    def _layout(self) -> tuple[int, int]:
        _, n_out = self._grid()
        self._setting("bits", self.settings.get("w_bit", 4), (4,), "awq")
        self._setting("version", "gemm", ("gemm",), "awq")
        n_in, n_words = self.source.shape(self.name)
        if n_words * 8 != n_out or self.source.shape(self.parts["qzeros"])[1] != n_words:
            raise FormatError(f"tensor {self.name}: {n_words} words are not 4 bits of {n_out} outputs")
        self._columns(n_in)
        return n_out, n_in

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight, which are columns of the words."""
        low, high = first // 8, -(-last // 8)
        kept = slice(first - 8 * low, last - 8 * low)
        codes = self._outputs(self._words()[:, low:high])[:, kept].T
        return self._values(codes, self._zeros(self._outputs), first, last)

    @staticmethod
    def _outputs(words: Array) -> Codes:
        codes = unpack(words, 4, words.shape[1] * 8).reshape(words.shape[0], -1, 8)
        return codes[..., _AWQ_PLACE].reshape(words.shape[0], -1)
