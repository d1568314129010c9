"""Programs that run on several devices: the backend of a session with a GPU.

A recorded graph is divided into turns (`graph/split.py`). Every device lowers its turns into one program with one
arena, so values stay where they are between turns; what goes from one device to another passes through hand-over
memory (pinned), whose places are reused by liveness. The host walks the turns: it starts those of GPUs and goes on,
executes those of the CPU, and waits only for what a turn needs. Looks like `CpuBackend` to the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.backend import CpuBackend, Observer, State
from ikcli.backends.cpu.lower import RULES, max_rows
from ikcli.backends.cpu.program import Lowering, Program
from ikcli.backends.cpu.threads import aligned_zeros
from ikcli.graph import Cache, Graph, Lifetime, Node, Rows, Weight, assign_offsets
from ikcli.graph.split import Places, Turn, assign, schedule

Bytes = npt.NDArray[np.uint8]
CPU = "CPU"
_SLACK = 512  # bytes behind every value in hand-over memory, which kernels may read
_LIGHT = frozenset({"embed", "get_rows", "rope_table", "moe_sort"})
_LIGHT_TOKENS = 8


class PartProgram(Protocol):
    """What one device does in a program."""

    @property
    def arena_bytes(self) -> int: ...

    def has_output(self, node: Node) -> bool: ...


class Part(Protocol):
    """A device as `HybridBackend` uses it. Turns are numbered per device."""

    asynchronous: bool

    def plan(self, turns: Sequence[Turn], rows: Mapping[Rows, int], n_cells: int, independent: bool) -> PartProgram: ...

    def bind(
        self,
        programs: Sequence[PartProgram],
        state: State,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None: ...

    def begin(self, program: PartProgram, state: State) -> None: ...

    def run(self, program: PartProgram, turn: int, n_threads: int) -> None: ...

    def wait(self, program: PartProgram, turn: int) -> None: ...

    def finish(self) -> None: ...

    def values(
        self, program: PartProgram, turn: int, n_threads: int, state: State
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class CpuPartProgram:
    """A CPU program and the ops of each of its turns."""

    program: Program
    spans: list[tuple[int, int]]
    light: list[bool]

    @property
    def arena_bytes(self) -> int:
        return self.program.arena_bytes

    def has_output(self, node: Node) -> bool:
        return self.program.has_output(node)


class CpuPart:
    """The CPU's turns. What it gets and what it gives lies in hand-over memory itself, so nothing is copied."""

    asynchronous = False

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        self._few = True

    def plan(self, turns: Sequence[Turn], rows: Mapping[Rows, int], n_cells: int, independent: bool) -> CpuPartProgram:
        """Lower the turns one after the other."""
        low = Lowering(rows, self.backend.n_threads, n_cells, independent)
        spans: list[tuple[int, int]] = []
        for turn in turns:
            first = len(low.ops)
            for node in turn.nodes:
                low.begin(node)
                RULES[node.op](low, node)
            spans.append((first, len(low.ops)))
            for node in (*turn.imports, *turn.exports):
                low.place_outside(node)
        light = [all(node.op in _LIGHT for node in turn.nodes) for turn in turns]
        return CpuPartProgram(Program(low, None), spans, light)

    def bind(
        self,
        programs: Sequence[PartProgram],
        state: State,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None:
        """Give the programs memory."""
        own = [_cpu(p).program for p in programs]
        self.backend.reserve(own)
        for program, places in zip(own, handover, strict=True):
            self.backend.bind([program], state, weights, caches, places)

    def begin(self, program: PartProgram, state: State) -> None:
        """A new micro-batch."""
        self._few = state.rows[Rows.TOKENS] <= _LIGHT_TOKENS

    def run(self, program: PartProgram, turn: int, n_threads: int) -> None:
        """Execute one turn."""
        p = _cpu(program)
        first, stop = p.spans[turn]
        if stop > first:
            self.backend.run_ops(p.program, first, stop, 1 if self._few and p.light[turn] else n_threads)

    def wait(self, program: PartProgram, turn: int) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""

    def values(
        self, program: PartProgram, turn: int, n_threads: int, state: State
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]:
        """Execute a turn node by node; yields every output."""
        p = _cpu(program)
        begin, end = p.spans[turn]
        for node, first, stop in p.program.node_ops():
            if begin <= first < end:
                self.backend.run_ops(p.program, first, stop, n_threads)
                if p.program.has_output(node):
                    n = state.rows[node.rows.symbol] * node.rows.factor
                    yield node, p.program.view(self.backend.arena, node, n)

    def close(self) -> None:
        """Stop the threads and free the arena."""
        self.backend.close()


def _cpu(program: PartProgram) -> CpuPartProgram:
    assert isinstance(program, CpuPartProgram)
    return program


@dataclass(slots=True)
class HybridProgram:
    """A graph divided between devices: turns in order, each with its number on its device."""

    graph: Graph
    result: Node
    turns: list[Turn]
    numbers: list[int]
    parts: dict[str, PartProgram]
    places: dict[Node, tuple[int, int]]  # hand-over memory: (first byte, bytes)
    handover_bytes: int
    result_at: tuple[str, int] = (CPU, 0)
    memory: dict[Node, Bytes] = field(default_factory=dict)

    @property
    def arena_bytes(self) -> int:
        """Work memory on the CPU, without hand-over."""
        return self.parts[CPU].arena_bytes if CPU in self.parts else 0

    def weights(self, device: str) -> set[str]:
        """Names of the weights a device needs."""
        return {x.name for t in self.turns if t.device == device for n in t.nodes for x in n.inputs
                if isinstance(x, Weight)}  # fmt: skip

    def caches(self, device: str) -> set[Cache]:
        """Cache tensors a device holds."""
        return {x for t in self.turns if t.device == device for n in t.nodes for x in n.inputs if isinstance(x, Cache)}


class HybridBackend:
    """The CPU and one or more other devices, of one session."""

    def __init__(self, cpu: CpuBackend, others: Mapping[str, Part], places: Places) -> None:
        self.cpu = cpu
        self.parts: dict[str, Part] = {CPU: CpuPart(cpu), **others}
        self._places = places
        self._handover: Bytes = aligned_zeros(0)
        self.allocate: Callable[[int], Bytes] = aligned_zeros  # of hand-over memory

    def plan(
        self, graph: Graph, result: Node, n_tokens: int, n_outputs: int, n_cells: int, *, independent: bool = False
    ) -> HybridProgram:
        """Divide and lower a graph; nothing is allocated. See `CpuBackend.plan`."""
        rows = max_rows(n_tokens, n_outputs, n_cells)
        cut = [name for name, part in self.parts.items() if part.asynchronous]
        turns = schedule(graph, assign(graph, self._places), result, cut=cut)
        counts = dict.fromkeys(self.parts, 0)
        numbers = []
        for turn in turns:
            numbers.append(counts[turn.device])
            counts[turn.device] += 1
        parts = {
            name: part.plan([t for t in turns if t.device == name], rows, n_cells, independent)
            for name, part in self.parts.items()
            if counts[name]
        }
        places, n_bytes = _handover_places(turns, rows, result, self._asynchronous)
        at = next((t.device, i) for t, i in zip(turns, numbers, strict=True) if result in t.exports)
        return HybridProgram(graph, result, turns, numbers, parts, places, n_bytes, at)

    def _asynchronous(self, device: str) -> bool:
        return self.parts[device].asynchronous

    def prepare(self, programs: Sequence[HybridProgram], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the CPU's kernels, compiling what the cache lacks."""
        self.cpu.prepare(_cpu_programs(programs), progress)

    def n_missing(self, programs: Sequence[HybridProgram]) -> int:
        """Kernels that have to be compiled first."""
        return self.cpu.n_missing(_cpu_programs(programs))

    def bind(
        self,
        programs: Sequence[HybridProgram],
        state: State,
        weights: Mapping[str, Mapping[str, int]],
        caches: Mapping[str, Mapping[Cache, int]],
    ) -> None:
        """Give the programs memory; weights and caches are addresses by device."""
        n_bytes = max(p.handover_bytes for p in programs)
        if len(self._handover) < n_bytes:
            self._handover = self.allocate(n_bytes)
        for p in programs:
            p.memory = {node: self._handover[at : at + size] for node, (at, size) in p.places.items()}
        for name, part in self.parts.items():
            own = [p for p in programs if name in p.parts]
            part.bind([p.parts[name] for p in own], state, weights.get(name, {}), caches.get(name, {}),
                      [p.memory for p in own])  # fmt: skip

    def run(self, program: HybridProgram, n_threads: int, state: State) -> None:
        """Execute a bound program; when it returns, all devices are done."""
        parts = self.parts
        for name, part in program.parts.items():
            parts[name].begin(part, state)
        for turn, number in zip(program.turns, program.numbers, strict=True):
            self._wait_for(program, turn)
            parts[turn.device].run(program.parts[turn.device], number, n_threads)
        for name in program.parts:
            parts[name].finish()

    def _wait_for(self, program: HybridProgram, turn: Turn) -> None:
        for i in turn.after:
            name = program.turns[i].device
            self.parts[name].wait(program.parts[name], program.numbers[i])

    def run_observed(self, program: HybridProgram, n_threads: int, state: State, observer: Observer) -> None:
        """Execute node by node, showing every output to the observer once, right after it was computed."""
        seen: set[Node] = set()
        for name, part in program.parts.items():
            self.parts[name].begin(part, state)
        for turn, number in zip(program.turns, program.numbers, strict=True):
            self._wait_for(program, turn)
            values = self.parts[turn.device].values
            for node, value in values(program.parts[turn.device], number, n_threads, state):
                if node not in seen:
                    seen.add(node)
                    observer(node, value)
        for name in program.parts:
            self.parts[name].finish()

    def result(self, program: HybridProgram, n_rows: int) -> npt.NDArray[np.float32]:
        """The program's value, in hand-over memory that the next run writes again."""
        n, cols = n_rows, program.result.cols
        return program.memory[program.result][: 4 * n * cols].view(np.float32).reshape(n, cols)

    def close(self) -> None:
        """Release everything."""
        for part in self.parts.values():
            part.close()
        self._handover = aligned_zeros(0)


def _cpu_programs(programs: Sequence[HybridProgram]) -> list[Program]:
    return [_cpu(p.parts[CPU]).program for p in programs if CPU in p.parts]


def _handover_places(
    turns: Sequence[Turn], rows: Mapping[Rows, int], result: Node, asynchronous: Callable[[str], bool]
) -> tuple[dict[Node, tuple[int, int]], int]:
    """(first byte, bytes) of every value that crosses devices, and the size of the memory.

    A copy to a GPU may be under way until the host has waited for that turn of the GPU or a later one.
    """
    end = len(turns)
    waited = [end if asynchronous(t.device) else i for i, t in enumerate(turns)]  # turn before which a copy is over
    for device in {t.device for t in turns if asynchronous(t.device)}:
        own = [i for i, t in enumerate(turns) if t.device == device]
        for j in range(end - 1, -1, -1):
            known = max((i for i in turns[j].after if turns[i].device == device), default=-1)
            for i in own:
                if i <= known:
                    waited[i] = j
    first = {n: i for i, t in enumerate(turns) for n in t.exports}
    last = dict(first)
    for i, t in enumerate(turns):
        for node in t.imports:
            last[node] = max(last[node], waited[i])
        for x in (x for node in t.nodes for x in node.inputs):
            if isinstance(x, Node) and x in first and not asynchronous(t.device):
                last[x] = max(last[x], i)  # the CPU reads it in place
    last[result] = end
    nodes = list(first)
    lives = [Lifetime(rows[n.rows.symbol] * n.rows.factor * n.cols * 4 + _SLACK, first[n], last[n]) for n in nodes]
    offsets, n_bytes = assign_offsets(lives)
    return {n: (at, life.n_bytes) for n, at, life in zip(nodes, offsets, lives, strict=True)}, n_bytes
