"""The CPU backend: plans programs, gets their kernels, gives them memory, runs them.

One arena serves all programs of a session, which never run at the same time. `State` is the block that changes from
micro-batch to micro-batch (kernels/common.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add
from struct import Struct

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.lower import RULES, max_rows
from ikcli.backends.cpu.program import ENTRY_WORDS, Lowering, Program, lower
from ikcli.backends.cpu.threads import LAUNCH, WORKER, Team, aligned_zeros
from ikcli.errors import IkError
from ikcli.graph import Cache, Graph, Node, Rows
from ikcli.native.kernel_cache import KernelKey, is_cached, shared_library

Observer = Callable[[Node, npt.NDArray[np.generic]], None]
SEG_WORDS = 6


_pack_counts: Callable[..., None] = Struct("4q").pack_into


@cache
def _packers(n: int) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """Writers of n int32, n int64 and n segments: a few numbers are stored faster than by NumPy."""
    return Struct(f"{n}i").pack_into, Struct(f"{n}q").pack_into, Struct(f"{SEG_WORDS * n}q").pack_into


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one sequence in a micro-batch: tokens start..start+n_tokens-1 at positions pos.. of the sequence.

    The sequence's cells start at `cell`; after the micro-batch it has n_kv = pos + n_tokens cached positions.
    """

    start: int
    n_tokens: int
    cell: int
    pos: int

    @property
    def n_kv(self) -> int:
        return self.pos + self.n_tokens


class State:
    """Run-time inputs of a program, at fixed addresses."""

    def __init__(self, n_tokens: int, n_cells: int) -> None:
        self._words = aligned_zeros(8 * 16).view(np.int64)
        self._tokens = np.zeros(n_tokens, np.int32)
        self._pos = np.zeros(n_tokens, np.int32)
        self._cells = np.zeros(n_tokens, np.int64)
        self._out_ids = np.zeros(n_tokens, np.int64)
        self._segments = np.zeros((n_tokens, SEG_WORDS), np.int64)
        self._kv_cells = np.zeros(n_cells, np.int64)
        self._count = np.arange(n_cells)
        arrays = (self._tokens, self._pos, self._cells, self._out_ids, self._segments, self._kv_cells)
        self._words[4:10] = [a.ctypes.data for a in arrays]
        self.address: int = self._words.ctypes.data
        self.rows: dict[Rows, int] = {}
        self.n_segments = 0

    def set(
        self,
        tokens: npt.NDArray[np.int32],
        pos: npt.NDArray[np.int32],
        out_ids: npt.NDArray[np.int64],
        segments: Sequence[Segment],
    ) -> None:
        """Describe a micro-batch."""
        n, n_kv = len(tokens), 0
        self._tokens[:n], self._pos[:n] = tokens, pos
        self._out_ids[: len(out_ids)] = out_ids
        for i, s in enumerate(segments):
            self._cells[s.start : s.start + s.n_tokens] = self._count[s.cell + s.pos : s.cell + s.n_kv]
            self._segments[i] = s.start, s.n_tokens, s.cell, s.pos, n_kv, s.n_kv
            self._kv_cells[n_kv : n_kv + s.n_kv] = self._count[s.cell : s.cell + s.n_kv]
            n_kv += s.n_kv
        self._words[:4] = n, len(out_ids), n_kv, len(segments)
        self.n_segments = len(segments)
        self.rows = {Rows.TOKENS: n, Rows.OUTPUTS: len(out_ids), Rows.KV: n_kv}

    def set_step(self, tokens: Sequence[int], pos: Sequence[int], cells: Sequence[int], n_outputs: int) -> None:
        """Describe a micro-batch of one token each of sequences whose cells start at `cells`.

        For programs for generation: those never read the cache as compact rows, so `kv_cells` stays as it is.
        """
        n, n_kv = len(tokens), 0
        words: list[int] = []
        for i, (cell, p) in enumerate(zip(cells, pos, strict=True)):
            words += (i, 1, cell, p, n_kv, p + 1)
            n_kv += p + 1
        ints, longs, segments = _packers(n)
        ints(self._tokens, 0, *tokens)
        ints(self._pos, 0, *pos)
        longs(self._cells, 0, *map(add, cells, pos))
        segments(self._segments, 0, *words)
        self._out_ids[:n_outputs] = self._count[:n_outputs]
        _pack_counts(self._words, 0, n, n_outputs, n_kv, n)
        self.n_segments = n
        self.rows = {Rows.TOKENS: n, Rows.OUTPUTS: n_outputs, Rows.KV: n_kv}

    def arrays(self) -> tuple[npt.NDArray[np.generic], ...]:
        """The words, then what their addresses point to, as far as this micro-batch uses it."""
        n, n_out, n_kv, n_segments = (int(x) for x in self._words[:4])
        return (self._words, self._tokens[:n], self._pos[:n], self._cells[:n], self._out_ids[:n_out],
                self._segments[:n_segments], self._kv_cells[:n_kv])  # fmt: skip


class CpuBackend:
    """Kernels, threads and memory of one session."""

    def __init__(self, n_threads: int, cpus: Sequence[frozenset[int]] | None = None) -> None:
        self.n_threads, self._cpus = n_threads, cpus
        self._library = shared_library()
        self._team: Team | None = None
        self.arena: npt.NDArray[np.uint8] = aligned_zeros(0)

    def plan(
        self, graph: Graph, result: Node, n_tokens: int, n_outputs: int, n_cells: int, *, independent: bool = False
    ) -> Program:
        """Lower a graph for up to this many rows; nothing is allocated.

        `independent`: for generation; up to INDEPENDENT_ROWS tokens, results of a token are bit for bit the same
        whatever else is in the micro-batch.
        """
        lowering = Lowering(max_rows(n_tokens, n_outputs, n_cells), self.n_threads, n_cells, independent)
        return lower(graph, result, lowering, RULES)

    def prepare(self, programs: Sequence[Program], progress: Callable[[int, int], None] | None = None) -> None:
        """Load the kernels of the programs, compiling what the cache lacks."""
        self._library.require(_kernels(programs), progress)

    def n_missing(self, programs: Sequence[Program]) -> int:
        """Kernels that have to be compiled first."""
        return sum(not is_cached(k) for k in _kernels(programs))

    def bind(
        self,
        programs: Sequence[Program],
        state: State,
        weights: Mapping[str, int],
        caches: Mapping[Cache, int],
        outside: Mapping[Node, npt.NDArray[np.uint8]] | None = None,
    ) -> None:
        """Give the programs memory and addresses; `outside`: memory of values that other devices make or read."""
        self.reserve(programs)
        for p in programs:
            p.bind(self._library, state.address, self.arena, weights, caches, outside)

    def reserve(self, programs: Sequence[Program]) -> None:
        """Make the arena large enough; programs bound before have to be bound again."""
        n_bytes = max((p.arena_bytes for p in programs), default=0)
        if len(self.arena) < n_bytes:
            self.arena = aligned_zeros(n_bytes)

    def run(self, program: Program, n_threads: int) -> None:
        """Execute a bound program."""
        self.run_ops(program, 0, len(program.ops), n_threads)

    def run_observed(self, program: Program, n_threads: int, state: State, observer: Observer) -> None:
        """Execute node by node, showing every output to the observer right after it was computed."""
        for node, first, stop in program.node_ops():
            self.run_ops(program, first, stop, n_threads)
            if program.has_output(node):
                n = state.rows[node.rows.symbol] * node.rows.factor
                observer(node, program.view(self.arena, node, n))

    def result(self, program: Program, n_rows: int) -> npt.NDArray[np.float32]:
        """The program's value, in the work memory that the next run writes again."""
        return program.view(self.arena, program.result, n_rows)

    def run_ops(self, program: Program, first: int, stop: int, n_threads: int) -> None:
        """Execute a part of a bound program."""
        if self._team is None:
            self._team = Team(self._library, self.n_threads, self._cpus)
        failed = self._team.run(program.address + 8 * ENTRY_WORDS * first, stop - first, n_threads)
        if failed:
            op = program.ops[first + failed - 1]
            raise IkError(f"internal error: kernel {op.kernel.text} failed in node {op.node.name}")

    def close(self) -> None:
        """Stop the threads and free the arena."""
        if self._team is not None:
            self._team.close()
            self._team = None
        self.arena = aligned_zeros(0)


def _kernels(programs: Sequence[Program]) -> list[KernelKey]:
    return list(dict.fromkeys([LAUNCH, WORKER, *(k for p in programs for k in p.kernels)]))
