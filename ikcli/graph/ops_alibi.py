"""Columns of queries and keys whose product is a slope times a position; see `models/alibi.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array, Op, Place, Rows, RowSpec, Run

BLOCK, BASE = 32, 127
MOST_POSITIONS = (BLOCK - 2) * BASE * BASE


@dataclass(frozen=True, slots=True)
class Alibi(Op):
    """`width` columns per head, zeros but for the last BLOCK of them, which encode position p (below MOST_POSITIONS).

    With slopes, these are queries: per head 0, slope, then 127 * slope. Without, they are keys of one head: 127, p %
    127, then columns of up to 127 that add up to p // 127. The 127 gives a block of 8 bits the scale 1; the queries' 0
    removes it from the product.
    """

    name = "alibi"
    place = Place.EVERYWHERE
    light = True

    width: int
    slopes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.width < BLOCK or not all(map(math.isfinite, self.slopes)):
            raise ValueError(f"columns that say a position need {BLOCK} columns and finite slopes")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), self.width * max(len(self.slopes), 1)

    def compute(self, run: Run) -> Array:
        pos = run.state.pos.astype(np.int64)
        out: Array = np.zeros((len(pos), max(len(self.slopes), 1), self.width), run.dtype)
        last = out[:, :, -BLOCK:]
        if self.slopes:
            last[..., 1], last[..., 2:] = self.slopes, BASE * np.asarray(self.slopes)[:, None]
        else:
            last[..., 0], last[..., 1] = BASE, (pos % BASE)[:, None]
            parts = (pos // BASE)[:, None] - BASE * np.arange(BLOCK - 2)
            last[:, 0, 2:] = np.clip(parts, 0, BASE)
        return out.reshape(len(pos), -1)
