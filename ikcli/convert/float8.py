"""Decode floats of 8 and 4 bits with tables of all their values; keep arrays while their rows are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

import numpy as np
import numpy.typing as npt

from ikcli.convert.source import Array, CheckpointSource
from ikcli.errors import FormatError

Floats = npt.NDArray[np.float32]


def _table(n_exponent: int, n_mantissa: int, bias: int) -> Floats:
    codes = np.arange(1 << (1 + n_exponent + n_mantissa))
    sign = np.where(codes >> (n_exponent + n_mantissa), -1.0, 1.0)
    exponent = (codes >> n_mantissa) & ((1 << n_exponent) - 1)
    mantissa = (codes & ((1 << n_mantissa) - 1)) / (1 << n_mantissa)
    normal = exponent > 0
    values = sign * np.ldexp(mantissa + normal, np.where(normal, exponent, 1) - bias)
    return values.astype(np.float32)


def _e4m3() -> Floats:
    values = _table(4, 3, 7)  # without infinities; all bits set is NaN
    values[[0x7F, 0xFF]] = np.nan
    return values


def _e5m2() -> Floats:
    values = _table(5, 2, 15)
    for first in (0x7C, 0xFC):
        values[first] = np.inf if first < 0x80 else -np.inf
        values[first + 1 : first + 4] = np.nan
    return values


def _e8m0() -> Floats:
    powers = np.ldexp(1.0, np.arange(255) - 127).astype(np.float32)
    return np.append(powers, np.float32(np.nan))


FLOAT8: dict[str, Floats] = {"F8_E4M3": _e4m3(), "F8_E5M2": _e5m2(), "F8_E8M0": _e8m0()}
"""Values of all codes, by the type's name in safetensors."""

E2M1 = _table(2, 1, 1)
"""Values of the 16 codes of 4-bit floats (E2M1)."""


def decode(values: Array, dtype: str) -> Floats:
    """Return values of any checkpoint type as float32."""
    if dtype in FLOAT8:
        return FLOAT8[dtype][values]
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


class Recent:
    """A cache of the last few arrays that had to be read or computed as a whole, shared by threads."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._kept: dict[Hashable, Array] = {}

    def get(self, key: Hashable, make: Callable[[], Array]) -> Array:
        """Return the array of this key; compute it if it is not cached."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                found = make()
            self._kept[key] = found
            while len(self._kept) > self._most:
                self._kept.pop(next(iter(self._kept)))
            return found


def read_floats(source: CheckpointSource, name: str) -> Floats:
    """Return all values of a small tensor as float32."""
    return decode(source.read(name), source.dtype(name))


def finite(scales: Floats, name: str) -> Floats:
    """Return the scales, or raise a FormatError that names their tensor if one is NaN or infinite."""
    if not np.isfinite(scales).all():
        raise FormatError(f"tensor {name}: a scale is not a finite number")
    return scales
