"""Byte layouts in device memory that kernels of different files agree on.

Activation rows (`kernels/layer_convert.cu` writes them, matrix products read them), every row 16-byte aligned:
    q8    int8 q[k] | f32 d[k/32] | f32 s[k/32] = d * (sum of the 32 q) | i16 (sum of q[0:16], sum of q[16:32])[k/32]
          k a multiple of 32; x = d * q. d is NaN where a value of the block is NaN or Inf (int8 cannot say so).
    bf16, f16   k values rounded to nearest even, zeros up to the end of the row
    scaled      f16 of x / s, zeros up to 16 bytes | f32 s, a power of two, NaN if one of x is NaN or Inf | 12
                bytes unused
    split       two bf16 rows: x rounded, and the rounded rest
Plan of `moe_sort` (`kernels/layer_moe.cu`), int32, sections 16-byte aligned; pair = row * n_used + slot:
    order     (pair, expert) per sorted row: by expert, then by pair; slots dropped by `-ser` last, with expert -1
    position  sorted row of each pair; -1 for dropped slots
    offsets   first sorted row of each expert, then their number without dropped ones: n_expert + 1 words
    counts    sorted rows without dropped ones, tiles of at most TILES[0] rows, tiles of at most TILES[1] rows, 0
    tiles[i]  (expert, first sorted row, rows, 0) per tile: every expert's rows, cut into tiles of TILES[i] rows
The first section is the value of the node itself, as its `compute` returns it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

TILES = (8, 64)
"""Rows of a tile of an expert: for products that read weights once for few rows, and for matrix-matrix products."""


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // 16) * 16


def q8_row_bytes(k: int) -> int:
    """Return the bytes of a quantized activation row of k values, k a multiple of 32."""
    return _aligned(k + 12 * (k // 32))


def half_row_bytes(k: int) -> int:
    """Return the bytes of a bf16 or f16 row of k values."""
    return _aligned(2 * k)


def scaled_row_bytes(k: int) -> int:
    """Return the bytes of a row of k f16 with a scale."""
    return half_row_bytes(k) + 16


def split_row_bytes(k: int) -> int:
    """Return the bytes of a row of k values in two bf16 each."""
    return 2 * half_row_bytes(k)


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Byte offsets of a plan's sections for at most `n_pairs` (row, slot) pairs."""

    n_pairs: int
    n_expert: int

    order: ClassVar[int] = 0

    @property
    def position(self) -> int:
        return _aligned(8 * self.n_pairs)

    @property
    def offsets(self) -> int:
        return self.position + _aligned(4 * self.n_pairs)

    @property
    def counts(self) -> int:
        return self.offsets + _aligned(4 * (self.n_expert + 1))

    def tiles(self, which: int) -> int:
        """Return the start of the list of tiles of TILES[which] rows."""
        at = self.counts + 16
        return at + sum(16 * max_tiles(self.n_pairs, self.n_expert, i) for i in range(which))

    @property
    def n_bytes(self) -> int:
        return self.tiles(len(TILES))


def max_tiles(n_pairs: int, n_expert: int, which: int) -> int:
    """Return the most tiles of TILES[which] rows that so many pairs can make."""
    return min(n_pairs, n_expert + n_pairs // TILES[which])
