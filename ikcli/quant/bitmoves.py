"""Rearrange the bits of byte records: compile a list of bit moves into a few NumPy operations on all records.

Every destination byte is the OR of a few source bytes, each shifted and masked. Neighbouring bytes that move alike are
handled as one lane of 4 or 2 bytes, the rest byte by byte. The shifted copies of the source are made first, which is
cheap and leaves one gather and one mask per term. Row-interleaved tensor types are repacked this way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Lanes = npt.NDArray[Any]
Term = tuple[int, int, int]  # source lane, left shift, mask after the shift

_WIDTHS = (4, 2, 1)  # bytes per lane, widest first
_DTYPES: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class _Segment:
    """Destination lanes start..stop; per term the gather index into the shifted copies and the mask (None: all)."""

    start: int
    stop: int
    terms: tuple[tuple[npt.NDArray[np.intp], Lanes | None], ...]


@dataclass(frozen=True, slots=True)
class _Pass:
    """The work in lanes of `width` bytes: which source lanes are read with which shift, what is written."""

    width: int
    copies: tuple[tuple[int, slice | npt.NDArray[np.intp]], ...]  # (shift, source lanes)
    segments: tuple[_Segment, ...]

    def run(self, src: Bytes, out: Bytes) -> None:
        dtype = np.dtype(_DTYPES[self.width])
        lanes, target = src.view(dtype), out.view(dtype)
        copies = np.concatenate([_shifted(lanes, shift, at) for shift, at in self.copies], axis=1)
        for segment in self.segments:
            total: Lanes | None = None
            for index, mask in segment.terms:
                term = np.take(copies, index, axis=1, mode="clip")
                if mask is not None:
                    term &= mask
                total = term if total is None else np.bitwise_or(total, term, out=total)
            target[:, segment.start : segment.stop] = total


@dataclass(frozen=True, slots=True)
class BitMoves:
    """A compiled rearrangement of records of `n_src` bytes into records of `n_dst` bytes, both multiples of 4."""

    n_src: int
    n_dst: int
    passes: tuple[_Pass, ...]

    def apply(self, src: Bytes) -> Bytes:
        """Rearrange contiguous records (n, n_src) into (n, n_dst); destination bits without a source are 0."""
        out = np.zeros((len(src), self.n_dst), np.uint8)
        for p in self.passes:
            p.run(src, out)
        return out


def compile_moves(dst: npt.NDArray[np.integer], src: npt.NDArray[np.integer], n_dst: int, n_src: int) -> BitMoves:
    """Compile the moves of bit `src[i]` of the source to bit `dst[i]` of the destination."""
    left = dict(enumerate(byte_terms(dst, src, n_dst)))
    passes = []
    for width in _WIDTHS:
        units = _lanes(left, width, n_dst)
        left = {i: terms for i, terms in left.items() if i // width not in units}
        if units:
            passes.append(_compile_pass(width, units))
    return BitMoves(n_src, n_dst, tuple(passes))


def count_lanes(dst: npt.NDArray[np.integer], src: npt.NDArray[np.integer], n_dst: int) -> int:
    """Count the destination lanes of the widest kind that move as one; more of them means faster compiled moves."""
    return len(_lanes(dict(enumerate(byte_terms(dst, src, n_dst))), _WIDTHS[0], n_dst))


def byte_terms(dst: npt.NDArray[np.integer], src: npt.NDArray[np.integer], n_dst: int) -> list[tuple[Term, ...]]:
    """Return the (source byte, left shift, mask) terms of every destination byte, ordered by their lowest bits."""
    masks: list[dict[tuple[int, int], int]] = [{} for _ in range(n_dst)]
    order = np.argsort(dst)
    for d, s in zip(dst[order].tolist(), src[order].tolist(), strict=True):
        key = s >> 3, (d & 7) - (s & 7)
        masks[d >> 3][key] = masks[d >> 3].get(key, 0) | 1 << (d & 7)
    return [tuple((byte, shift, mask) for (byte, shift), mask in m.items()) for m in masks]


def _lanes(left: dict[int, tuple[Term, ...]], width: int, n_dst: int) -> dict[int, tuple[Term, ...]]:
    """Return the destination lanes of `width` bytes that move as one, with their terms in source lanes."""
    found = {}
    for i in range(n_dst // width):
        parts = [left.get(width * i + j, ()) for j in range(width)]
        first = parts[0]
        alike = all(p == tuple((byte + j, *rest) for byte, *rest in first) for j, p in enumerate(parts))
        if first and alike and not any(byte % width for byte, _, _ in first):
            spread = int.from_bytes(b"\1" * width, "little")
            found[i] = tuple((byte // width, shift, mask * spread) for byte, shift, mask in first)
    return found


def _compile_pass(width: int, units: dict[int, tuple[Term, ...]]) -> _Pass:
    by_shift: dict[int, set[int]] = {}
    for lane, shift, _ in (term for terms in units.values() for term in terms):
        by_shift.setdefault(shift, set()).add(lane)
    copies: list[tuple[int, slice | npt.NDArray[np.intp]]] = []
    position: dict[tuple[int, int], int] = {}
    for shift, used in sorted(by_shift.items()):
        lanes = sorted(used)
        position |= {(lane, shift): len(position) + i for i, lane in enumerate(lanes)}
        dense = lanes[-1] - lanes[0] == len(lanes) - 1
        copies.append((shift, slice(lanes[0], lanes[-1] + 1) if dense else np.array(lanes, np.intp)))
    segments = []
    for run in _runs(units):
        n_terms = max(len(units[lane]) for lane in run)
        terms = []
        for i in range(n_terms):
            column = [units[lane][min(i, len(units[lane]) - 1)] for lane in run]  # the last term again is harmless
            index = np.array([position[lane, shift] for lane, shift, _ in column], np.intp)
            masks = np.array([mask for _, _, mask in column], _DTYPES[width])
            terms.append((index, None if (masks == np.iinfo(masks.dtype).max).all() else masks))
        segments.append(_Segment(run[0], run[-1] + 1, tuple(terms)))
    return _Pass(width, tuple(copies), tuple(segments))


def _runs(units: dict[int, tuple[Term, ...]]) -> list[list[int]]:
    """Group neighbouring lanes that have about the same number of terms."""
    runs: list[list[int]] = []
    for lane, terms in units.items():
        if runs and lane == runs[-1][-1] + 1 and abs(len(terms) - len(units[runs[-1][0]])) <= 1:
            runs[-1].append(lane)
        else:
            runs.append([lane])
    return runs


def _shifted(lanes: Lanes, shift: int, at: slice | npt.NDArray[np.intp]) -> Lanes:
    picked = lanes[:, at] if isinstance(at, slice) else np.take(lanes, at, axis=1, mode="clip")
    if shift == 0:
        return picked
    amount = lanes.dtype.type(abs(shift))
    return picked << amount if shift > 0 else picked >> amount
