"""The experts that live on disk: which of them are in RAM, at which addresses, and what is read next (`--expert-ram`).

The store owns the residency of these experts: expert -> slot in RAM, or disk. Kernels see it as a table of addresses
per weight, which changes between the ops of a step; no program is built again. A layer asks for its experts when they
are chosen (`request`) and waits for a matrix when it is multiplied (`wait`); reading goes on in between, gates and ups
before downs. While a layer is computed, experts of the next one are read ahead: those that its router guesses, or all
if a prompt needs nearly all.

A new expert takes the slot of another one. For a few tokens that is the expert whose last use was longest ago. Prompts
use the layers in turn, so that rule would drop everything just before it is used again: they take slots of the layer
that has most, which is the one just computed. So each layer keeps about the same share in RAM, and reading and
computing overlap evenly. Uses by prompts do not count as recent.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.program import TABLE
from ikcli.engine.plan.expert_slots import BLOCK, GIB, ExpertLayer, ExpertSlots
from ikcli.engine.run.expert_reader import Reader, Reading, ReadInto
from ikcli.errors import IkError
from ikcli.system_files import read_into

_POPULATE_WRITE, _HUGE = 23, 14  # of Linux's madvise
_NONE = -1

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class ExpertCounts:
    """Counts of a store: experts used, how many of them were in RAM when chosen, bytes read, seconds waited."""

    uses: int = 0
    hits: int = 0
    n_bytes: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """Return the sentence for the log."""
        return (
            f"experts: {100 * self.hits / max(self.uses, 1):.1f} % of {self.uses} uses were in RAM; "
            f"{self.n_bytes / GIB:.2f} GiB read, {self.seconds:.2f} s waited for them"
        )


class _Pool:
    """The slots of one size, and the experts that may be in them."""

    def __init__(self, layers: Sequence[ExpertLayer], n_slots: int) -> None:
        self.layers, self.size = layers, layers[0].slot
        n_bytes = self.size * n_slots
        self.memory = mmap.mmap(-1, n_bytes)
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if hasattr(self.memory, "madvise"):
            for advice in (_HUGE, _POPULATE_WRITE):  # so that no step waits for a page
                try:
                    self.memory.madvise(advice)
                except OSError:  # older systems: pages come with the first reads
                    continue
        self.free = list(range(n_slots - 1, -1, -1))


class ExpertStore:
    """Experts on disk with slots in RAM; see the module."""

    def __init__(self, slots: ExpertSlots, n_threads: int, read: ReadInto = read_into) -> None:
        """Allocate the slots and start reading threads; nothing is read."""
        self.slots, self.counts = slots, ExpertCounts()
        self._layers = {layer.il: layer for layer in slots.layers}
        self._next = {a.il: b.il for a, b in pairwise(slots.layers)}
        if len(slots.layers) > 1:
            self._next[slots.layers[-1].il] = slots.layers[0].il
        pools = {size: _Pool([x for x in slots.layers if x.slot == size], n) for size, n in slots.counts.items()}
        self._pool = {layer.il: pools[layer.slot] for layer in slots.layers}
        self._tables = {m.name: np.zeros(x.n_expert, np.int64) for x in slots.layers for m in x.matrices}
        n = {x.il: x.n_expert for x in slots.layers}
        self._slot: dict[int, I64] = {il: np.full(k, _NONE, np.int64) for il, k in n.items()}
        self._missing: dict[int, I64] = {il: np.zeros(k, np.int64) for il, k in n.items()}  # matrices not read yet
        self._used: dict[int, I64] = {il: np.zeros(k, np.int64) for il, k in n.items()}  # the step of the last use
        self._held: dict[tuple[int, int], tuple[int, int]] = {}  # (slot size, slot) -> (layer, expert)
        self._changed = threading.Condition()
        self._error: IkError | None = None
        self._now: tuple[int, frozenset[int]] = (_NONE, frozenset())  # the layer at work and its experts
        self._guessed: tuple[int, frozenset[int]] = (_NONE, frozenset())
        self._clock = 0
        self._reader = Reader({m.path for x in slots.layers for m in x.matrices}, n_threads, read)

    @property
    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tables, as programs name them."""
        return {name + TABLE: table.ctypes.data for name, table in self._tables.items()}

    @property
    def direct(self) -> bool:
        """Return whether experts are read past the page cache."""
        return self._reader.direct

    @property
    def complete(self) -> bool:
        """Return whether every expert is in RAM, so that no step has to ask."""
        return self.slots.complete and not self._reading() and all((s >= 0).all() for s in self._slot.values())

    def _reading(self) -> bool:
        return any(m.any() for m in self._missing.values())

    def resident(self, il: int) -> npt.NDArray[np.bool_]:
        """Return which experts of a layer are in RAM."""
        return (self._slot[il] >= 0) & (self._missing[il] == 0)

    # --- loading ------------------------------------------------------------------------------------------------------
    def fill(self, advance: Callable[[float], None]) -> None:
        """Read the first experts of every layer into all slots; `advance` is told the bytes."""
        with self._changed:
            for pool in {id(p): p for p in self._pool.values()}.values():
                order = sorted((e, x.il) for x in pool.layers for e in range(x.n_expert))[: len(pool.free)]
                for e, il in sorted(order, key=lambda pair: (pair[1], pair[0])):
                    self._reader.submit(self._load(il, [e]))
        told = 0
        while True:
            with self._changed:
                self._check()
                busy = self._reading()
                if busy:
                    self._changed.wait(0.1)
                told, before = self.counts.n_bytes, told
            advance(told - before)
            if not busy:
                self.counts = ExpertCounts()
                return

    # --- a step -------------------------------------------------------------------------------------------------------
    def request(self, il: int, experts: I64, n_pairs: int, guess: Callable[[], I64] | None = None) -> None:
        """Begin to read what a layer needs; `n_pairs` (token, expert) pairs use `experts`.

        `guess`: called by a reading thread, returns the experts that the next layer is likely to need.
        """
        layer = self._layers[il]
        prompt = n_pairs >= layer.n_expert
        wanted = experts.tolist()
        with self._changed:
            self._check()
            self._clock += 1
            self._now = il, frozenset(wanted)
            if self._guessed[0] == il:
                self._guessed = _NONE, frozenset()
            here = self._slot[il][experts] >= 0
            self.counts.uses += len(wanted)
            self.counts.hits += int((here & (self._missing[il][experts] == 0)).sum())
            if not prompt:
                self._used[il][experts] = self._clock
            if not here.all():
                self._reader.submit(self._load(il, experts[~here].tolist(), prompt=prompt))
            late = self._missing[il][experts] > 0
        if late.any():
            needed = experts[late].tolist()
            places = {(m.path, m.offset + e * m.n_bytes) for m in layer.matrices for e in needed}
            self._reader.promote(lambda r: (r.path, r.offset) in places)
        self._read_ahead(il, prompt, guess)

    def _read_ahead(self, il: int, prompt: bool, guess: Callable[[], I64] | None) -> None:
        after, clock = self._next.get(il), self._clock
        if after is None or (self._slot[after] >= 0).all():
            return
        if prompt:
            self.expect(after, np.arange(self._layers[after].n_expert), clock, prompt=True)
        elif guess is not None:
            work = guess

            def ask() -> None:
                self.expect(after, work(), clock)

            self._reader.submit([Reading(self._layers[il].matrices[0].path, 0, 0, memoryview(b""), _done, ask)])

    def expect(self, il: int, experts: I64, clock: int | None = None, *, prompt: bool = False) -> None:
        """Read experts of a layer ahead; nothing happens if another layer has begun since `clock`."""
        with self._changed:
            if clock is not None and clock != self._clock:
                return
            self._guessed = il, frozenset(experts.tolist())
            absent = experts[self._slot[il][experts] < 0].tolist()
            self._reader.submit(self._load(il, absent, prompt=prompt, ahead=True), ahead=True)

    def wait(self, il: int, names: Iterable[str]) -> None:
        """Wait until these weights of the layer at work have all experts that were requested."""
        layer = self._layers[il]
        bits = sum(1 << i for i, m in enumerate(layer.matrices) if m.name in set(names))
        start = 0.0
        with self._changed:
            experts = np.fromiter(self._now[1], np.int64, len(self._now[1]))
            while (self._missing[il][experts] & bits).any():
                self._check()
                start = start or time.perf_counter()
                self._changed.wait(1.0)
            if start:
                self.counts.seconds += time.perf_counter() - start
            self._check()
            size = layer.slot
            for e, slot in zip(experts.tolist(), self._slot[il][experts].tolist(), strict=True):
                if slot < 0 or self._held.get((size, slot)) != (il, e):
                    raise IkError(f"internal error: expert {e} of layer {il} is not in the slot that it should be in")

    # --- slots --------------------------------------------------------------------------------------------------------
    def _load(self, il: int, experts: Sequence[int], *, prompt: bool = False, ahead: bool = False) -> list[Reading]:
        """Give experts a slot and return what has to be read into it, matrix by matrix; those without a slot stay away.

        Only what is read ahead may go without.
        """
        layer, pool = self._layers[il], self._pool[il]
        while len(pool.free) < len(experts):
            self._evict(il, pool, len(experts) - len(pool.free), prompt)
            if ahead or len(pool.free) >= len(experts) or not self._reading():
                break
            self._changed.wait(1.0)  # slots of experts that were expected in vain are free when they have been read
            self._check()
        placed = []
        for e in experts:
            if not pool.free:
                if not ahead:
                    raise IkError(f"internal error: no slot is free for expert {e} of layer {il}")
                break
            slot = pool.free.pop()
            self._slot[il][e], self._missing[il][e] = slot, (1 << len(layer.matrices)) - 1
            self._held[layer.slot, slot] = il, e
            placed.append((e, slot))
        return [self._reading_of(il, e, slot, i) for i in range(len(layer.matrices)) for e, slot in placed]

    def _reading_of(self, il: int, e: int, slot: int, i: int) -> Reading:
        layer, pool = self._layers[il], self._pool[il]
        m = layer.matrices[i]
        offset = m.offset + e * m.n_bytes
        at = slot * pool.size + sum(other.span for other in layer.matrices[:i])
        address = pool.address + at + offset % BLOCK

        def done(error: IkError | None) -> None:
            with self._changed:
                if error is not None:
                    self._error = self._error or error
                else:
                    self._tables[m.name][e] = address
                    self._missing[il][e] &= ~(1 << i)
                    self.counts.n_bytes += m.n_bytes
                self._changed.notify_all()

        return Reading(m.path, offset, m.n_bytes, pool.view[at : at + m.span], done)

    def _evict(self, il: int, pool: _Pool, n: int, prompt: bool) -> None:
        """Free up to n slots of experts that no layer waits for or works with."""
        wanted = len(pool.free) + n
        may = {x.il: self._evictable(x.il) for x in pool.layers}
        if prompt:
            counts = {x.il: int((self._slot[x.il] >= 0).sum()) for x in pool.layers if may[x.il].any() and x.il != il}
            for _ in range(n):
                if not counts:
                    break
                most = max(counts, key=lambda k: counts[k])
                own = np.flatnonzero(may[most])
                e = int(own[np.argmin(self._used[most][own])])
                self._drop(most, e)
                may[most][e] = False
                counts[most] -= 1
                if not may[most].any():
                    del counts[most]
            n = wanted - len(pool.free)
        if n > 0:
            layers = [x.il for x in pool.layers]
            used = np.concatenate([np.where(may[k], self._used[k], np.iinfo(np.int64).max) for k in layers])
            places = np.concatenate([np.full(len(may[k]), k) for k in layers])
            numbers = np.concatenate([np.arange(len(may[k])) for k in layers])
            chosen = np.argsort(used, kind="stable")[:n] if n > 1 else [int(np.argmin(used))]
            for i in chosen:
                if used[i] < np.iinfo(np.int64).max:
                    self._drop(int(places[i]), int(numbers[i]))

    def _evictable(self, il: int) -> npt.NDArray[np.bool_]:
        found = self.resident(il)
        for busy, experts in (self._now, self._guessed):
            if busy == il and experts:
                found[list(experts)] = False
        return found

    def _drop(self, il: int, e: int) -> None:
        layer, pool = self._layers[il], self._pool[il]
        slot = int(self._slot[il][e])
        del self._held[layer.slot, slot]
        self._slot[il][e] = _NONE
        for m in layer.matrices:
            self._tables[m.name][e] = 0
        pool.free.append(slot)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop reading; the memory goes with the store."""
        self._reader.close()


def _done(error: IkError | None) -> None:
    return
