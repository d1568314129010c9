"""Tables of learned positions, resampled to the grid of an image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ikcli.vision.facts import Facts
from ikcli.vision.tensors import Floats, Tensors

_CUBIC = -0.75


def cubic(side: int, n: int) -> Floats:
    """Return the weights (n, side) of bicubic interpolation between pixel centres, with edges repeated."""
    at = (np.arange(n, dtype=np.float64) + 0.5) * side / n - 0.5
    low = np.floor(at).astype(np.int64)
    out = np.zeros((n, side), np.float64)
    for tap in range(-1, 3):
        x = np.abs(at - low - tap)
        near = ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1
        far = ((_CUBIC * x - 5 * _CUBIC) * x + 8 * _CUBIC) * x - 4 * _CUBIC
        np.add.at(out, (np.arange(n), np.clip(low + tap, 0, side - 1)), np.where(x <= 1, near, far))
    return out.astype(np.float32)


def linear(side: int, n: int) -> Floats:
    """Return the weights (n, side) of bilinear interpolation between pixel centres, with edges repeated."""
    at = np.clip((np.arange(n, dtype=np.float64) + 0.5) * side / n - 0.5, 0, side - 1)
    return np.asarray(np.clip(1 - np.abs(np.arange(side) - at[:, None]), 0, None), np.float32)


def triangle(side: int, n: int) -> Floats:
    """Return the weights (n, side) of bilinear interpolation between pixel centres, averaging where it reduces."""
    scale = side / n
    centre = (np.arange(n, dtype=np.float64) + 0.5) * scale - 0.5
    out = np.clip(1 - np.abs(np.arange(side) - centre[:, None]) / max(scale, 1.0), 0, None)
    return np.asarray(out / out.sum(axis=1, keepdims=True), np.float32)


def bucketed(side: int, fractions: Floats) -> npt.NDArray[np.int64]:
    """Return the places in a table of `side` in which fractions of an image fall, with the rounding of float32."""
    bounds = (1 / side + np.arange(side - 1) / side).astype(np.float32)
    return np.searchsorted(bounds, fractions, side="right")


def square_table(facts: Facts, tensors: Tensors, name: str = "v.position_embd.weight") -> Floats:
    """Return a table of positions as (rows, columns, width); raise FormatError for one that is not square."""
    table = tensors.values(name)
    if table.size % facts.n_embd:
        raise facts.fail(f"tensor '{name}' has {table.size} numbers, not a multiple of the width {facts.n_embd}")
    side = round((table.size // facts.n_embd) ** 0.5)
    if side * side * facts.n_embd != table.size:
        raise facts.fail(f"tensor '{name}' has {table.size // facts.n_embd} rows, which are no square")
    return table.reshape(side, side, facts.n_embd)


def blended(table: Floats, rows: Floats, cols: Floats) -> Floats:
    """Return the rows of a table with these weights for rows and columns, row by row."""
    found = np.einsum("rs,scn->rcn", rows, np.einsum("ct,stn->scn", cols, table, optimize=True), optimize=True)
    return np.ascontiguousarray(found.reshape(-1, table.shape[-1]), np.float32)
