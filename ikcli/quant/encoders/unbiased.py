"""Make rows unbiased: enlarge scales until the row, projected on its decoded values, has its length.

A least-squares scale is <q, x> / <q, q> and shrinks: of a row x it leaves the share <q, x> / <x, x> < 1. The other part
of the rounding error averages out over thousands of products. The shrink does not: it is the same in all of them, and
gate, up and down multiply theirs. So every row is multiplied by <x, x> / <q, x>, weighted as the encoder weighs it. Its
codes stay: those of least squares maximise <q, x>^2 / <q, q>, which no scale changes, so they also add the least noise
to an unbiased row.

Types whose scales matrix products multiply by a constant (`TensorType.matmul_scale`) are stored shorter by it.

Scales are f16 numbers of blocks, often so small that neighbours are a percent apart, or one number per row. Block
scales are rounded one after the other, and the next one makes up for the rounding error of the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import dequantize

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_LEAST_GAIN = 0.6  # rows that kept less are lost: they stay as they are
_LARGEST_F16 = np.float32(65504)
_TINY = np.float32(1e-30)
_RUN = 16  # scales that are rounded one after the other


class Scales(Protocol):
    """The place where a type keeps the scales that multiply everything in a block (or a row)."""

    def read(self, rows: Bytes) -> list[Floats]:
        """Read rows of bytes (n_rows, row bytes): per field (n_rows, n_blocks), or (n_rows, 1) for row scales."""

    def write(self, rows: Bytes, values: list[Floats]) -> None:
        """Replace the fields, rounded to the precision of the format."""

    def rounded(self, values: Floats) -> Floats:
        """Return values as they would be read again."""


@dataclass(frozen=True, slots=True)
class BlockScales:
    """f16 numbers at byte offsets of every block."""

    type_size: int
    offsets: tuple[int, ...]

    def read(self, rows: Bytes) -> list[Floats]:
        blocks = rows.reshape(len(rows), -1, self.type_size)
        return [
            np.ascontiguousarray(blocks[:, :, o : o + 2]).view("<f2")[:, :, 0].astype(np.float32) for o in self.offsets
        ]

    def write(self, rows: Bytes, values: list[Floats]) -> None:
        blocks = rows.reshape(len(rows), -1, self.type_size)
        for o, v in zip(self.offsets, values, strict=True):
            blocks[:, :, o : o + 2] = v.astype("<f2")[:, :, None].view(np.uint8)

    def rounded(self, values: Floats) -> Floats:
        return values.astype(np.float16).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RowScale:
    """One number that every row begins with, f16 or f32."""

    n_bytes: int

    def read(self, rows: Bytes) -> list[Floats]:
        return [np.ascontiguousarray(rows[:, : self.n_bytes]).view(f"<f{self.n_bytes}").astype(np.float32)]

    def write(self, rows: Bytes, values: list[Floats]) -> None:
        rows[:, : self.n_bytes] = values[0].astype(f"<f{self.n_bytes}").view(np.uint8)

    def rounded(self, values: Floats) -> Floats:
        return values.astype(f"<f{self.n_bytes}").astype(np.float32)


@dataclass(frozen=True, slots=True)
class GroupScales:
    """f16 numbers of some rows, one behind the other, that the group of these rows begins with."""

    n_rows: int

    def _header(self, rows: Bytes) -> Bytes:
        return rows.reshape(len(rows) // self.n_rows, -1)[:, : 2 * self.n_rows]

    def read(self, rows: Bytes) -> list[Floats]:
        return [np.ascontiguousarray(self._header(rows)).view("<f2").astype(np.float32).reshape(-1, 1)]

    def write(self, rows: Bytes, values: list[Floats]) -> None:
        self._header(rows)[:] = values[0].astype("<f2").reshape(-1, self.n_rows).view(np.uint8)

    def rounded(self, values: Floats) -> Floats:
        return values.astype(np.float16).astype(np.float32)


@dataclass(frozen=True, slots=True)
class NibbleScale:
    """The f16 scale of IQ1_M blocks, in the top nibbles of their four words of scales."""

    type_size: int = 56
    _shifts = np.array([0, 4, 8, 12], np.uint16)

    def _words(self, rows: Bytes) -> npt.NDArray[np.uint16]:
        blocks = rows.reshape(len(rows), -1, self.type_size)
        return np.ascontiguousarray(blocks[:, :, 48:56]).view("<u2")

    def read(self, rows: Bytes) -> list[Floats]:
        bits = ((self._words(rows) >> 12) << self._shifts).sum(axis=2, dtype=np.uint16)
        return [bits.view(np.float16).astype(np.float32)]

    def write(self, rows: Bytes, values: list[Floats]) -> None:
        nibbles = (values[0].astype("<f2").view("<u2")[:, :, None] >> self._shifts) & np.uint16(15)
        words = (self._words(rows) & np.uint16(0xFFF)) | nibbles << np.uint16(12)
        rows.reshape(len(rows), -1, self.type_size)[:, :, 48:56] = words.astype("<u2").view(np.uint8)

    def rounded(self, values: Floats) -> Floats:
        return values.astype(np.float16).astype(np.float32)


def scales_of(type: GGMLType) -> Scales | None:
    """Return where a type has its scales, or None if they stay as they are."""
    t = TYPES[type]
    if not t.keeps_length:
        return None
    if type == GGMLType.IQ1_M:
        return NibbleScale()
    if t.scales:
        return BlockScales(t.type_size, t.scales)
    if t.row_meta_size:
        return GroupScales(t.rows) if t.is_interleaved else RowScale(t.row_meta_size)
    return None


def unbias(rows: Bytes, values: Floats, type: GGMLType, weights: Floats | None) -> Bytes:
    """Rescale encoded `values` (n_rows, ne0) so that <row, values>_w = <values, values>_w.

    Leave types without scales alone. `weights` (ne0,) are those of the encoder, None for 1. `rows`: n_rows * row size
    bytes, changed in place.
    """
    if scales_of(type) is None or not values.size:
        return rows
    with np.errstate(all="ignore"):
        weighted = values if weights is None else values * (weights / weights.max())
    return unbias_metric(rows, values, type, weighted)


def unbias_metric(rows: Bytes, values: Floats, type: GGMLType, weighted: Floats) -> Bytes:
    """Do `unbias` for any inner product: `weighted` (n_rows, ne0) are the values times its matrix."""
    scales = scales_of(type)
    if scales is None or not values.size:
        return rows
    n_rows = len(values)
    data = np.ascontiguousarray(rows).reshape(n_rows, -1)
    fields = scales.read(data)
    with np.errstate(all="ignore"):  # rows beyond the range of floats stay as they are
        parts = _contributions(data, type, scales, fields, weighted)
        wanted = np.einsum("ij,ij->i", values, weighted) / np.float32(TYPES[type].matmul_scale)
        found = sum((p.sum(axis=1) for p in parts[1:]), parts[0].sum(axis=1))
        known = (found > _LEAST_GAIN * wanted) & np.isfinite(found) & np.isfinite(wanted)
        ratio = np.divide(wanted, found, out=np.ones(n_rows, np.float32), where=known)
        new = _rounded(scales, fields, parts, ratio)
    if not known.all():
        new = [np.where(known[:, None], n, f) for n, f in zip(new, fields, strict=True)]
    scales.write(data, new)
    return data.reshape(-1)


def _contributions(data: Bytes, type: GGMLType, scales: Scales, fields: list[Floats], weighted: Floats) -> list[Floats]:
    """Return what each field adds to <row, values>_w, per field (n_rows, n_blocks); the sum is linear in the fields."""
    n_rows, ne0 = weighted.shape
    shape = (n_rows, fields[0].shape[1], -1)

    def products(rows: Bytes) -> Floats:
        decoded = dequantize(rows.reshape(-1), type, (ne0, n_rows)).reshape(shape)
        return np.einsum("ijk,ijk->ij", decoded, weighted.reshape(shape))

    total = products(data)
    if len(fields) == 1:
        return [total]
    first_only = data.copy()
    scales.write(first_only, [fields[0], np.zeros_like(fields[1])])
    first = products(first_only)
    return [first, total - first]


def _rounded(scales: Scales, fields: list[Floats], parts: list[Floats], ratio: Floats) -> list[Floats]:
    """Return fields times `ratio` (n_rows,), rounded so that rounding errors cancel among up to 16 neighbours."""
    n_rows, n_blocks = fields[0].shape
    run = next(n for n in range(min(_RUN, n_blocks), 0, -1) if n_blocks % n == 0)
    ratio = np.repeat(ratio, n_blocks // run)
    turned = [np.ascontiguousarray(a.reshape(-1, run).T) for a in (*fields, *parts)]
    old, part = turned[: len(fields)], turned[len(fields) :]
    step = np.spacing(np.abs(old[0] * ratio).astype(np.float16)).astype(np.float32)
    reach = _quotient(step, np.abs(old[0]))  # a scale is moved by one step at most
    total = sum(part[1:], part[0])
    out, carry = [np.empty_like(f) for f in old], np.zeros_like(ratio)
    for b in range(run):
        factor = ratio + np.clip(_quotient(carry, total[b]), -reach[b], reach[b])
        carry += ratio * total[b]
        for f, p, o in zip(old, part, out, strict=True):
            scaled = f[b] * factor
            o[b] = scales.rounded(np.where(np.abs(scaled) < _LARGEST_F16, scaled, f[b]))
            carry -= p[b] * _quotient(o[b], f[b])
    return [o.T.reshape(n_rows, n_blocks) for o in out]


def _quotient(a: Floats, b: Floats) -> Floats:
    """Return a / b, 0 where b is 0 or next to it."""
    return np.divide(a, b, out=np.zeros_like(a), where=np.abs(b) > _TINY)
