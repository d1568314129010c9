"""Runs a hand-made graph on the emulated CUDA device and with the NumPy reference: leaf values in, node values out.

    run = GraphRun({"w": array})
    x = run.input("x", values)                   # a leaf: float32 rows
    y = run.graph.rms_norm(x, run.weight("w"), 1e-6, "y")
    found, wanted = run(y)                        # of both
Programs are planned for more rows than are used, and launched for the bucket of the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_emulation import EmulatedDevice
from leaves import Leaf, RouteLeaf, leaf, route_leaf

from ikcli.backends.cuda.device import Launch
from ikcli.backends.cuda.lower import Counts, DeviceLimits, GpuLowering, GpuProgram, Ref, lower
from ikcli.backends.reference import CacheStore, ReferenceExecutor
from ikcli.backends.rules import Rules
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Graph, Node, Op, Rows, Weight
from ikcli.graph.micro_batch import MicroBatch, Segment

Array = npt.NDArray[Any]
LIMITS = DeviceLimits((9, 0), 132, 232448, 233472, 60 << 20, "emulated")


def n_rows(node: Node, n: int, outputs: Sequence[int]) -> int:
    """Rows of a node for n tokens of one sequence."""
    return (len(outputs) if node.rows.symbol is Rows.OUTPUTS else n) * node.rows.factor


def download(d: EmulatedDevice, stream: Any, program: GpuProgram, node: Node, rows: int) -> Array:
    """Value of a node; there after the next synchronisation."""
    value = np.empty((rows, node.cols), np.float32 if node.dtype == "f32" else np.int32)
    if value.size:
        d.download(stream, value, program.node_address(node))
    return value


def bind(
    d: EmulatedDevice, stream: Any, program: GpuProgram, n: int, outputs: Sequence[int], pos: int,
    weights: Mapping[str, Array],
) -> Counts:  # fmt: skip
    """Give a program memory, weights (as stored) and a step block of n tokens of one sequence; returns their bucket."""

    def upload(data: Array, owner: str) -> int:
        memory = d.alloc(data.nbytes, owner)
        d.upload(stream, memory.address, np.ascontiguousarray(data))
        return memory.address

    arrays = [
        np.zeros(n, np.int32), np.arange(pos, pos + n, dtype=np.int32), np.arange(n), np.array(outputs, np.int64),
        np.array([0, n, 0, pos, 0, n]), np.arange(n),
    ]  # fmt: skip
    words = np.zeros(16, np.int64)
    words[:4] = n, len(outputs), n, 1
    words[4:10] = [upload(a, "step") for a in arrays]
    arena = d.alloc(max(program.arena_bytes, 1), "arena").address
    constants = {b: upload(np.frombuffer(data, np.uint8), "constant") for b, data in program.constants.items()}
    names = {name: upload(w, name) for name, w in weights.items()}
    program.bind(upload(words, "step"), arena, constants, names, {})
    return Counts(n, len(outputs), n, 1, n).bucket(program.lowering.max_rows)


def keep(low: GpuLowering, node: Node, op: Op) -> None:
    """The rule of leaves: they are there from the start."""
    low.keep(node, 0, 0)


class GraphRun:
    """One graph over n rows; weights are float32 arrays in NumPy order."""

    def __init__(
        self, rules: Rules[GpuLowering], weights: Mapping[str, Array] | None = None, *, spare: int = 3
    ) -> None:
        self.rules = rules.replaced(dict.fromkeys((Leaf, RouteLeaf), keep))
        self.weights = dict(weights or {})
        self.graph, self.spare = Graph(), spare
        self.values: dict[Node, Array] = {}
        self.launched: list[Launch] = []
        self.dumped: list[Array] = []

    def input(self, name: str, values: Array, rows: Rows = Rows.TOKENS) -> Node:
        """A leaf with its values."""
        node = leaf(self.graph, name, values.shape[1], rows)
        self.values[node] = values
        return node

    def route(self, values: Array, n_used: int) -> Node:
        """A leaf that chooses experts."""
        node = route_leaf(self.graph, "route", n_used)
        self.values[node] = values
        return node

    def weight(self, name: str) -> Weight:
        """A float32 weight."""
        return Weight(name, GGMLType.F32, self.weights[name].shape[::-1])

    def stored(self, name: str) -> Array:
        """A weight as the device has it."""
        return self.weights[name].astype(np.float32)

    def lowering(self, n_tokens: int, n_outputs: int) -> GpuLowering:
        """Sized for a few rows more than needed."""
        most = {Rows.TOKENS: n_tokens + self.spare, Rows.OUTPUTS: max(n_outputs, 1), Rows.KV: n_tokens + self.spare}
        return GpuLowering(most, n_tokens + self.spare, LIMITS)

    def __call__(
        self, *results: Node, n_tokens: int = -1, outputs: Sequence[int] = (), pos: int = 0, seed: int = 1
    ) -> list[tuple[Array, Array]]:
        """(found, wanted) of every result."""
        found = self.run(*results, n_tokens=n_tokens, outputs=outputs, pos=pos, seed=seed)
        n = n_tokens if n_tokens >= 0 else len(next(iter(self.values.values())))
        return list(zip(found, self.reference(results, n, outputs, pos), strict=True))

    def run(
        self, *results: Node, n_tokens: int = -1, outputs: Sequence[int] = (), pos: int = 0, seed: int = 1,
        extra: Callable[[GpuLowering], Sequence[tuple[Ref, int]]] | None = None,
    ) -> list[Array]:  # fmt: skip
        """Values of the results; `extra` may emit more launches and names bytes that `dumped` will hold."""
        n = n_tokens if n_tokens >= 0 else len(next(iter(self.values.values())))
        low = self.lowering(n, len(outputs))
        program = lower(self.graph.nodes, [*results, *self.values], low, self.rules)
        ranges: Sequence[tuple[Ref, int]] = ()
        if extra is not None:
            ranges = extra(low)
            for ref, _ in ranges:
                assert isinstance(ref.target, int)
                low.pinned[ref.target] = 0, len(low.ops)
            program = GpuProgram(low, [*results, *self.values])
        self.program, self.device = program, EmulatedDevice(seed=seed)
        try:
            found = self._run(program, results, n, outputs, pos)
            self.dumped = [self._bytes(program.address(ref), n_bytes) for ref, n_bytes in ranges]
        finally:
            self.device.close()
        return found

    def _run(
        self, program: GpuProgram, results: Sequence[Node], n: int, outputs: Sequence[int], pos: int
    ) -> list[Array]:
        d = self.device
        s = d.stream()
        counts = bind(d, s, program, n, outputs, pos, {name: self.stored(name) for name in self.weights})
        for node, x in self.values.items():
            d.upload(s, program.node_address(node), x.astype(np.float32))
        self.launched = list(program.launches(counts))
        for launch in self.launched:
            d.launch(s, launch)
        found = [download(d, s, program, node, n_rows(node, n, outputs)) for node in results]
        d.synchronize()
        return found

    def _bytes(self, address: int, n_bytes: int) -> Array:
        value = np.empty(n_bytes, np.uint8)
        self.device.download(self.device.stream(), value, address)
        self.device.synchronize()
        return value

    def reference(self, results: Sequence[Node], n: int, outputs: Sequence[int], pos: int) -> list[Array]:
        """Values of the NumPy executor."""
        ex = ReferenceExecutor(lambda name: self.weights[name], CacheStore(n))
        ex.state = MicroBatch(
            np.zeros(n, np.int32), np.arange(pos, pos + n, dtype=np.int32), np.arange(n), np.array(outputs, np.int64),
            (Segment(0, n, 0, pos),),
        )  # fmt: skip
        with np.errstate(all="ignore"):
            for node in self.graph.nodes:
                ex._values[node.index] = self.values[node] if node in self.values else node.op.compute(ex)
        return [ex._values[node.index] for node in results]
