"""Which experts a step uses, so that only these are copied from the host.

The table of a layer (`moe_sort`) says so on the device, but copies begin before it is there. So the experts of the
step before are copied first. Then the host waits for the table and has the rest copied. Where a step used nearly all,
the next one copies all without waiting, and the table is only looked at later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.backends.cuda.device import Device, Pinned, Stream
from ikcli.graph import Node

NEARLY_ALL = 0.9  # of the experts of a layer: to wait for the table costs more than to copy the others

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The table of a layer; its list of first rows by expert lies `offset` bytes behind its address."""

    node: Node
    offset: int
    n_expert: int


@dataclass(slots=True)
class _Known:
    """The latest list of first rows of a table (`starts`), and the experts that step number `step` copies.

    `mask`: these experts; None: all of them. `waits`: whether that step waits for its list.
    """

    starts: npt.NDArray[np.int32]
    step: int = 0
    waits: bool = False
    mask: Mask | None = None


class UsedExperts:
    """The experts that steps use, by table."""

    def __init__(self, device: Device, stream: Stream, tables: Mapping[Node, ExpertTable]) -> None:
        """Allocate pinned memory for the lists; `stream` computes them."""
        self._device, self._stream, self._step = device, stream, 0
        sizes = [table.n_expert + 1 for table in tables.values()]
        self._pinned: Pinned = device.pinned(4 * max(sum(sizes), 1), "experts in use")
        words, ends = self._pinned.array[: 4 * sum(sizes)].view(np.int32), np.cumsum(sizes)
        self._known = {
            node: _Known(words[end - n : end]) for node, n, end in zip(tables, sizes, ends.tolist(), strict=True)
        }

    def begin(self) -> None:
        """Begin a step; the one before is done."""
        self._step += 1

    def expected(self, table: ExpertTable) -> Mask | None:
        """Return the experts to copy now: those of the step before, after `learn` those of this step; None: all."""
        known = self._known[table.node]
        if known.step == self._step:
            return known.mask
        used = np.diff(known.starts) > 0
        known.waits = known.step > 0 and bool(used.mean() < NEARLY_ALL)
        return used if known.waits else None

    def learn(self, table: ExpertTable, address: int) -> None:
        """Read the table at `address`, of which `expected` then returns the experts; what computes it is queued."""
        known = self._known[table.node]
        if known.step == self._step:
            return
        known.step, known.mask = self._step, None
        self._device.download(self._stream, known.starts, address + table.offset)
        if known.waits:
            self._device.synchronize(self._stream)
            known.mask = np.diff(known.starts) > 0

    def close(self) -> None:
        """Free the memory; the device is idle."""
        self._device.free_pinned(self._pinned)


def runs(mask: Mask) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of the runs of set elements."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
