"""Build programs: a graph lowered to kernel calls over one arena.

Lowering turns every node into one or more `KernelCall`s. Their parameter words may be `Ref`s: places in a buffer, a
weight or a cache tensor that get an address only when the program is bound to memory. Between lowering and binding,
everything that a memory report needs is known, and nothing has been allocated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ikcli.backends.cpu.call_records import CallRecords
from ikcli.backends.cpu.params import Params, Word
from ikcli.backends.lowering import Buffers, Ref, buffer_index
from ikcli.backends.memory import aligned_zeros
from ikcli.backends.rules import Rules
from ikcli.backends.step_block import STATE_INDEX
from ikcli.graph import Cache, Graph, Node, RowSpec, Weight
from ikcli.native.kernel_cache import KernelKey
from ikcli.native.kernel_library import KernelLibrary

BATCH_INVARIANT_ROWS = 8  # most rows for which a program can be batch-invariant
TABLE = "|experts"  # behind the name of a weight: the table of the addresses of its matrices, one per expert
NODE, N_NODES = "|node", "|nodes"  # names of numbers: the node of a thread, and over how many nodes experts are spread
MOST_NODES = 8  # over which they can be: each has a counter of work items
ENTRY_WORDS = 4  # of the table that kernels/executor.py walks


@dataclass(slots=True)
class KernelCall:
    """One kernel call; `node` is the recorded node it belongs to.

    `row_bytes`: the bytes that a row moves, if they are so few that one thread should take several rows; 0 = always
    divide.
    """

    kernel: KernelKey
    words: list[Word]
    node: Node
    row_bytes: int = 0


@dataclass(slots=True)
class CpuLowering(Buffers):
    """The target of lowering functions."""

    n_threads: int
    n_cells: int  # cells of the KV cache over all sequences
    batch_invariant: bool = False  # see CpuDevice.plan
    ops: list[KernelCall] = field(default_factory=list)
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    outside: dict[int, Node] = field(default_factory=dict)  # buffers that are not part of the arena
    tables: dict[str, tuple[int, int]] = field(default_factory=dict)  # of experts, by weight: experts, bytes of one

    def buffer(self, n_bytes: int) -> Ref:
        """Return temporary memory, alive from the first to the last op that names it."""
        return Ref(self.new_buffer(max(n_bytes, 64)))

    def constant(self, data: bytes) -> Ref:
        """Return read-only data that lives as long as the program."""
        ref = self.buffer(0)
        copy = self.constants[buffer_index(ref)] = aligned_zeros(len(data))
        copy[:] = np.frombuffer(data, dtype=np.uint8)
        return ref

    def place_outside(self, node: Node) -> None:
        """Keep a node's value in memory that is passed to `CpuProgram.bind`: it crosses to or from another device."""
        self.outside[buffer_index(self.out(node))] = node

    def weight(self, w: Weight, row_bytes: int = 0) -> Ref:
        """Return the weight's data, at its first row."""
        return Ref(w.name, w.row0 * row_bytes)

    def experts(self, w: Weight, n_bytes: int) -> Ref:
        """Return the table of the addresses (int64) of the matrices of n_bytes that experts have."""
        self.tables[w.name] = w.ne2, n_bytes
        return Ref(w.name + TABLE)

    def emit(self, kernel: KernelKey, rows: RowSpec, params: Params, row_bytes: int = 0) -> None:
        """Append a kernel call. `row_bytes`: see KernelCall."""
        assert self._current is not None
        words = [STATE_INDEX[rows.symbol], rows.factor, *params.words]  # behind the address of the state block
        self.ops.append(KernelCall(kernel, words, self._current, row_bytes))


class CpuProgram:
    """A lowered graph, later bound to memory and kernels."""

    def __init__(self, lowering: CpuLowering, results: Sequence[Node]) -> None:
        """Take over a lowering; `results` are read after the last op."""
        self.ops = lowering.ops
        self._results = results
        self._lowering = lowering
        self._offsets, self.arena_bytes = self._plan()
        self._records: CallRecords | None = None
        self._table: np.ndarray | None = None
        self._outside: dict[int, np.ndarray] = {}
        self._tables: list[np.ndarray] = []
        self.address = 0

    @property
    def result(self) -> Node:
        """Return the node whose value is the program's."""
        return self._results[0]

    @property
    def kernels(self) -> list[KernelKey]:
        """Return every kernel that the program calls."""
        return list(dict.fromkeys(op.kernel for op in self.ops))

    def _plan(self) -> tuple[list[int], int]:
        low, end = self._lowering, len(self.ops)
        kept = {low._node_buffers[node]: (end, end) for node in self._results}
        return low.place([op.words for op in self.ops], kept, low.constants.keys() | low.outside.keys())

    def bind(
        self,
        library: KernelLibrary,
        state_address: int,
        arena: np.ndarray,
        weight_address: Mapping[str, int],
        cache_address: Mapping[Cache, int],
        outside: Mapping[Node, np.ndarray] | None = None,
        mirrors: Sequence[Mapping[str, int]] = (),
        expert_nodes: int = 1,
    ) -> None:
        """Resolve every word to an address; `arena` must hold `arena_bytes` and may be shared between programs.

        `outside`: memory of the values that are not in the arena, uint8. Weights of experts lie one after the other,
        unless `weight_address` has a table of theirs (the name with `TABLE` behind it), which may change between runs.
        `mirrors`: addresses of the same weights for threads of the second node, the third, ... `expert_nodes`: over how
        many nodes the experts of a weight are spread (`numa.expert_parts`); threads take those of their node first.
        """
        self._outside = {b: outside[node] for b, node in self._lowering.outside.items()} if outside else {}
        self._tables = []
        mirrors = mirrors or [weight_address] * (expert_nodes - 1)
        places = [
            self._with_tables(addresses) | {NODE: node if expert_nodes > 1 else 0, N_NODES: expert_nodes}
            for node, addresses in enumerate((weight_address, *mirrors))
        ]
        base = arena.ctypes.data
        most = max((len(op.words) + 1 for op in self.ops), default=1)
        records = CallRecords(len(self.ops), 8 * most, len(places))
        table = aligned_zeros(8 * ENTRY_WORDS * len(self.ops)).view(np.int64).reshape(len(self.ops), ENTRY_WORDS)
        for i, op in enumerate(self.ops):
            for copy, weights in enumerate(places):
                words = records.words(i, copy)
                words[0] = state_address
                words[1 : 1 + len(op.words)] = [self._resolve(w, base, weights, cache_address) for w in op.words]
            table[i] = library[op.kernel], records.address(i), op.row_bytes, records.distance
        self._records, self._table = records, table
        self.address = table.ctypes.data

    def _with_tables(self, addresses: Mapping[str, int]) -> dict[str, int]:
        """Return the addresses of weights and of the tables of their experts."""
        found = dict(addresses)
        for name, (n, n_bytes) in self._lowering.tables.items():
            if name + TABLE not in addresses:
                self._tables.append(addresses[name] + n_bytes * np.arange(n, dtype=np.int64))
                found[name + TABLE] = self._tables[-1].ctypes.data
        return found

    def _resolve(self, w: Word, base: int, weights: Mapping[str, int], caches: Mapping[Cache, int]) -> int:
        if not isinstance(w, Ref):
            return w
        if isinstance(w.target, int):
            place = self._lowering.constants.get(w.target)
            if place is None:
                place = self._outside.get(w.target)
            start = base + self._offsets[w.target] if place is None else place.ctypes.data
            return start + w.offset
        if isinstance(w.target, str):
            return weights[w.target] + w.offset
        return caches[w.target] + w.offset

    def view(self, arena: np.ndarray, node: Node, n_rows: int) -> np.ndarray:
        """Return the node's output as (n_rows, cols) float32 (or int32); valid right after its last op has run."""
        memory, at = self._place(arena, node)
        data = memory[at : at + 4 * n_rows * node.cols]
        return data.view(np.float32 if node.dtype == "f32" else np.int32).reshape(n_rows, node.cols)

    def raw(self, arena: np.ndarray, node: Node, at: int, n: int) -> np.ndarray:
        """Return n int64 words from byte `at` of the node's output on."""
        memory, start = self._place(arena, node)
        return memory[start + at : start + at + 8 * n].view(np.int64)

    def _place(self, arena: np.ndarray, node: Node) -> tuple[np.ndarray, int]:
        """Return (memory, first byte) of a node's output."""
        buffer = self._lowering._node_buffers[node]
        outside = self._outside.get(buffer)
        return (arena, self._offsets[buffer]) if outside is None else (outside, 0)

    def node_ops(self) -> list[tuple[Node, int, int]]:
        """Return (node, first op, one past its last op) in execution order, without nodes that have no ops."""
        spans: list[tuple[Node, int, int]] = []
        for i, op in enumerate(self.ops):
            if spans and spans[-1][0] is op.node:
                spans[-1] = (op.node, spans[-1][1], i + 1)
            else:
                spans.append((op.node, i, i + 1))
        return spans

    def first_use(self, names: Collection[str]) -> int:
        """Return the index of the first op that names one of these weights; the number of ops if none does."""
        names = {*names, *(name + TABLE for name in names)}
        found = (i for i, op in enumerate(self.ops) for w in op.words if isinstance(w, Ref) and w.target in names)
        return next(found, len(self.ops))

    def carried(self, cuts: Sequence[int]) -> list[list[tuple[int, int]] | None]:
        """Return for each cut the places in the arena (first byte, bytes) that later ops read and earlier ops wrote.

        None where both sides use the same cache tensor, whose content is not in the arena.
        """
        first: dict[int | Cache, int] = {}
        last: dict[int | Cache, int] = {}
        for i, op in enumerate(self.ops):
            for w in op.words:
                if isinstance(w, Ref) and not isinstance(w.target, str):
                    first.setdefault(w.target, i)
                    last[w.target] = i
        elsewhere = self._lowering.constants.keys() | self._lowering.outside.keys()
        out: list[list[tuple[int, int]] | None] = []
        for cut in cuts:
            crossing = [t for t, i in first.items() if i < cut <= last[t]]
            if any(isinstance(t, Cache) for t in crossing):
                out.append(None)
                continue
            inside = [t for t in crossing if isinstance(t, int) and t not in elsewhere]
            out.append([(self._offsets[t], self._lowering.sizes[t]) for t in inside])
        return out

    def has_output(self, node: Node) -> bool:
        """Return whether the node has a separate buffer."""
        return node in self._lowering._node_buffers and node.cols > 0


def lower(
    graph: Graph,
    result: Node,
    lowering: CpuLowering,
    rules: Rules[CpuLowering],
) -> CpuProgram:
    """Lower every node by its op's rule."""
    rules.check(graph.nodes)
    for node in graph.nodes:
        lowering.begin(node)
        rules.lower(lowering, node)
    return CpuProgram(lowering, [result])
