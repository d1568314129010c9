"""Quantize and dequantize KV cache rows in NumPy, independently of the CPU backend's run-time quantizers.

Blocks of 32 have a half-float scale (and minimum in the _1 types); q8_KV has one float32 scale per row. The small types
try a few scales around the extreme value, round the codes for each, keep the one whose least-squares scale explains
most, then refine it once. Unlike the quantizers of weights, these use no importance weights and few steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.quant.tables import IQ4_NL_VALUES

Floats = npt.NDArray[np.float32]
_FACTORS = (0.95, 1.0, 1.05)
_SHRINK = (0.0, 0.03, 0.06)
_TINY = np.float32(1e-20)
_LIMITS = (IQ4_NL_VALUES[1:] + IQ4_NL_VALUES[:-1]).astype(np.float32) / 2


def _half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def _divide(a: Floats | np.float32, b: Floats) -> Floats:
    """Return a / b, or 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(b.shape, np.float32), where=b != 0)


def _column(values: Floats) -> Floats:
    return values.astype(np.float32)[:, None]


def _int8(x: Floats) -> Floats:
    """Quantize blocks to 8-bit codes under one scale."""
    largest = np.abs(x).max(axis=1)
    codes = np.rint(x * _column(_divide(np.float32(127), largest)))
    return codes * _column(_half(largest / np.float32(127)))


def _int8_rows(x: Floats) -> Floats:
    largest = np.abs(x).max(axis=1)
    largest[largest <= _TINY] = 0
    return np.rint(x * _column(_divide(np.float32(127), largest))) * _column(largest / np.float32(127))


def _symmetric(n: int) -> tuple[Callable[[Floats], Floats], float, float]:
    return lambda x: np.clip(np.rint(x), -n, n - 1).astype(np.float32), -n, n - 1


def _iq4(x: Floats) -> Floats:
    return IQ4_NL_VALUES.astype(np.float32)[np.searchsorted(_LIMITS, x)]


def _scaled(levels: Callable[[Floats], Floats], lowest: float, highest: float) -> Callable[[Floats], Floats]:
    """Return a quantizer with one scale per block."""

    def through(x: Floats) -> Floats:
        high, low = x.max(axis=1), x.min(axis=1)
        extreme = np.where(high > -low, high, low)
        extreme[np.abs(extreme) <= _TINY] = 0
        xl, ll, inverse = (np.full(len(x), v, np.float32) for v in (0, 1, 0))

        def attempt(inv: Floats) -> None:
            level = levels(x * _column(inv))
            a, b = (x * level).sum(axis=1), (level * level).sum(axis=1)
            better = a * a * ll > xl * xl * b
            for old, new in ((xl, a), (ll, b), (inverse, inv)):
                old[better] = new[better]

        for outer in (lowest, highest):
            for f in _FACTORS:
                attempt(_divide(np.float32(outer) * np.float32(f), extreme))
        attempt(_divide(ll, xl))
        return levels(x * _column(inverse)) * _column(_half(xl / ll))

    return through


def _ranged(highest: int) -> Callable[[Floats], Floats]:
    """Return a quantizer with scale and minimum per block."""
    top = np.float32(highest)

    def codes_of(x: Floats, low: Floats, inverse: Floats) -> Floats:
        return np.clip(np.rint((x - _column(low)) * _column(inverse)), 0, top)

    def through(x: Floats) -> Floats:
        low = x.min(axis=1)
        width = x.max(axis=1) - low
        width[width <= _TINY] = 0
        mean = x.mean(axis=1, dtype=np.float32)
        cov, var, mid, best_low, inverse = (np.full(len(x), v, np.float32) for v in (0, 1, 0, 0, 0))
        best_low[:] = low

        def attempt(at: Floats, inv: Floats) -> None:
            codes = codes_of(x, at, inv)
            centre = codes.mean(axis=1, dtype=np.float32)
            d = codes - _column(centre)
            a, b = ((x - _column(mean)) * d).sum(axis=1), (d * d).sum(axis=1)
            better = a * a * var > cov * cov * b
            for old, new in ((cov, a), (var, b), (mid, centre), (best_low, at), (inverse, inv)):
                old[better] = new[better]

        for s in _SHRINK:
            attempt(low + np.float32(s) * width, _divide(top, width * np.float32(1 - 2 * s)))
        attempt(mean - cov / var * mid, _divide(var, cov))
        scale = cov / var
        minimum = np.where(width > 0, mean - scale * mid, low)
        return codes_of(x, best_low, inverse) * _column(_half(scale)) + _column(_half(minimum))

    return through


_BLOCKS: dict[GGMLType, Callable[[Floats], Floats]] = {
    GGMLType.Q8_0: _int8,
    GGMLType.Q6_0: _scaled(*_symmetric(32)),
    GGMLType.Q5_0: _scaled(*_symmetric(16)),
    GGMLType.Q4_0: _scaled(*_symmetric(8)),
    GGMLType.IQ4_NL: _scaled(_iq4, -127, 113),
    GGMLType.Q5_1: _ranged(31),
    GGMLType.Q4_1: _ranged(15),
}
QUANTIZED_CACHE_TYPES = (*_BLOCKS, GGMLType.Q8_KV)


def through_blocks(x: Floats, type_: GGMLType) -> Floats:
    """Return rows of float32 after storage as one of QUANTIZED_CACHE_TYPES."""
    if type_ == GGMLType.Q8_KV:
        return _int8_rows(x)
    return _BLOCKS[type_](x.reshape(-1, 32)).reshape(x.shape)
