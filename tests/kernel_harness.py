"""Runs a hand-made graph on the CPU backend: leaf values in, node values out.

    run = Harness(max_tokens=8, n_cells=64)
    x = run.input("x", 32)                       # a leaf: float32 rows of 32 columns, one per token
    y = run.graph.rms_norm(...)
    run.compile(y, n_threads=2)
    out = run([Segment(0, 3, 0, 0)], {x: array})
Temporary memory is poisoned with NaN before every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from leaves import Leaf, leaf

from ikcli.backends.cpu.cell_places import WINDOW_CELLS, WINDOWS
from ikcli.backends.cpu.kernels.state_rows import SEQS
from ikcli.backends.cpu.params import Address, Params
from ikcli.backends.cpu.program import CpuLowering, CpuProgram, lower
from ikcli.backends.cpu.threads import Team
from ikcli.backends.memory import aligned_zeros
from ikcli.backends.rules import Rules
from ikcli.gguf.types import row_n_bytes
from ikcli.graph import Cache, Graph, Node, Per, Rows
from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import KernelLibrary

LIBRARY = KernelLibrary()
_TEAMS: dict[int, Team] = {}


def team(size: int) -> Team:
    """A team of this size, kept for the whole test run."""
    if size not in _TEAMS:
        _TEAMS[size] = Team(LIBRARY, size)
    return _TEAMS[size]


class InputParams(Params):
    """What a leaf names: its value."""

    out: Address


@dataclass(frozen=True, slots=True)
class Segment:
    """n_tokens of one sequence: cells from `cell`, `pos` positions cached before; position 0 is at `window_cell` in
    caches of windows, states are in row `seq`."""

    n_tokens: int
    cell: int = 0
    pos: int = 0
    window_cell: int = 0
    seq: int = 0

    def cell_in(self, cache: Cache) -> int:
        """The cell of position 0, below zero where the first positions are gone."""
        return self.window_cell if cache.per is Per.WINDOW else self.cell


@dataclass
class Harness:
    """One graph, its caches and memory. Leaves come before all other nodes."""

    max_tokens: int
    n_cells: int
    rules: Rules[CpuLowering]
    batch_invariant: bool = False
    n_seq: int = 1
    graph: Graph = field(default_factory=Graph)
    leaves: list[Node] = field(default_factory=list)
    caches: dict[Cache, np.ndarray] = field(default_factory=dict)

    def input(self, name: str, cols: int, rows: Rows = Rows.TOKENS) -> Node:
        """A leaf whose rows are given at run time."""
        node = leaf(self.graph, name, cols, rows)
        self.leaves.append(node)
        return node

    def lower(self, result: Node, n_threads: int) -> None:
        """Choose the kernels, which costs no compilation."""
        max_rows = {Rows.TOKENS: self.max_tokens, Rows.OUTPUTS: self.max_tokens, Rows.KV: self.n_cells}
        low = CpuLowering(max_rows, n_threads, self.n_cells, self.batch_invariant)

        def lower_input(low: CpuLowering, node: Node, op: Leaf) -> None:
            params = InputParams(out=low.out(node))  # alive from here on
            low.emit(KernelKey("executor", "make_noop"), node.rows, params)

        self.program: CpuProgram = lower(self.graph, result, low, self.rules.replaced({Leaf: lower_input}))

    def compile(self, result: Node, n_threads: int, weights: Mapping[str, np.ndarray] | None = None) -> Harness:
        """Lower, load the kernels, bind. `weights` by tensor name."""
        self.lower(result, n_threads)
        LIBRARY.require(self.program.kernels)
        self.n_threads = n_threads
        self.arena = aligned_zeros(self.program.arena_bytes)
        self.state = np.zeros(WINDOWS + 1, dtype=np.int64)
        for cache in self.graph.caches.values():
            n_rows = self.n_seq if cache.per is Per.SEQUENCE else self.n_cells
            rows, cols = (cache.cols, n_rows) if cache.transposed else (n_rows, cache.cols)
            if cache not in self.caches:  # aligned as in a session, or times would be others
                row_bytes = row_n_bytes(cache.type, cols)
                self.caches[cache] = aligned_zeros(rows * row_bytes).reshape(rows, row_bytes)
                self.caches[cache][:] = 0xFF
        self.weights = dict(weights or {})
        self.program.bind(
            LIBRARY,
            self.state.ctypes.data,
            self.arena,
            {name: w.ctypes.data for name, w in self.weights.items()},
            {cache: data.ctypes.data for cache, data in self.caches.items()},
        )
        return self

    def prepare(
        self, segments: Sequence[Segment], values: Mapping[Node, np.ndarray], outputs: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> dict[Rows, int]:  # fmt: skip
        """Fill the state block and the leaves; returns the number of rows per symbol."""
        n_tokens, n_kv = sum(s.n_tokens for s in segments), sum(s.pos + s.n_tokens for s in segments)
        table, cells, pos, kv_cells, window_cells = [], [], [], [], []
        for s in segments:
            table.append([len(cells), s.n_tokens, s.cell, s.pos, len(kv_cells), s.pos + s.n_tokens])
            pos += range(s.pos, s.pos + s.n_tokens)
            cells += range(s.cell + s.pos, s.cell + s.pos + s.n_tokens)
            kv_cells += range(s.cell, s.cell + s.pos + s.n_tokens)
            window_cells += range(s.window_cell + s.pos, s.window_cell + s.pos + s.n_tokens)
        self._arrays = [
            np.array(list(tokens) or [0] * n_tokens, dtype=np.int32), np.array(pos, dtype=np.int32),
            np.array(cells, dtype=np.int64), np.array(outputs, dtype=np.int64), np.array(table, dtype=np.int64),
            np.array(kv_cells, dtype=np.int64), np.array(window_cells, dtype=np.int64),
            np.array([s.window_cell for s in segments], dtype=np.int64),
            np.array([s.seq for s in segments], dtype=np.int64),
        ]  # fmt: skip
        self.state[:4] = n_tokens, len(outputs), n_kv, len(segments)
        self.state[4:10] = [a.ctypes.data for a in self._arrays[:6]]
        self.state[[WINDOW_CELLS, WINDOWS, SEQS]] = [a.ctypes.data for a in self._arrays[6:]]
        self.arena[:] = 0xFF
        n_rows = {Rows.TOKENS: n_tokens, Rows.OUTPUTS: len(outputs), Rows.KV: n_kv}
        for node, x in values.items():
            self.program.view(self.arena, node, n_rows[node.rows.symbol])[:] = x
        return n_rows

    def execute(self) -> None:
        """Run what `prepare` set up."""
        assert team(self.n_threads).run(self.program.address, len(self.program.ops), self.n_threads) == 0

    def __call__(
        self, segments: Sequence[Segment], values: Mapping[Node, np.ndarray], outputs: Sequence[int] = (),
        tokens: Sequence[int] = (),
    ) -> np.ndarray:  # fmt: skip
        """The result's rows."""
        n_rows = self.prepare(segments, values, outputs, tokens)
        self.execute()
        result = self.program.result
        return self.program.view(self.arena, result, n_rows[result.rows.symbol] * result.rows.factor).copy()
