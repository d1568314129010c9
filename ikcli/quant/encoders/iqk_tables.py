"""Find the nearest entry of a value table through cells of equal width with at most one boundary each.

A table of K entries becomes, in one array of 32-bit words, `first[cells]` (int: entries whose lower boundary lies at or
before the cell), `limit[K]` (float: boundary between an entry and the next, +inf for the last) and `value[K]` (float).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ikcli.quant import tables

STATE_BYTES = 20 * 64  # what the search keeps of sixteen sub-blocks

Words = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TableShape:
    """Compile-time facts about a table: sizes, cell width and start, distance of the rows."""

    n_entries: int
    n_cells: int
    start: float
    width: float
    shift: int


SHAPES = {
    "iq2": TableShape(16, 16, -64.0, 8.0, 5),
    "iq3": TableShape(16, 16, -64.0, 8.0, 4),
    "iq4": TableShape(16, 32, -119.0, 7.0, 4),
    "iq5": TableShape(32, 64, -122.0, 3.75, 2),
    "iq6": TableShape(64, 128, -124.5, 1.9, 1),
    "iq4 even": TableShape(16, 16, -103.0, 14.0, 4),
    "iq4 odd": TableShape(16, 16, -103.0, 14.0, 4),
}
_PARITY = np.array([i.bit_count() & 1 for i in range(16)])
EVEN_CODES, ODD_CODES = np.flatnonzero(_PARITY == 0), np.flatnonzero(_PARITY == 1)
_BASE_ROWS = {
    "iq2": tables.IQ2_VALUES[0],
    "iq3": tables.IQ3_VALUES[0],
    "iq4": tables.IQ4_VALUES[0],
    "iq5": tables.IQ5_VALUES[0],
    "iq6": tables.IQ6_VALUES[0],
    "iq4 even": tables.IQ4_VALUES[0][EVEN_CODES],
    "iq4 odd": tables.IQ4_VALUES[0][ODD_CODES],
}


def values_of(name: str) -> npt.NDArray[np.float32]:
    """Return the base row of a table."""
    return _BASE_ROWS[name]


def _nearest_words(name: str) -> Words:
    """Return the words described above; entries beyond the last one repeat it."""
    shape, row = SHAPES[name], values_of(name)
    limits = (row[1:] + row[:-1]) / 2
    edges = shape.start + shape.width * np.arange(shape.n_cells)
    first = np.searchsorted(limits, edges, side="right").astype(np.int32)
    limit = np.full(shape.n_entries, np.inf, np.float32)
    limit[: len(limits)] = limits
    value = np.full(shape.n_entries, row[-1], np.float32)
    value[: len(row)] = row
    return np.concatenate((first, limit.view(np.int32), value.view(np.int32)))


@cache
def kernel_table(name: str) -> Words:
    """Return the lookup data of a table's kernel.

    For "iq4 parity": the tables of both parities, then the codes of either (16 words each). For "iq2 pairs": the first
    values of the pairs, then the second ones.
    """
    if name == "iq4 parity":
        codes = [np.resize(c, 16).astype(np.int32) for c in (EVEN_CODES, ODD_CODES)]
        return np.concatenate([_nearest_words("iq4 even"), _nearest_words("iq4 odd"), *codes])
    if name == "iq2 pairs":
        return np.ascontiguousarray(tables.IQ2_KL_VALUES.T).reshape(-1).view(np.int32)
    return _nearest_words(name)
