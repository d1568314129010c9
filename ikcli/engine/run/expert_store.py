"""The experts that live on disk: which of them are in RAM, at which addresses, and what is read next (`--expert-ram`).

The store owns the residency of these experts: expert -> slot in RAM, or disk. Kernels see it as a table of addresses
per weight, which changes between the ops of a step; no program is built again. A layer asks for its experts when they
are chosen (`request`) and waits for a matrix when it is multiplied (`wait`); reading goes on in between, gates and ups
before downs.

When no step waits for the disk, experts of the next layer are read ahead: those that its router guesses, or with
prompts those that as many tokens probably use. A reading thread takes the next one when it has nothing else to do. So
what is read ahead is as much as the disk can read meanwhile, and a guess that has not begun when the layer chooses
costs nothing.

A new expert takes the slot of another one. For a few tokens that is the one with the lowest value (`UseRates`). Prompts
use all experts of one layer after the other, so the next use of an expert is the farther away, the later its layer was
computed: they take slots of the layer that has most, which is the one just computed, and leave it those with the
highest values. So each layer keeps about the same share in RAM, and the disk is busy all the time.
"""

from __future__ import annotations

import ctypes
import heapq
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.program import TABLE
from ikcli.engine.plan.expert_slots import BLOCK, GIB, ExpertLayer, ExpertSlots
from ikcli.engine.run.expert_rates import UseRates
from ikcli.engine.run.expert_reader import Reader, Reading, ReadInto
from ikcli.errors import IkError
from ikcli.system_files import read_into

_POPULATE_WRITE, _HUGE = 23, 14  # of Linux's madvise
_NONE = -1
_NOBODY = np.zeros(0, np.int64)

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class ExpertCounts:
    """Counts of a store: experts used, how many of them were in RAM when chosen, bytes read, seconds waited.

    `in_vain`: bytes of experts that were read ahead and replaced before any use.
    """

    uses: int = 0
    hits: int = 0
    n_bytes: int = 0
    in_vain: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """Return the sentence for the log."""
        return (
            f"experts: {100 * self.hits / max(self.uses, 1):.1f} % of {self.uses} uses were in RAM; "
            f"{self.n_bytes / GIB:.2f} GiB read ({self.in_vain / GIB:.2f} in vain), "
            f"{self.seconds:.2f} s waited for them"
        )


def _private_memory(n_bytes: int) -> mmap.mmap:
    """Return anonymous memory; most systems give huge pages only to memory that is not shared, Python's default."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Pool:
    """The slots of one size, and the experts that may be in them."""

    def __init__(self, layers: Sequence[ExpertLayer], n_slots: int) -> None:
        self.layers, self.size = layers, layers[0].slot
        n_bytes = self.size * n_slots
        self.memory = _private_memory(n_bytes)
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if hasattr(self.memory, "madvise"):
            for advice in (_HUGE, _POPULATE_WRITE):  # so that no step waits for a page
                try:
                    self.memory.madvise(advice)
                except OSError:  # older systems: pages come with the first reads
                    continue
        self.free = list(range(n_slots - 1, -1, -1))
        # For every expert of all layers: its slot; bits of the matrices that the slot lacks, and of those that are
        # queued or being read; whether it was read ahead and not used yet; its value.
        n = sum(layer.n_expert for layer in layers)
        self.slot, self.missing, self.pending = (
            np.full(n, _NONE, np.int64),
            np.zeros(n, np.int64),
            np.zeros(n, np.int64),
        )
        self.fresh, self.value = np.zeros(n, np.bool_), np.zeros(n)
        starts = np.cumsum([0, *(layer.n_expert for layer in layers)]).tolist()
        self.span = {layer.il: slice(a, b) for layer, (a, b) in zip(layers, pairwise(starts), strict=True)}
        self.held = dict.fromkeys(self.span, 0)  # slots by layer

    def find(self, i: int) -> tuple[int, int]:
        """Return the layer and number of the expert at index i of the arrays."""
        return next((il, i - part.start) for il, part in self.span.items() if i < part.stop)


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
        # Parts of the arrays of pools, by layer.
        spans = {il: (pool, pool.span[il]) for il, pool in self._pool.items()}
        self._slot = {il: pool.slot[span] for il, (pool, span) in spans.items()}
        self._missing = {il: pool.missing[span] for il, (pool, span) in spans.items()}
        self._pending = {il: pool.pending[span] for il, (pool, span) in spans.items()}
        self._fresh = {il: pool.fresh[span] for il, (pool, span) in spans.items()}
        self._rates = {il: UseRates(pool.value[span]) for il, (pool, span) in spans.items()}
        self._held: dict[tuple[int, int], tuple[int, int]] = {}  # (slot size, slot) -> (layer, expert)
        self._now: tuple[int, I64] = (_NONE, _NOBODY)  # the layer at work and its experts
        self._guessed: tuple[int, I64] = (_NONE, _NOBODY)
        self._ahead: deque[int] = deque()  # experts of the guessed layer still to read
        self._parts: deque[tuple[int, int]] = deque()  # (expert, matrix) of the one that is being read
        self._sure = False  # all of them will be used
        self._n_ahead, self._most_ahead = 0, max(n_threads // 2, 1)  # guesses being read
        self._clock = 0
        self._complete = False
        self._error: IkError | None = None
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        paths = {m.path for x in slots.layers for m in x.matrices}
        self._reader = Reader(paths, n_threads, lock, self._next_ahead, read)

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
        """Return whether every expert is in RAM, so that no step has to ask; once true, it stays so."""
        if not self._complete and self.slots.complete:
            with self._changed:
                self._complete = all(self.resident(il).all() for il in self._layers)
        return self._complete

    def resident(self, il: int) -> npt.NDArray[np.bool_]:
        """Return which experts of a layer are in RAM."""
        return (self._slot[il] >= 0) & (self._missing[il] == 0)

    def _reading(self) -> bool:
        return any(pool.pending.any() for pool in self._pool.values())

    # --- loading ------------------------------------------------------------------------------------------------------
    def fill(self, advance: Callable[[float], None]) -> None:
        """Read the first experts of every layer into all slots; `advance` is told the bytes."""
        with self._changed:
            for pool in {id(p): p for p in self._pool.values()}.values():
                order = sorted((e, x.il) for x in pool.layers for e in range(x.n_expert))[: len(pool.free)]
                for e, il in sorted(order, key=lambda pair: (pair[1], pair[0])):
                    self._place(il, e)
                    self._read_rest(il, [e])
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
    def request(self, il: int, experts: I64, uses: I64, n_tokens: int, guess: Callable[[], I64] | None = None) -> None:
        """Begin to read what a layer needs; of n tokens, uses[i] use experts[i].

        `guess`: called by a reading thread, returns the experts that the next layer is likely to need, the likeliest
        first.
        """
        prompt = int(uses.sum()) >= self._layers[il].n_expert
        with self._changed:
            self._check()
            self._clock += 1
            self._now = il, experts
            self._expect(_NONE, _NOBODY)
            self._rates[il].add(experts, uses, n_tokens)
            self._fresh[il][experts] = False
            missing = self._slot[il][experts] < 0
            self.counts.uses += len(experts)
            self.counts.hits += int((~missing & (self._missing[il][experts] == 0)).sum())
            after = self._next.get(il)
            ahead = after is not None and not self._has_all(after)
            if guess is not None and ahead and not prompt:
                self._guess(il, guess)
            if missing.any():
                self._give_slots(il, experts[missing], prompt)
            self._read_rest(il, experts.tolist())
            if prompt and ahead and after is not None:
                self._expect(after, self._rates[after].likely(n_tokens), sure=True)

    def _has_all(self, il: int) -> bool:
        return not self._missing[il].any() and bool((self._slot[il] >= 0).all())

    def _guess(self, il: int, guess: Callable[[], I64]) -> None:
        after, clock = self._next[il], self._clock

        def ask() -> None:
            self.expect(after, guess(), clock)

        self._reader.submit([Reading(self._layers[il].matrices[0].path, 0, 0, memoryview(b""), _done, ask)])

    def expect(self, il: int, experts: I64, clock: int | None = None) -> None:
        """Read experts of a layer ahead, in this order; nothing happens if another layer has begun since `clock`."""
        with self._changed:
            if clock is None or clock == self._clock:
                self._expect(il, experts)

    def _expect(self, il: int, experts: I64, *, sure: bool = False) -> None:
        self._guessed, self._sure = (il, experts), sure
        self._parts.clear()
        self._ahead = deque(experts.tolist())
        if self._ahead:
            self._reader.wake()

    def _next_ahead(self) -> Reading | None:
        """Return what to read ahead next; called by reading threads without other work."""
        il, _ = self._guessed
        if il == _NONE or self._error is not None or (not self._sure and self._n_ahead >= self._most_ahead):
            return None
        while not self._parts and self._ahead:
            e = self._ahead.popleft()
            if self._slot[il][e] < 0:
                pool = self._pool[il]
                if not pool.free:
                    self._evict(il, 1, prompt=self._sure)
                if not pool.free:
                    self._ahead.clear()  # all slots are in use
                    return None
                self._place(il, e)
                self._fresh[il][e] = True
            self._parts.extend((e, i) for i in self._unread(il, e))
        if not self._parts:
            return None
        self._n_ahead += 1
        return self._reading_of(il, *self._parts.popleft(), ahead=True)

    def wait(self, il: int, names: Iterable[str]) -> None:
        """Wait until these weights of the layer at work have all experts that were requested."""
        layer, experts = self._layers[il], self._now[1]
        bits = sum(1 << i for i, m in enumerate(layer.matrices) if m.name in set(names))
        start = 0.0
        missing = self._missing[il]
        # A thread that waits reads, too: on a busy machine it takes long until the others are awake.
        while (missing[experts] & bits).any() and self._error is None:
            start = start or time.perf_counter()
            r = self._reader.take_wanted()
            if r is not None:
                self._reader.perform(r)
                continue
            with self._changed:
                if (missing[experts] & bits).any() and self._error is None:
                    self._changed.wait(1.0)
        with self._changed:
            if start:
                self.counts.seconds += time.perf_counter() - start
            self._check()
            size = layer.slot
            for e, slot in zip(experts.tolist(), self._slot[il][experts].tolist(), strict=True):
                if slot < 0 or self._held.get((size, slot)) != (il, e):
                    raise IkError(f"internal error: expert {e} of layer {il} is not in the slot that it should be in")

    # --- readings -----------------------------------------------------------------------------------------------------
    def _unread(self, il: int, e: int) -> list[int]:
        """Return the matrices of an expert with a slot that are neither there nor on their way."""
        bits = int(self._missing[il][e] & ~self._pending[il][e])
        return [i for i in range(len(self._layers[il].matrices)) if bits >> i & 1]

    def _read_rest(self, il: int, experts: Sequence[int]) -> None:
        """Read what these experts lack into their slots, matrix by matrix."""
        parts = sorted((i, e) for e in experts if self._missing[il][e] for i in self._unread(il, e))
        if parts:
            self._reader.submit([self._reading_of(il, e, i) for i, e in parts])

    def _reading_of(self, il: int, e: int, i: int, *, ahead: bool = False) -> Reading:
        layer, pool, slot = self._layers[il], self._pool[il], int(self._slot[il][e])
        m = layer.matrices[i]
        offset = m.offset + e * m.n_bytes
        at = slot * pool.size + sum(other.span for other in layer.matrices[:i])
        address = pool.address + at + offset % BLOCK
        self._pending[il][e] |= 1 << i

        def done(error: IkError | None) -> None:
            with self._changed:
                self._n_ahead -= ahead
                self._pending[il][e] &= ~(1 << i)
                if error is not None:
                    self._error = self._error or error
                else:
                    self._tables[m.name][e] = address
                    self._missing[il][e] &= ~(1 << i)
                    self.counts.n_bytes += m.n_bytes
                self._changed.notify_all()

        return Reading(m.path, offset, m.n_bytes, pool.view[at : at + m.span], done)

    # --- slots --------------------------------------------------------------------------------------------------------
    def _give_slots(self, il: int, experts: I64, prompt: bool) -> None:
        pool = self._pool[il]
        while len(pool.free) < len(experts):
            self._evict(il, len(experts) - len(pool.free), prompt)
            if len(pool.free) >= len(experts):
                break
            if not self._reading():
                raise IkError(f"internal error: no slot is free for {len(experts)} experts of layer {il}")
            self._changed.wait(1.0)  # slots of experts that were guessed wrongly are free when they have been read
            self._check()
        for e in experts.tolist():
            self._place(il, e)

    def _place(self, il: int, e: int) -> None:
        layer, slot = self._layers[il], self._pool[il].free.pop()
        self._slot[il][e], self._missing[il][e] = slot, (1 << len(layer.matrices)) - 1
        self._held[layer.slot, slot] = il, e
        self._pool[il].held[il] += 1

    def _evict(self, il: int, n: int, prompt: bool) -> None:
        """Free up to n slots of experts that no layer waits for or works with; `il` gets them."""
        pool = self._pool[il]
        may = (pool.slot >= 0) & (pool.pending == 0)
        for busy, experts in (self._now, self._guessed):
            if busy in pool.span:
                may[pool.span[busy]][experts] = False
        if prompt:
            n -= self._evict_from_fullest(il, may, n)
        if n > 0:
            values = np.where(may, pool.value, np.inf)
            for i in np.argsort(values, kind="stable")[:n].tolist() if n > 1 else [int(values.argmin())]:
                if values[i] < np.inf:
                    self._drop(*pool.find(i))

    def _evict_from_fullest(self, il: int, may: npt.NDArray[np.bool_], n: int) -> int:
        """Free up to n slots of those that `may` go, each of the layer that has most; return how many."""
        pool = self._pool[il]
        order: dict[int, deque[int]] = {}  # of layers that were looked at: experts by ascending value
        fullest = [(-count, k) for k, count in pool.held.items() if k != il]
        heapq.heapify(fullest)
        freed = 0
        while freed < n and fullest:
            _, most = fullest[0]
            if most not in order:
                own = np.flatnonzero(may[pool.span[most]])
                order[most] = deque(own[np.argsort(self._rates[most].value[own], kind="stable")].tolist())
            if not order[most]:
                heapq.heappop(fullest)
                continue
            e = order[most].popleft()
            self._drop(most, e)
            may[pool.span[most]][e] = False
            heapq.heapreplace(fullest, (-pool.held[most], most))
            freed += 1
        return freed

    def _drop(self, il: int, e: int) -> None:
        layer, slot = self._layers[il], int(self._slot[il][e])
        del self._held[layer.slot, slot]
        if self._fresh[il][e]:
            read = [m.n_bytes for i, m in enumerate(layer.matrices) if not self._missing[il][e] >> i & 1]
            self.counts.in_vain += sum(read)
        self._slot[il][e], self._missing[il][e], self._fresh[il][e] = _NONE, 0, False
        for m in layer.matrices:
            self._tables[m.name][e] = 0
        self._pool[il].held[il] -= 1
        self._pool[il].free.append(slot)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop reading; the memory goes with the store."""
        self._reader.close()


def _done(error: IkError | None) -> None:
    return
