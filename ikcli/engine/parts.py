"""What a session computes with: the CPU alone, or the CPU as one of several devices.

`CpuOnly` runs a whole graph as one program, with one call of the executor per step. A `Part` is a device of a
`HybridBackend`: it lowers the turns that fall to it into one program and executes them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.backend import CpuBackend, Observer, State
from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.program import Lowering, Program
from ikcli.backends.cpu.threads import aligned_zeros
from ikcli.engine.model import Model
from ikcli.engine.timed_ops import TimedOp, timed_ops
from ikcli.gguf.constants import TYPE_TRAITS, row_n_bytes
from ikcli.graph import Cache, Graph, Node, Rows
from ikcli.graph.split import Turn

Bytes = npt.NDArray[np.uint8]
CPU = "CPU"
_LIGHT_TOKENS = 8


class Part(Protocol):
    """A device as `HybridBackend` uses it. Turns are numbered per device."""

    @property
    def name(self) -> str:
        """The product."""

    asynchronous: bool  # `run` returns before the turn is done
    in_place: bool  # hand-over memory is read by the ops themselves, not copied at the start of a turn

    def prepare(self, programs: Sequence[Any]) -> None:
        """Load the kernels of a GPU."""

    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """Raise if the device has not as many bytes as its parts (weights, KV, compute) need."""

    def load_weights(self, model: Model, names: Sequence[str], mmap: bool) -> Mapping[str, int]:
        """Make the weights addressable for the device."""

    def weight_bytes(self, model: Model, names: Sequence[str]) -> int:
        """Bytes they take there."""

    def cache_bytes(self, cache: Cache, n_cells: int) -> int:
        """Bytes of a cache tensor on the device."""

    def make_caches(self, caches: Sequence[Cache], n_cells: int) -> Mapping[Cache, int]:
        """Zeroed cache tensors."""

    def read_cells(self, cache: Cache, n_cells: int, first: int, n: int) -> Bytes:
        """Cells first..first+n-1 of a cache tensor in the layout of the CPU: (n, row bytes), or (columns, bytes of n
        elements) of a transposed one. Only to be read."""

    def write_cells(self, cache: Cache, n_cells: int, first: int, rows: Bytes) -> None:
        """Replace cells, given as `read_cells` returns them."""

    def compute_bytes(self, programs: Sequence[Any]) -> int:
        """Work memory of programs on the device."""

    def plan(
        self,
        turns: Sequence[Turn],
        rows: Mapping[Rows, int],
        n_cells: int,
        independent: bool,
        streamed: Collection[str] = (),
    ) -> Any:
        """Lower the turns. `streamed`: weights in RAM that are copied to the device in every step."""

    def bind(
        self,
        programs: Sequence[Any],
        state: State,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None: ...

    def begin(self, program: Any, state: State) -> None: ...

    def run(self, program: Any, turn: int, n_threads: int) -> None: ...

    def wait(self, program: Any, turn: int) -> None: ...

    def finish(self) -> None: ...

    def values(
        self, program: Any, turn: int, n_threads: int, state: State
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]: ...

    def timed(self, program: Any, turn: int, n_threads: int, state: State, show: bool) -> Iterator[TimedOp]: ...

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

    name = CPU
    asynchronous = False
    in_place = True

    def __init__(self, backend: CpuBackend) -> None:
        self.backend = backend
        self.caches: dict[Cache, Bytes] = {}
        self._few = True

    def prepare(self, programs: Sequence[CpuPartProgram]) -> None:
        """The backend does that for all programs at once."""

    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """The system grants memory lazily: nothing to check."""

    def load_weights(self, model: Model, names: Sequence[str], mmap: bool) -> Mapping[str, int]:
        """Map or read the weights."""
        return model.load(names, mmap=mmap)

    def weight_bytes(self, model: Model, names: Sequence[str]) -> int:
        """Their bytes, as used."""
        return model.n_bytes(names)

    def cache_bytes(self, cache: Cache, n_cells: int) -> int:
        """Bytes of a cache tensor."""
        return cache_bytes(cache, n_cells)

    def make_caches(self, caches: Sequence[Cache], n_cells: int) -> Mapping[Cache, int]:
        """Zeroed cache tensors in RAM."""
        self.caches = {c: aligned_zeros(cache_bytes(c, n_cells)) for c in caches}
        return {c: int(a.ctypes.data) for c, a in self.caches.items()}

    def read_cells(self, cache: Cache, n_cells: int, first: int, n: int) -> Bytes:
        """The cells themselves."""
        return cells_view(cache, self.caches[cache], n_cells, first, n)

    def write_cells(self, cache: Cache, n_cells: int, first: int, rows: Bytes) -> None:
        """Replace cells."""
        n = rows.shape[1] // TYPE_TRAITS[cache.type].type_size if cache.transposed else len(rows)
        self.read_cells(cache, n_cells, first, n)[:] = rows

    def compute_bytes(self, programs: Sequence[Any]) -> int:
        """The arena, which programs share."""
        return max((p.arena_bytes for p in programs), default=0)

    def plan(
        self,
        turns: Sequence[Turn],
        rows: Mapping[Rows, int],
        n_cells: int,
        independent: bool,
        streamed: Collection[str] = (),
    ) -> CpuPartProgram:
        """Lower the turns one after the other."""
        low = Lowering(rows, self.backend.n_threads, n_cells, independent)
        spans: list[tuple[int, int]] = []
        for turn in turns:
            first = len(low.ops)
            RULES.check(turn.nodes)
            for node in turn.nodes:
                low.begin(node)
                RULES.lower(low, node)
            spans.append((first, len(low.ops)))
            for node in (*turn.imports, *turn.exports):
                low.place_outside(node)
        light = [all(node.op.light for node in turn.nodes) for turn in turns]
        return CpuPartProgram(Program(low, None), spans, light)

    def bind(
        self,
        programs: Sequence[CpuPartProgram],
        state: State,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None:
        """Give the programs memory."""
        own = [p.program for p in programs]
        self.backend.reserve(own)
        for program, places in zip(own, handover, strict=True):
            self.backend.bind([program], state, weights, caches, places)

    def begin(self, program: CpuPartProgram, state: State) -> None:
        """A new micro-batch."""
        self._few = state.rows[Rows.TOKENS] <= _LIGHT_TOKENS

    def run(self, program: CpuPartProgram, turn: int, n_threads: int) -> None:
        """Execute one turn."""
        first, stop = program.spans[turn]
        if stop > first:
            self.backend.run_ops(program.program, first, stop, 1 if self._few and program.light[turn] else n_threads)

    def wait(self, program: CpuPartProgram, turn: int) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""

    def values(
        self, program: CpuPartProgram, turn: int, n_threads: int, state: State
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]:
        """Execute a turn node by node; yields every output."""
        begin, end = program.spans[turn]
        for node, first, stop in program.program.node_ops():
            if begin <= first < end:
                self.backend.run_ops(program.program, first, stop, n_threads)
                if program.program.has_output(node):
                    n = state.rows[node.rows.symbol] * node.rows.factor
                    yield node, program.program.view(self.backend.arena, node, n)

    def timed(self, program: CpuPartProgram, turn: int, n_threads: int, state: State, show: bool) -> Iterator[TimedOp]:
        """Execute a turn op by op under a clock."""
        return timed_ops(self.backend, program.program, program.spans[turn], n_threads, state, show)

    def close(self) -> None:
        """Stop the threads and free memory."""
        self.backend.close()
        self.caches.clear()


def cache_bytes(cache: Cache, n_cells: int) -> int:
    """Bytes of a cache tensor in the CPU's layout."""
    row = row_n_bytes(cache.type, n_cells if cache.transposed else cache.cols)
    return row * (cache.cols if cache.transposed else n_cells)


def cells_view(cache: Cache, data: Bytes, n_cells: int, first: int, n: int) -> Bytes:
    """Cells first..first+n-1 inside a cache tensor in the CPU's layout, as a view; see `Part.read_cells`."""
    if cache.transposed:
        size = TYPE_TRAITS[cache.type].type_size
        return data.reshape(cache.cols, -1)[:, first * size : (first + n) * size]
    return data.reshape(n_cells, -1)[first : first + n]


class SessionBackend(Protocol):
    """What a session asks of its devices. Programs are those of `plan`; `graphs` those they were made of."""

    cpu: CpuBackend

    @property
    def gpus(self) -> tuple[str, ...]:
        """Names of the GPUs."""

    @property
    def host_weights(self) -> Mapping[str, int]:
        """Addresses of the weights in RAM."""

    @property
    def host_caches(self) -> Mapping[Cache, Bytes]:
        """Cache tensors in RAM."""

    @property
    def host_buffers(self) -> list[Bytes]:
        """Memory in RAM that nothing has used yet when it is bound."""

    def plan(
        self, graph: Graph, result: Node, n_tokens: int, n_outputs: int, n_cells: int, *, independent: bool = False
    ) -> Any:
        """Lower a graph; nothing is allocated."""

    def prepare(self, programs: Sequence[Any], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels of the CPU, compiling what the cache lacks."""

    def n_missing(self, programs: Sequence[Any]) -> int:
        """Kernels that have to be compiled first."""

    def memory(
        self, programs: Sequence[Any], graphs: Sequence[Graph], model: Model, n_cells: int
    ) -> dict[str, dict[str, int]]:
        """Bytes by device and part: weights, KV, compute."""

    def n_turns(self, programs: Sequence[Any]) -> int:
        """Into how many runs of ops on one device the programs are divided at most."""

    def notes(self, programs: Sequence[Any], model: Model) -> list[str]:
        """What the log says about how programs are computed."""

    def load(self, programs: Sequence[Any], graphs: Sequence[Graph], model: Model, mmap: bool) -> None:
        """Weights on every device."""

    def make_caches(self, programs: Sequence[Any], graphs: Sequence[Graph], n_cells: int) -> None:
        """Cache tensors on every device."""

    def bind(self, programs: Sequence[Any], state: State) -> None:
        """Give the programs memory."""

    def run(self, program: Any, n_threads: int, state: State) -> None:
        """Execute a bound program; it is done on return."""

    def run_observed(self, program: Any, n_threads: int, state: State, observer: Observer) -> None:
        """Execute node by node, showing every output to the observer right after it was computed."""

    def timed(self, program: Any, n_threads: int, state: State, show: bool) -> Iterator[TimedOp]:
        """Execute op by op under a clock; `show`: with the outputs of nodes."""

    def result(self, program: Any, n_rows: int) -> npt.NDArray[np.float32]:
        """The program's value, in memory that the next run writes again."""

    def read_cells(self, cache: Cache, n_cells: int, first: int, n: int) -> Bytes:
        """See `Part.read_cells`."""

    def write_cells(self, cache: Cache, n_cells: int, first: int, rows: Bytes) -> None:
        """See `Part.write_cells`."""

    def close(self) -> None:
        """Stop threads, free memory."""


class CpuOnly:
    """The CPU alone."""

    gpus: tuple[str, ...] = ()

    def __init__(self, backend: CpuBackend) -> None:
        self.cpu = backend
        self._part = CpuPart(backend)
        self.host_weights: Mapping[str, int] = {}
        self._caches: Mapping[Cache, int] = {}

    @property
    def host_buffers(self) -> list[Bytes]:
        """Memory in RAM that nothing has used yet when it is bound."""
        return [*self._part.caches.values(), self.cpu.arena]

    @property
    def host_caches(self) -> Mapping[Cache, Bytes]:
        """Cache tensors in RAM."""
        return self._part.caches

    def plan(
        self, graph: Graph, result: Node, n_tokens: int, n_outputs: int, n_cells: int, *, independent: bool = False
    ) -> Program:
        """Lower a graph; nothing is allocated. See `CpuBackend.plan`."""
        return self.cpu.plan(graph, result, n_tokens, n_outputs, n_cells, independent=independent)

    def prepare(self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels of the programs, compiling what the cache lacks."""
        self.cpu.prepare(programs, progress)

    def n_missing(self, programs: Sequence[Program]) -> int:
        """Kernels that have to be compiled first."""
        return self.cpu.n_missing(programs)

    def memory(
        self, programs: Sequence[Program], graphs: Sequence[Graph], model: Model, n_cells: int
    ) -> dict[str, dict[str, int]]:
        """Bytes by device and part: weights, KV, compute."""
        caches = dict.fromkeys(c for g in graphs for c in g.caches.values())
        names = {name for g in graphs for name in g.weights}
        return {CPU: {"weights": model.n_bytes(names), "KV": sum(cache_bytes(c, n_cells) for c in caches),
                      "compute": self._part.compute_bytes(programs)}}  # fmt: skip

    def n_turns(self, programs: Sequence[Program]) -> int:
        """One."""
        return 1

    def notes(self, programs: Sequence[Program], model: Model) -> list[str]:
        """Nothing."""
        return []

    def load(self, programs: Sequence[Program], graphs: Sequence[Graph], model: Model, mmap: bool) -> None:
        """Map or read the weights."""
        self.host_weights = model.load({name for g in graphs for name in g.weights}, mmap=mmap)

    def make_caches(self, programs: Sequence[Program], graphs: Sequence[Graph], n_cells: int) -> None:
        """Allocate the cache tensors."""
        self._caches = self._part.make_caches(
            list(dict.fromkeys(c for g in graphs for c in g.caches.values())), n_cells
        )

    def bind(self, programs: Sequence[Program], state: State) -> None:
        """Give the programs memory."""
        self.cpu.bind(programs, state, self.host_weights, self._caches)

    def run(self, program: Program, n_threads: int, state: State) -> None:
        """Execute a bound program."""
        self.cpu.run(program, n_threads)

    def run_observed(self, program: Program, n_threads: int, state: State, observer: Observer) -> None:
        """Execute node by node, showing every output to the observer right after it was computed."""
        self.cpu.run_observed(program, n_threads, state, observer)

    def timed(self, program: Program, n_threads: int, state: State, show: bool) -> Iterator[TimedOp]:
        """Execute op by op under a clock."""
        return timed_ops(self.cpu, program, (0, len(program.ops)), n_threads, state, show)

    def result(self, program: Program, n_rows: int) -> npt.NDArray[np.float32]:
        """The program's value, in work memory that the next run writes again."""
        return program.view(self.cpu.arena, program.result, n_rows)

    def read_cells(self, cache: Cache, n_cells: int, first: int, n: int) -> Bytes:
        """See `Part.read_cells`."""
        return self._part.read_cells(cache, n_cells, first, n)

    def write_cells(self, cache: Cache, n_cells: int, first: int, rows: Bytes) -> None:
        """See `Part.write_cells`."""
        self._part.write_cells(cache, n_cells, first, rows)

    def close(self) -> None:
        """Stop the threads and free memory."""
        self.cpu.close()
        self._part.caches.clear()
