"""Pack the grid quants from scales, sub-block scales, grid points and signs.

All inputs are per row: d (n, spans), sub-block scales (n, subs), points (n, groups; a flag at bit 16: the shift of
IQ1 is negative), sign bytes (n, ne0 / 8). Layouts: `ikcli.quant.decoders.iquants`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType

Bytes = npt.NDArray[np.uint8]


class GridFound(NamedTuple):
    """Result of the search; see the module's docstring."""

    d: npt.NDArray[np.float32]
    scales: Bytes
    points: npt.NDArray[np.int32]
    signs: Bytes


def pack(type: GGMLType, found: GridFound) -> Bytes:
    """Return (n_rows, row bytes) of `type`; n_rows is a multiple of 4 for the R4 types."""
    fn = _PACKERS[type]
    if type in (GGMLType.IQ1_S_R4, GGMLType.IQ1_M_R4):
        return fn(found)
    n_rows = len(found.d)
    blocks = found.d.size
    flat = GridFound(
        found.d.reshape(blocks, 1),
        found.scales.reshape(blocks, -1),
        found.points.reshape(blocks, -1),
        found.signs.reshape(blocks, -1),
    )
    return fn(flat).reshape(n_rows, -1)


def _bytes(values: npt.NDArray[Any], dtype: str) -> Bytes:
    """Return the little-endian bytes of each row."""
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8).reshape(len(values), -1)


def _nibbles(values: Bytes) -> Bytes:
    """Pack two per byte, the first one low."""
    return values[:, 0::2] | values[:, 1::2] << np.uint8(4)


def _join(values: npt.NDArray[Any], width: int, n: int) -> npt.NDArray[np.uint32]:
    """Join n values of `width` bits each per word, the first one lowest: (rows, words * n) -> (rows, words)."""
    parts = values.reshape(len(values), -1, n).astype(np.uint32)
    joined: npt.NDArray[np.uint32] = np.bitwise_or.reduce(parts << (np.arange(n, dtype=np.uint32) * width), axis=2)
    return joined


def _iq2_xxs(f: GridFound) -> Bytes:
    words = _join(f.signs & 127, 7, 4) | f.scales.astype(np.uint32) << 28
    per_sub = (f.points.astype(np.uint8).reshape(-1, 4), _bytes(words.reshape(-1, 1), "<u4"))
    return np.concatenate((_bytes(f.d, "<f2"), np.concatenate(per_sub, axis=1).reshape(len(f.d), -1)), axis=1)


def _iq2_xs(f: GridFound) -> Bytes:
    words = f.points | (f.signs & 127).astype(np.int32) << 9
    return np.concatenate((_bytes(f.d, "<f2"), _bytes(words, "<u2"), _nibbles(f.scales)), axis=1)


def _iq2_s(f: GridFound) -> Bytes:
    high = _join(f.points >> 8, 2, 4).astype(np.uint8)
    low = f.points.astype(np.uint8)
    return np.concatenate((_bytes(f.d, "<f2"), low, f.signs, high, _nibbles(f.scales)), axis=1)


def _iq3_xxs(f: GridFound) -> Bytes:
    words = _join(f.signs & 127, 7, 4) | f.scales.astype(np.uint32) << 28
    return np.concatenate((_bytes(f.d, "<f2"), f.points.astype(np.uint8), _bytes(words, "<u4")), axis=1)


def _iq3_s(f: GridFound) -> Bytes:
    high = _join(f.points >> 8, 1, 8).astype(np.uint8)
    low = f.points.astype(np.uint8)
    return np.concatenate((_bytes(f.d, "<f2"), low, high, f.signs, _nibbles(f.scales)), axis=1)


def _iq1_s_words(f: GridFound) -> npt.NDArray[np.uint32]:
    """Pack per 32 values: three high bits of four points, sub-block scale, sign of the shift."""
    negative = (f.points[:, ::4] >> 16).astype(np.uint32)
    high = _join(f.points >> 8 & 7, 3, 4)
    return high | f.scales.astype(np.uint32) << np.uint32(12) | negative << np.uint32(15)


def _iq1_s(f: GridFound) -> Bytes:
    return np.concatenate((_bytes(f.d, "<f2"), f.points.astype(np.uint8), _bytes(_iq1_s_words(f), "<u2")), axis=1)


def _iq1_m_high(f: GridFound) -> Bytes:
    """Pack per 16 values: three high bits and sign of the shift of two points."""
    return _nibbles((f.points >> 8 & 7 | f.points >> 13 & 8).astype(np.uint8))


def _iq1_m(f: GridFound) -> Bytes:
    d = f.d.astype(np.float16).view(np.uint16).astype(np.uint32)
    words = _join(f.scales, 3, 4) | (d >> np.arange(0, 16, 4, dtype=np.uint32) & 15) << 12
    return np.concatenate((f.points.astype(np.uint8), _iq1_m_high(f), _bytes(words, "<u2")), axis=1)


def _by_group(values: Bytes, width: int) -> Bytes:
    """Move rows innermost: (n, blocks * width) of four rows each -> (n / 4, blocks, width, 4)."""
    n = len(values)
    return values.reshape(n // 4, 4, -1, width).transpose(0, 2, 3, 1)


def _rows4(f: GridFound, parts: list[Bytes]) -> Bytes:
    groups = len(f.d) // 4
    blocks = np.concatenate([p.reshape(groups, p.shape[1], -1) for p in parts], axis=2).reshape(groups, -1)
    head = _bytes(f.d.reshape(groups, 4), "<f2")
    return np.concatenate((head, blocks), axis=1).reshape(len(f.d), -1)


def _iq1_s_r4(f: GridFound) -> Bytes:
    words = _iq1_s_words(f).astype("<u2")
    groups = len(words) // 4
    high = np.ascontiguousarray(words.reshape(groups, 4, -1).transpose(0, 2, 1)).view(np.uint8)
    return _rows4(f, [_by_group(f.points.astype(np.uint8), 4), high])


def _iq1_m_r4(f: GridFound) -> Bytes:
    low, high = _by_group(f.points.astype(np.uint8), 4), _by_group(_iq1_m_high(f), 2)
    return _rows4(f, [low, high, _by_group(_nibbles(f.scales), 1)])


_PACKERS: dict[GGMLType, Callable[[GridFound], Bytes]] = {
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ2_XS: _iq2_xs,
    GGMLType.IQ2_S: _iq2_s,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
    GGMLType.IQ1_S: _iq1_s,
    GGMLType.IQ1_M: _iq1_m,
    GGMLType.IQ1_S_R4: _iq1_s_r4,
    GGMLType.IQ1_M_R4: _iq1_m_r4,
}
