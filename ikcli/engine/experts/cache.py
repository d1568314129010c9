"""The cache of experts in VRAM: which expert is in which slot, what is uploaded next, whether steps use it.

The cache owns the residency of these experts: expert -> slot of a GPU, or RAM. Programs see it as a table per layer
that the CPU reads in every step (`MoeResident`), so no program is built again and nothing is sent to a GPU for it.

The table changes only between steps, when no GPU reads a slot. An expert loses its slot first; then another one is
uploaded into it beside the following steps; and it enters the table when the device has reported that its upload is
done. Uploads are few per step, and none begin before the last ones are done.

An expert is worth its uses, each of which counts DECAY of the one a step later. It replaces another one only if it is
worth MARGIN times as much, so that experts that are used about equally often do not take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ikcli.backends.cuda.device import Event, OutOfMemory
from ikcli.engine.experts.cache_trial import CacheTrial
from ikcli.engine.plan.cache_slots import CacheSlots
from ikcli.engine.run.gpu_device import GpuDevice
from ikcli.engine.run.run_device import CPU, RunDevice
from ikcli.errors import IkError
from ikcli.graph.split import NodePlaces
from ikcli.log import log, warn

MOST_TOKENS = 8  # of a step that uses the cache
STEP_BYTES = 32 << 20  # uploaded per step, at least one expert
DECAY, MARGIN = 0.99, 1.5
_NONE, _LARGE = -1, 1e100


@dataclass(slots=True)
class CacheCounts:
    """Uses of experts in steps with the cache, those of experts in slots, and uploads."""

    uses: int = 0
    hits: int = 0
    uploads: int = 0
    n_bytes: int = 0


class ExpertCache:
    """Slots on GPUs for experts in RAM; see the module.

    Experts and slots of all layers are numbered in one sequence each, so that a step costs a few operations on arrays.
    """

    def __init__(self, slots: CacheSlots, clock: Callable[[], float] = time.perf_counter) -> None:
        self.slots, self.counts, self.trial, self._clock = slots, CacheCounts(), CacheTrial(), clock
        layers = slots.layers
        self._first = np.cumsum([0, *(x.n_expert for x in layers)])  # of the experts of a layer
        self._layer = np.repeat(np.arange(len(layers)), [x.n_expert for x in layers])
        self._first_slot = np.cumsum([0, *(x.n_slots for x in layers)])
        n = int(self._first[-1])
        self._slot = np.full(n, _NONE, np.int32)  # in its layer, of every expert: what programs read
        self._uses = np.zeros(n, np.int32)  # since the last step: programs count
        self._worth, self._one = np.zeros(n, np.float64), 1.0  # `_one`: what a use is worth now
        self._held = np.full(int(self._first_slot[-1]), _NONE, np.int64)  # the expert in a slot or on its way there
        self._pending: list[tuple[GpuDevice, Event, int, int]] = []  # expert and slot of an upload
        self._parts: Mapping[str, GpuDevice] = {}
        self._addresses: dict[str, dict[str, int]] = {}
        self._start, self._n_tokens, self._using = 0.0, 0, False  # of the step
        self.usable = True

    def places(self, others: NodePlaces, parts: Mapping[str, RunDevice]) -> NodePlaces:
        """Return the devices of nodes with the tables and slots, and tell the GPUs what they will be sent."""
        home = self.slots.home
        self._parts = {name: part for name, part in parts.items() if isinstance(part, GpuDevice)}
        for name in self.slots.devices:
            self._parts[name].sent_between = self.slots.sent(name)
        return replace(others, weight=lambda node, w: home.get(w.name) or others.weight(node, w))

    def load(self) -> dict[str, dict[str, int]]:
        """Allocate the slots; return their addresses and those of the tables, as programs of a device name them.

        Without memory for the slots the cache stays unused.
        """
        tables = {}
        for layer, first in zip(self.slots.layers, self._first.tolist(), strict=False):
            for w, array in zip(layer.tables, (self._slot, self._uses), strict=True):
                tables[w.name] = int(array[first:].ctypes.data)
        try:
            for name in self.slots.devices:
                weights = [w for layer in self.slots.of(name) for w in layer.in_slots]
                self._addresses[name] = self._parts[name].make_slots(weights)
        except OutOfMemory as error:
            warn(f"no memory is left for --expert-cache, so it is not used: {error}")
            self.usable = False
        return {CPU: tables, **self._addresses}

    def resident(self, il: int) -> npt.NDArray[np.int64]:
        """Return the experts of a layer that are in slots."""
        i = [x.il for x in self.slots.layers].index(il)
        return np.flatnonzero(self._slot[self._first[i] : self._first[i + 1]] != _NONE)

    # --- a step -------------------------------------------------------------------------------------------------------
    def begin(self, n_tokens: int) -> bool:
        """Take over finished uploads; return whether the step that begins uses the cache."""
        self._start, self._n_tokens, self._using = self._clock(), n_tokens, False
        if n_tokens > MOST_TOKENS or not self.trial.on or not self.usable:
            return False
        self._finish_uploads()
        self._check()
        self._using = True
        return True

    def end(self) -> None:
        """Learn from a finished step, and begin uploads."""
        used = self._using
        if used:
            missed = self._learn()
            if not self._pending:
                self._begin_uploads(missed)
        if self._n_tokens == 1 and self.trial.saw(used, self._clock() - self._start):
            times = f"{1e3 * self.trial.cached:.2f} ms with it, {1e3 * self.trial.plain:.2f} ms without"
            log(f"expert cache: not used for {self.trial.pause} steps, because a step takes {times}")

    def _finish_uploads(self) -> None:
        left = []
        for upload in self._pending:
            part, event, k, slot = upload
            if part.device.done(event):
                part.device.free_event(event)
                self._slot[k] = slot - self._first_slot[self._layer[k]]
            else:
                left.append(upload)
        self._pending = left

    def _check(self) -> None:
        """Raise IkError if a table names a slot with another expert."""
        here = np.flatnonzero(self._slot != _NONE)
        wrong = here[self._held[self._first_slot[self._layer[here]] + self._slot[here]] != here]
        if len(wrong):
            il = self.slots.layers[self._layer[wrong[0]]].il
            e = wrong[0] - self._first[self._layer[wrong[0]]]
            raise IkError(f"internal error: expert {e} of layer {il} is not in the slot that its table names")

    def _learn(self) -> list[int]:
        """Count the uses of a step; return the experts without a slot, those of most worth first."""
        used = np.flatnonzero(self._uses)
        n, hit = self._uses[used], self._slot[used] != _NONE
        self._one /= DECAY
        self._worth[used] += n * self._one
        if self._one > _LARGE:
            self._worth /= self._one
            self._one = 1.0
        self.counts.uses += int(n.sum())
        self.counts.hits += int(n[hit].sum())
        self._uses[used] = 0
        missed = used[~hit]
        return missed[np.argsort(-self._worth[missed], kind="stable")].tolist()

    def _begin_uploads(self, missed: list[int]) -> None:
        n_bytes = 0
        for k in missed:
            layer = self.slots.layers[self._layer[k]]
            if self._pending and n_bytes + layer.slot_bytes > STEP_BYTES:
                return
            slot = self._slot_for(k)
            if slot == _NONE:
                continue
            i = int(self._layer[k])
            part, addresses = self._parts[layer.device], self._addresses[layer.device]
            self._held[slot] = k
            for one, all_ in zip(layer.ones, layer.in_slots, strict=True):
                address = addresses[all_.name] + int(slot - self._first_slot[i]) * part.expert_bytes(one)
                part.send_expert(one, int(k - self._first[i]), layer.n_expert, address)
            self._pending.append((part, part.sent(), k, slot))
            n_bytes += layer.slot_bytes
            self.counts.uploads += 1
            self.counts.n_bytes += layer.slot_bytes

    def _slot_for(self, k: int) -> int:
        """Return a free slot for an expert, or one that is taken from an expert of less worth; -1 if there is none."""
        i = int(self._layer[k])
        first = int(self._first_slot[i])
        held = self._held[first : int(self._first_slot[i + 1])]
        free = np.flatnonzero(held == _NONE)
        if len(free):
            return first + int(free[0])
        there = np.flatnonzero(self._slot[held] != _NONE)  # the others are on their way
        if not len(there):
            return _NONE
        at = int(there[np.argmin(self._worth[held[there]])])
        if self._worth[k] < MARGIN * self._worth[held[at]]:
            return _NONE
        self._slot[held[at]] = _NONE
        return first + at

    # --- reports ------------------------------------------------------------------------------------------------------
    def lines(self) -> list[str]:
        """Return log lines on what was used."""
        c, trial = self.counts, self.trial
        if not c.uses:
            return []
        times = f"; a step took {1e3 * trial.cached:.2f} ms with it, {1e3 * trial.plain:.2f} without"
        return [
            f"expert cache: {100 * c.hits / c.uses:.1f} % of {c.uses} uses were in slots; {c.uploads} experts "
            f"({c.n_bytes / 2**20:.2f} MiB) uploaded{times if trial.cached else ''}"
        ]

    def close(self) -> None:
        """Forget the slots; their memory goes with the devices."""
        for part, event, *_ in self._pending:
            part.device.free_event(event)
        self._pending.clear()
