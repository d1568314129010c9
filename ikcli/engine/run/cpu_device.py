"""The CPU as a device: lower its splits into one program, and execute them one by one.

One arena serves all programs of a session, which never run at the same time. The CPU reads values of other devices in
hand-over memory and writes its own there, so nothing is copied.
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
from ikcli.engine.experts.steps import ExpertSteps
from ikcli.engine.run.expert_nodes import ExpertNodes
from ikcli.engine.run.mirror import Mirror
from ikcli.engine.run.run_device import CPU, Bytes, WeightSource, cache_bytes, cells_view
from ikcli.engine.run.timed_ops import TimedOp, kind_of, work_of
from ikcli.errors import IkError
from ikcli.gguf.types import TYPES
from ikcli.graph import Cache, Node, Rows
from ikcli.graph.ops_experts import sort_of
from ikcli.graph.split import GraphSplit
from ikcli.native.kernel_cache import KernelKey, is_cached
from ikcli.native.kernel_library import shared_library

_LIGHT_TOKENS = 8


@dataclass(slots=True)
class CpuSplits:
    """A CPU program, the ops of each of its splits, and which splits are light."""

    program: CpuProgram
    spans: list[tuple[int, int]]
    light: list[bool]

    @property
    def arena_bytes(self) -> int:
        return self.program.arena_bytes


class CpuDevice:
    """Run splits on the CPU; see the module.

    `cpus`: where each thread may run; set it before the first step. `mirror`: copies of the weights on other nodes, set
    before weights are loaded. `expert_nodes`: the nodes of experts that are spread. `experts`: those that live on disk.
    """

    name = CPU
    asynchronous = False
    in_place = True

    def __init__(self, n_threads: int, experts: ExpertSteps | None = None) -> None:
        self.n_threads, self.experts = n_threads, experts
        self.cpus: Sequence[frozenset[int]] | None = None
        self.mirror = Mirror()
        self.expert_nodes = ExpertNodes()
        self._library = shared_library()
        self._team: Team | None = None
        self._few = True
        self.arena: Bytes = aligned_zeros(0)
        self.caches: dict[Cache, Bytes] = {}
        self._results: dict[tuple[CpuProgram, Node, int], npt.NDArray[np.float32]] = {}  # views of the arena, by rows

    # --- planning -----------------------------------------------------------------------------------------------------
    def plan(
        self,
        splits: Sequence[GraphSplit],
        rows: Mapping[Rows, int],
        n_cells: int,
        batch_invariant: bool,
        streamed: Collection[str] = (),
        window_cells: int = 0,
        result: Node | None = None,
        states: Node | None = None,
    ) -> CpuSplits:
        """Lower the splits one after the other; nothing is allocated.

        `result`, `states`: values that stay in work memory. `batch_invariant`: for generation. Up to
        BATCH_INVARIANT_ROWS tokens, the results of a token are the same bits whatever else is in the micro-batch.
        """
        del streamed, window_cells  # nothing is copied; rows in RAM are found by their bytes alone
        low = CpuLowering(rows, self.n_threads, n_cells, batch_invariant)
        kept = [node for node in (result, states) if node is not None]
        spans: list[tuple[int, int]] = []
        for split in splits:
            first = len(low.ops)
            RULES.check(split.nodes)
            for node in split.nodes:
                low.begin(node)
                RULES.lower(low, node)
            spans.append((first, len(low.ops)))
            for node in (*split.imports, *split.exports):
                if node not in kept:
                    low.place_outside(node)
        light = [all(node.op.light for node in split.nodes) for split in splits]
        return CpuSplits(CpuProgram(low, kept), spans, light)

    def compute_bytes(self, programs: Sequence[CpuSplits]) -> int:
        """Return the size of the arena, which programs share."""
        return max((p.arena_bytes for p in programs), default=0)

    def prepare(self, programs: Sequence[CpuSplits], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels of the programs, compiling those that the cache lacks."""
        self._library.require(_kernels(programs), progress)

    def n_missing(self, programs: Sequence[CpuSplits]) -> int:
        """Return the number of kernels that have to be compiled first."""
        return sum(not is_cached(k) for k in _kernels(programs))

    # --- memory -------------------------------------------------------------------------------------------------------
    def check_memory(self, sizes: Mapping[str, int]) -> None:
        """Do nothing: the system grants memory lazily. Several copies of the weights must fit."""
        self.mirror.check_room(sizes["weights"])

    def load_weights(self, model: WeightSource, names: Sequence[str], mmap: bool) -> Mapping[str, int]:
        """Map or read the weights and return their addresses."""
        if self.experts is None:
            return model.load(names, mmap=mmap)
        on_disk = self.experts.slots.on_disk
        mapped = model.load([n for n in names if n in on_disk], mmap=True)  # steps do not read them there
        self.experts.load()
        return mapped | model.load([n for n in names if n not in on_disk], mmap=mmap)

    def update_weights(self, model: WeightSource, names: Sequence[str]) -> None:
        """Update the copies of other nodes; the weights themselves are used where they are."""
        self.mirror.update(names)

    def weight_bytes(self, model: WeightSource, names: Sequence[str]) -> int:
        """Return the bytes of these weights in RAM, as used."""
        if self.experts is None:
            return model.n_bytes(names) * self.mirror.n_copies
        on_disk = self.experts.slots.on_disk
        return model.n_bytes(n for n in names if n not in on_disk) + self.experts.slots.n_bytes

    def cache_bytes(self, cache: Cache, n_rows: int) -> int:
        """Return the bytes of a cache tensor."""
        return cache_bytes(cache, n_rows)

    def make_caches(self, rows: Mapping[Cache, int]) -> Mapping[Cache, int]:
        """Make zeroed cache tensors in RAM and return their addresses."""
        self.caches = {c: aligned_zeros(cache_bytes(c, n)) for c, n in rows.items()}
        return {c: int(a.ctypes.data) for c, a in self.caches.items()}

    def read_cells(self, cache: Cache, n_rows: int, first: int, n: int) -> Bytes:
        """Return the cells themselves, as a view."""
        return cells_view(cache, self.caches[cache], n_rows, first, n)

    def write_cells(self, cache: Cache, n_rows: int, first: int, rows: Bytes) -> None:
        """Replace cells."""
        n = rows.shape[1] // TYPES[cache.type].type_size if cache.transposed else len(rows)
        self.read_cells(cache, n_rows, first, n)[:] = rows

    def bind(
        self,
        programs: Sequence[CpuSplits],
        state: StepBlock,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        handover: Sequence[Mapping[Node, Bytes]],
    ) -> None:
        """Give the programs memory and addresses.

        `handover`: memory of values that other devices make or read.
        """
        n_bytes = self.compute_bytes(programs)
        if len(self.arena) < n_bytes:
            self.arena = aligned_zeros(n_bytes)
        self._results.clear()
        if self.experts is not None:
            weights = {**weights, **self.experts.addresses}
            self.experts.bound()
        mirrors = self.mirror.addresses()
        for p, places in zip(programs, handover, strict=True):
            p.program.bind(self._library, state.address, self.arena, weights, caches, places, mirrors,
                           self.expert_nodes.n_nodes)  # fmt: skip

    # --- running ------------------------------------------------------------------------------------------------------
    def begin(self, program: CpuSplits, state: StepBlock) -> None:
        """Begin a micro-batch."""
        self._few = state.rows[Rows.TOKENS] <= _LIGHT_TOKENS

    def run(self, program: CpuSplits, split: int, n_threads: int) -> None:
        """Execute one split."""
        first, stop = program.spans[split]
        if stop > first:
            self.run_ops(program.program, first, stop, 1 if self._few and program.light[split] else n_threads)

    def run_ops(self, program: CpuProgram, first: int, stop: int, n_threads: int) -> None:
        """Execute a part of a bound program; raise IkError if a kernel fails, or experts cannot be read."""
        if self.experts is None:
            self._run_ops(program, first, stop, n_threads)
        else:
            self.experts.run(program, self.arena, first, stop, lambda a, b: self._run_ops(program, a, b, n_threads))

    def _run_ops(self, program: CpuProgram, first: int, stop: int, n_threads: int) -> None:
        if self._team is None:
            nodes = self.expert_nodes.nodes or self.mirror.nodes
            self._team = Team(self._library, self.n_threads, self.cpus, nodes)
        failed = self._team.run(program.address + 8 * ENTRY_WORDS * first, stop - first, n_threads)
        if failed:
            op = program.ops[first + failed - 1]
            raise IkError(f"internal error: kernel {op.kernel.text} failed in node {op.node.name}")

    def wait(self, program: CpuSplits, split: int) -> None:
        """Do nothing: a split is done when `run` returns."""

    def finish(self) -> None:
        """Do nothing: a split is done when `run` returns."""

    def result(self, program: CpuSplits, node: Node, n_rows: int) -> npt.NDArray[np.float32]:
        """Return the value that was planned to stay, in work memory that the next step overwrites."""
        key = program.program, node, n_rows
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = program.program.view(self.arena, node, n_rows)
        return found

    def values(
        self, program: CpuSplits, split: int, n_threads: int, state: StepBlock
    ) -> Iterator[tuple[Node, npt.NDArray[np.generic]]]:
        """Execute a split node by node and yield every output."""
        for node, first, stop in self._spans(program, split):
            self.run_ops(program.program, first, stop, n_threads)
            if program.program.has_output(node):
                yield node, self._value(program.program, node, state)

    def timed(self, program: CpuSplits, split: int, n_threads: int, state: StepBlock, show: bool) -> Iterator[TimedOp]:
        """Execute a split op by op under a clock."""
        inner = program.program
        for node, first, stop in self._spans(program, split):
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
                yield TimedOp(node, kernel.text, seconds, n_bytes, n_ops, value, kind_of(node))

    @staticmethod
    def _spans(program: CpuSplits, split: int) -> Iterator[tuple[Node, int, int]]:
        begin, end = program.spans[split]
        return (span for span in program.program.node_ops() if begin <= span[1] < end)

    def _value(self, program: CpuProgram, node: Node, state: StepBlock) -> npt.NDArray[np.generic]:
        return program.view(self.arena, node, state.rows[node.rows.symbol] * node.rows.factor)

    def _expert_rows(self, program: CpuProgram, plan: Node) -> tuple[int, int]:
        """Return the number of chosen experts and their rows."""
        ends = program.raw(self.arena, plan, 8, sort_of(plan).n_expert + 1)
        return int((np.diff(ends) > 0).sum()), int(ends[-1])

    def close(self) -> None:
        """Stop the threads and free memory."""
        if self._team is not None:
            self._team.close()
            self._team = None
        if self.experts is not None:
            self.experts.close()
        self.arena, self.mirror = aligned_zeros(0), Mirror()
        self._results.clear()
        self.caches.clear()


def _kernels(programs: Sequence[CpuSplits]) -> list[KernelKey]:
    return list(dict.fromkeys([LAUNCH, WORKER, *(k for p in programs for k in p.program.kernels)]))
