"""Cluster the codebooks of the trellis types for nearest-neighbour search.

Lloyd's algorithm, started from a tree of median cuts, groups the rows of a generator table. Coordinates of centres are
whole numbers, so every distance is exact and the clusters are the same on every machine. Members of a cluster lie in
vectors of 16 (dimension by dimension, half floats), the last one padded with copies of a member. The reference instead
cuts space into fixed cells with overlapping lists (iqk_quantize.cpp).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.quant.tables import TRELLIS_OFFSET, trellis

LANES = 16
_ITERATIONS = 4
_LOCK = threading.Lock()
_FOUND: dict[tuple[int, int, int, bool, int], Codebook] = {}


@dataclass(frozen=True, slots=True)
class Codebook:
    """One clustered table of rows of `size` values.

    centers (n/16, size, 16) f32; starts (n + 1,) i32, first vector of each cluster; members (n_vectors, size, 16) f16;
    norms (n_vectors, 16) f32, squared lengths; indices (n_vectors, 16) i32, table rows; rows (n_rows, size) f32;
    center_norms (n,) f32.
    """

    centers: npt.NDArray[np.float32]
    starts: npt.NDArray[np.int32]
    members: npt.NDArray[np.float16]
    norms: npt.NDArray[np.float32]
    indices: npt.NDArray[np.int32]
    rows: npt.NDArray[np.float32]
    center_norms: npt.NDArray[np.float32]

    def addresses(self) -> list[int]:
        """Return the kernels' input, in the order of the fields; the number of clusters stands before the last."""
        fields: list[npt.NDArray[Any]] = [self.centers, self.starts, self.members]
        fields += [self.norms, self.indices, self.rows]
        return [array.ctypes.data for array in fields] + [len(self.starts) - 1, self.center_norms.ctypes.data]


def codebook(
    size: int, n_rows: int, n_clusters: int, *, magnitude: bool = False, offset: int = TRELLIS_OFFSET
) -> Codebook:
    """Return the table of `n_rows` rows (their absolute values if `magnitude`), built once per process."""
    key = (size, n_rows, n_clusters, magnitude, offset)
    with _LOCK:
        if key not in _FOUND:
            rows = trellis(size, offset, n_rows)
            _FOUND[key] = _build(np.abs(rows) if magnitude else rows, n_clusters)
        return _FOUND[key]


def _build(rows: npt.NDArray[np.float32], n_clusters: int) -> Codebook:
    centers, owner = _lloyd(rows, n_clusters)
    order = np.argsort(owner, kind="stable")
    counts = np.bincount(owner, minlength=n_clusters)
    n_vectors = -(-counts // LANES)
    starts = np.concatenate(([0], np.cumsum(n_vectors)))
    first = np.repeat(np.cumsum(counts) - counts, n_vectors * LANES)
    place = np.arange(starts[-1] * LANES) - np.repeat(starts[:-1] * LANES, n_vectors * LANES)
    indices = order[first + np.minimum(place, np.repeat(counts, n_vectors * LANES) - 1)]
    found = rows[indices]
    return Codebook(
        _columns(centers),
        starts.astype(np.int32),
        _columns(found.astype(np.int8)),
        np.ascontiguousarray((found * found).sum(axis=1)),
        indices.astype(np.int32),
        rows,
        np.ascontiguousarray((centers * centers).sum(axis=1)),
    )


def _columns(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rearrange (n, size) into (n/16, size, 16)."""
    return np.ascontiguousarray(rows.reshape(-1, LANES, rows.shape[1]).transpose(0, 2, 1))


def _lloyd(rows: npt.NDArray[np.float32], n_clusters: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.intp]]:
    """Return centres and the owner of every row; every centre owns at least one row."""
    owner = _median_cuts(rows, n_clusters)
    centers = _means(rows, owner, n_clusters)
    for _ in range(_ITERATIONS):
        owner = _nearest(rows, centers)
        used = np.unique(owner)
        if len(used) < n_clusters:  # cannot happen with a spread table; the search needs full vectors of centres
            owner = _median_cuts(rows, n_clusters)
        centers = _means(rows, owner, n_clusters)
    return centers, owner


def _median_cuts(rows: npt.NDArray[np.float32], n_clusters: int) -> npt.NDArray[np.intp]:
    """Halve all cells along their widest dimension until there are n_clusters (a power of two)."""
    order = np.arange(len(rows)).reshape(1, -1)
    while len(order) < n_clusters:
        values = rows[order]
        widest = np.argmax(values.var(axis=1, dtype=np.float64), axis=1)
        along = np.take_along_axis(values, widest[:, None, None], axis=2)[:, :, 0]
        order = np.take_along_axis(order, np.argsort(along, axis=1, kind="stable"), axis=1)
        order = order.reshape(2 * len(order), -1)
    owner = np.empty(len(rows), np.intp)
    owner[order.reshape(-1)] = np.repeat(np.arange(n_clusters), order.shape[1])
    return owner


def _means(rows: npt.NDArray[np.float32], owner: npt.NDArray[np.intp], n_clusters: int) -> npt.NDArray[np.float32]:
    counts = np.bincount(owner, minlength=n_clusters)
    sums = [np.bincount(owner, weights=column, minlength=n_clusters) for column in rows.T]
    return np.rint(np.stack(sums, axis=1) / counts[:, None]).astype(np.float32)


def _nearest(rows: npt.NDArray[np.float32], centers: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    half = 0.5 * (centers * centers).sum(axis=1)
    pieces = [np.argmin(half - piece @ centers.T, axis=1) for piece in np.array_split(rows, max(1, len(rows) // 2048))]
    return np.concatenate(pieces)
