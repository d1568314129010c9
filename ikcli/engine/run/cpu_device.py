"""The CPU as a device: lowers the turns that fall to it into one program, and executes them one by one.

One arena serves all programs of a session, which never run at the same time. What the CPU gets from other devices and
what it gives lies in hand-over memory itself, so nothing is copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.program import ENTRY_WORDS, CpuLowering, CpuProgram
from ikcli.backends.cpu.threads import LAUNCH, WORKER, Team
from ikcli.backends.memory import aligned_zeros
from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.model import Model
from ikcli.engine.run.run_device import CPU, Bytes, cache_bytes, cells_view
from ikcli.engine.run.timed_ops import TimedOp, work_of
from ikcli.errors import IkError
from ikcli.gguf.types import TYPES
from ikcli.graph import Cache, Node, Rows
from ikcli.graph.ops_experts import sort_of
from ikcli.graph.split import Turn
from ikcli.native.kernel_cache import KernelKey, is_cached
from ikcli.native.kernel_library import shared_library

_LIGHT_TOKENS = 8


@dataclass(slots=True)
class CpuTurns:
    """A CPU program, the ops of each of its turns, and which turns are light."""

    program: CpuProgram
    spans: list[tuple[int, int]]
    light: list[bool]

    @property
    def arena_bytes(self) -> int:
        return self.program.arena_bytes


class CpuDevice:
    """See the module. `cpus`: where each thread may run; to be set before the first step."""

    name = CPU
    asynchronous = False
    in_place = True

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self.cpus: Sequence[frozenset[int]] | None = None
        self._library = shared_library()
        self._team: Team | None = None
        self._few = True
        self.arena: Bytes = aligned_zeros(0)
        self.caches: dict[Cache, Bytes] = {}
        self._results: dict[tuple[CpuProgram, Node, int], npt.NDArray[np.float32]] = {}  # views of the arena, by rows

    # --- planning -----------------------------------------------------------------------------------------------------
    def plan(
        self,
        turns: Sequence[Turn],
        rows: Mapping[Rows, int],
        n_cells: int,
        independent: bool,
        streamed: Collection[str] = (),
        window_cells: int = 0,
        result: Node | None = None,
    ) -> CpuTurns:
        """Lower the turns one after the other; nothing is allocated. `result`: a value that stays in work memory.

        `independent`: for generation; up to INDEPENDENT_ROWS tokens, results of a token are bit for bit the same
        whatever else is in the micro-batch.
        """
        del streamed, window_cells  # nothing is copied; rows in RAM are found by their bytes alone
        low = CpuLowering(rows, self.n_threads, n_cells, independent)
        spans: list[tuple[int, int]] = []
        for turn in turns:
            first = len(low.ops)
            RULES.check(turn.nodes)
            for node in turn.nodes:
                low.begin(node)
                RULES.lower(low, node)
            spans.append((first, len(low.ops)))
            for node in (*turn.imports, *turn.exports):
                if node is not result:
                    low.place_outside(node)
        light = [all(node.op.light for node in turn.nodes) for turn in turns]
        return CpuTurns(CpuProgram(low, result), spans, light)

    def compute_bytes(self, programs: Sequence[CpuTurns]) -> int:
        """The arena, which programs share."""
        return max((p.arena_bytes for p in programs), default=0)

    def prepare(self, programs: Sequence[CpuTurns], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels of the programs, compiling what the cache lacks."""
        self._library.require(_kernels(programs), progress)

    def n_missing(self, programs: Sequence[CpuTurns]) -> int:
        """Kernels that have to be compiled first."""
        return sum(not is_cached(k) for k in _kernels(programs))

    # --- memory -------------------------------------------------------------------------------------------------------
    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """The system grants memory lazily: nothing to check."""

    def load_weights(self, model: Model, names: Sequence[str], mmap: bool) -> Mapping[str, int]:
        """Map or read the weights."""
        return model.load(names, mmap=mmap)

    def update_weights(self, model: Model, names: Sequence[str]) -> None:
        """They are used where they are."""

    def weight_bytes(self, model: Model, names: Sequence[str]) -> int:
        """Their bytes, as used."""
        return model.n_bytes(names)

    def cache_bytes(self, cache: Cache, n_rows: int) -> int:
        """Bytes of a cache tensor."""
        return cache_bytes(cache, n_rows)

    def make_caches(self, rows: Mapping[Cache, int]) -> Mapping[Cache, int]:
        """Zeroed cache tensors in RAM."""
        self.caches = {c: aligned_zeros(cache_bytes(c, n)) for c, n in rows.items()}
        return {c: int(a.ctypes.data) for c, a in self.caches.items()}

    def read_cells(self, cache: Cache, n_rows: int, first: int, n: int) -> Bytes:
        """The cells themselves."""
        return cells_view(cache, self.caches[cache], n_rows, first, n)

    def write_cells(self, cache: Cache, n_rows: int, first: int, rows: Bytes) -> None:
        """Replace cells."""
        n = rows.shape[1] // TYPES[cache.type].type_size if cache.transposed else len(rows)
        self.read_cells(cache, n_rows, first, n)[:] = rows

    def bind(
        self,
        programs: Sequence[CpuTurns],
        state: StepBlock,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None:
        """Give the programs memory and addresses; `handover`: memory of values that other devices make or read."""
        n_bytes = self.compute_bytes(programs)
        if len(self.arena) < n_bytes:
            self.arena = aligned_zeros(n_bytes)
        self._results.clear()
        for p, places in zip(programs, handover, strict=True):
            p.program.bind(self._library, state.address, self.arena, weights, caches, places)

    # --- running ------------------------------------------------------------------------------------------------------
    def begin(self, program: CpuTurns, state: StepBlock) -> None:
        """A new micro-batch."""
        self._few = state.rows[Rows.TOKENS] <= _LIGHT_TOKENS

    def run(self, program: CpuTurns, turn: int, n_threads: int) -> None:
        """Execute one turn."""
        first, stop = program.spans[turn]
        if stop > first:
            self.run_ops(program.program, first, stop, 1 if self._few and program.light[turn] else n_threads)

    def run_ops(self, program: CpuProgram, first: int, stop: int, n_threads: int) -> None:
        """Execute a part of a bound program."""
        if self._team is None:
            self._team = Team(self._library, self.n_threads, self.cpus)
        failed = self._team.run(program.address + 8 * ENTRY_WORDS * first, stop - first, n_threads)
        if failed:
            op = program.ops[first + failed - 1]
            raise IkError(f"internal error: kernel {op.kernel.text} failed in node {op.node.name}")

    def wait(self, program: CpuTurns, turn: int) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""

    def result(self, program: CpuTurns, node: Node, n_rows: int) -> npt.NDArray[np.float32]:
        """The value that was planned to stay, in work memory that the next step writes again."""
        key = program.program, node, n_rows
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = program.program.view(self.arena, node, n_rows)
        return found

    def values(
        self, program: CpuTurns, turn: int, n_threads: int, state: StepBlock
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]:
        """Execute a turn node by node; yields every output."""
        for node, first, stop in self._spans(program, turn):
            self.run_ops(program.program, first, stop, n_threads)
            if program.program.has_output(node):
                yield node, self._value(program.program, node, state)

    def timed(self, program: CpuTurns, turn: int, n_threads: int, state: StepBlock, show: bool) -> Iterator[TimedOp]:
        """Execute a turn op by op under a clock."""
        inner = program.program
        for node, first, stop in self._spans(program, turn):
            for i in range(first, stop):
                begin = time.perf_counter()
                self.run_ops(inner, i, i + 1, n_threads)
                seconds = time.perf_counter() - begin
                kernel = inner.ops[i].kernel
                n_bytes, n_ops = 0, 0
                if kernel.module in ("matmul", "embed"):
                    n_bytes, n_ops = work_of(node, state, lambda plan: self._expert_rows(inner, plan))
                shown = show and i == stop - 1 and inner.has_output(node)
                value = self._value(inner, node, state) if shown else None
                yield TimedOp(node, kernel.text, seconds, n_bytes, n_ops, value)

    @staticmethod
    def _spans(program: CpuTurns, turn: int) -> Iterator[tuple[Node, int, int]]:
        begin, end = program.spans[turn]
        return (span for span in program.program.node_ops() if begin <= span[1] < end)

    def _value(self, program: CpuProgram, node: Node, state: StepBlock) -> npt.NDArray[np.generic]:
        return program.view(self.arena, node, state.rows[node.rows.symbol] * node.rows.factor)

    def _expert_rows(self, program: CpuProgram, plan: Node) -> tuple[int, int]:
        """Experts that were chosen, and rows they got."""
        ends = program.raw(self.arena, plan, 8, sort_of(plan).n_expert + 1)
        return int((np.diff(ends) > 0).sum()), int(ends[-1])

    def close(self) -> None:
        """Stop the threads and free memory."""
        if self._team is not None:
            self._team.close()
            self._team = None
        self.arena = aligned_zeros(0)
        self._results.clear()
        self.caches.clear()


def _kernels(programs: Sequence[CpuTurns]) -> list[KernelKey]:
    return list(dict.fromkeys([LAUNCH, WORKER, *(k for p in programs for k in p.program.kernels)]))
