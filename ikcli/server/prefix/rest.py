"""Rows while they rest in the prompt cache: as they are in a slot, or with `--cache-rest q8_0` at 8 bits.

Only f16 tensors whose rows are a multiple of 32 elements are stored as Q8_0, cells and windows alike. Everything else
(quantized caches, recurrent states) stays as it is. A transposed tensor rests with a row per position, like others.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ikcli.engine.run.saved_sequence import Bytes, Checkpoint
from ikcli.engine.run.sequences import Sequences
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import row_n_bytes
from ikcli.graph import Cache

Rows = tuple[Bytes, ...]
AS_CACHED, Q8_0 = "cache", "q8_0"
_BLOCK, _HEAD, _MOST = 32, 2, 127  # elements of a block, bytes of its scale, largest code
_LEAST, _LARGEST = 2.0**-14, 65504.0  # smallest f16 number with all of its bits, largest one


class Rest:
    """Read, store and write back rows of sequences; `kind` is a value of --cache-rest. See the module."""

    def __init__(self, sequences: Sequences, kind: str = AS_CACHED) -> None:
        self._sequences = sequences
        packs = kind == Q8_0
        self._cells = [c if packs and _can_pack(c) else None for c in sequences.cells]
        self._windows = [c if packs and _can_pack(c) else None for c in sequences.windows]
        self.packs = any(self._cells) or any(self._windows)

    @property
    def about(self) -> dict[str, str]:
        """Return what files of these rows say beside what the cache says."""
        return {"rest": Q8_0} if self.packs else {}

    # --- cells ------------------------------------------------------------------------------------------------------
    def read(self, seq: int, first: int, n: int) -> Rows:
        """Return a copy of n positions of a sequence from `first` on."""
        rows = self._sequences.read(seq, first, n)
        if not self.packs:
            return rows
        return tuple(_pack(part, c) if c else part for part, c in zip(rows, self._cells, strict=True))

    def write(self, seq: int, first: int, rows: Rows) -> None:
        """Write rows at a position of a sequence; `Sequences.arrive` then makes it count."""
        if self.packs:
            rows = tuple(_unpack(part, c) if c else part for part, c in zip(rows, self._cells, strict=True))
        self._sequences.write(seq, first, rows)

    def cut(self, rows: Rows, first: int, end: int) -> Rows:
        """Return views of positions, counted from the first one read."""
        if not self.packs:
            return self._sequences.cut(rows, first, end)
        cut = self._sequences.cut
        return tuple(
            part[first:end] if c else one for part, one, c in zip(rows, cut(rows, first, end), self._cells, strict=True)
        )

    def shapes(self, n: int) -> list[tuple[int, int]]:
        """Return the shapes of what `read` returns."""
        shapes = self._sequences.shapes(n, n)[: len(self._cells)]
        return [_shape(n, c) if c else shape for shape, c in zip(shapes, self._cells, strict=True)]

    # --- checkpoints ------------------------------------------------------------------------------------------------
    def pack(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint of a sequence as it rests."""
        if not any(self._windows):
            return checkpoint
        n = len(self._windows)
        rows = (_pack(part, c) if c else part for part, c in zip(checkpoint.parts, self._windows, strict=False))
        return replace(checkpoint, parts=(*rows, *checkpoint.parts[n:]))

    def unpack(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint of a sequence that `pack` packed."""
        if not any(self._windows) or not checkpoint.parts:
            return checkpoint
        n = len(self._windows)
        rows = (_unpack(part, c) if c else part for part, c in zip(checkpoint.parts, self._windows, strict=False))
        return replace(checkpoint, parts=(*rows, *checkpoint.parts[n:]))

    def checkpoint_shapes(self, n_tokens: int, first: int) -> list[tuple[int, int]]:
        """Return the shapes of the parts of a checkpoint at rest."""
        shapes = self._sequences.checkpoint_shapes(n_tokens, first)
        n = len(self._windows)
        windows = (_shape(n_tokens - first, c) if c else s for s, c in zip(shapes, self._windows, strict=False))
        return [*windows, *shapes[n:]]


def _can_pack(cache: Cache) -> bool:
    return cache.type == GGMLType.F16 and cache.cols % _BLOCK == 0


def _shape(n: int, cache: Cache) -> tuple[int, int]:
    return n, row_n_bytes(GGMLType.Q8_0, cache.cols)


def _pack(part: Bytes, cache: Cache) -> Bytes:
    """Return f16 rows (n, row bytes), or (columns, n * 2) of a transposed tensor, as Q8_0 (n, row bytes).

    `quant.encode` writes the same format as the reference rounds it; this rounds to the scale as stored, in fewer
    passes, since it runs between two tokens.
    """
    values = np.ascontiguousarray(part).view("<f2")
    rows = values.T if cache.transposed else values
    rows = np.ascontiguousarray(rows)
    x = rows.astype(np.float32).reshape(-1, _BLOCK)
    largest = (rows.view("<u2").reshape(-1, _BLOCK) & 0x7FFF).max(axis=1).view("<f2")  # bits of f16 are in its order
    scales = (largest.astype(np.float32) / np.float32(_MOST)).astype("<f2")
    out = np.empty((len(x), _HEAD + _BLOCK), np.uint8)
    out[:, :_HEAD] = scales[:, None].view(np.uint8)
    d = scales.astype(np.float32)[:, None]
    x *= np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    np.rint(x, out=x)
    if d.size and d.min() < _LEAST:  # scales of few bits
        np.clip(x, -_MOST, _MOST, out=x)
    np.copyto(out[:, _HEAD:].view(np.int8), x, casting="unsafe")
    return out.reshape(_shape(len(rows), cache))


def _unpack(part: Bytes, cache: Cache) -> Bytes:
    """Return what `_pack` packed."""
    blocks = part.reshape(-1, _HEAD + _BLOCK)
    x = blocks[:, _HEAD:].view(np.int8).astype(np.float32)
    d = np.ascontiguousarray(blocks[:, :_HEAD]).view("<f2").astype(np.float32)
    x *= d
    if d.size and d.max() * _MOST > _LARGEST:  # a scale that was rounded up
        np.clip(x, -_LARGEST, _LARGEST, out=x)
    rows = x.astype("<f2").reshape(len(part), cache.cols)
    return np.ascontiguousarray(rows.T if cache.transposed else rows).view(np.uint8)
