"""Recurrent layers for tests of kernels: graphs of one op, random rows, and what the op's `compute` makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.backends.reference import CacheStore, ReferenceExecutor
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Graph, HeadSlice, Node, Weight
from ikcli.graph.micro_batch import MicroBatch, Segment

Array = npt.NDArray[Any]
N_SEQ = 4


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of a delta net: heads of v and of k, columns of a head of k and of v."""

    n_head: int
    n_head_k: int
    dk: int
    dv: int
    by_column: bool = False
    tiled: bool = False


@dataclass
class Case:
    """A graph whose leaves are `inputs` (name: columns); `build` records its result."""

    inputs: Mapping[str, int]
    weights: Mapping[str, Array]
    build: Callable[[Graph, Mapping[str, Node]], Node]
    make: Callable[[np.random.Generator, int], Mapping[str, Array]]
    states: dict[str, Array] = field(default_factory=dict)


def weight(name: str, values: Array) -> Weight:
    return Weight(name, GGMLType.F32, values.shape[::-1])


def delta_case(h: Heads, strongest: float = 3.0) -> Case:
    """q, k, v in one row, as the convolution leaves them; decays from hardly any to all that is left."""
    keys, values = h.n_head_k * h.dk, h.n_head * h.dv
    n_decay = h.n_head * (h.dk if h.by_column else 1)

    def build(g: Graph, x: Mapping[str, Node]) -> Node:
        state = g.state("delta", h.n_head * h.dk * h.dv)
        q, k, v = (HeadSlice(x["qkv"], at, d, d) for at, d in ((0, h.dk), (keys, h.dk), (2 * keys, h.dv)))
        sizes: dict[str, Any] = {"n_head": h.n_head, "n_head_k": h.n_head_k, "scale": 0.3, "tiled": h.tiled}
        return g.delta_net(state, q, k, v, x["decay"], x["beta"], "y", **sizes)

    def make(rng: np.random.Generator, n: int) -> Mapping[str, Array]:
        heads = rng.standard_normal((n, 2 * h.n_head_k, h.dk))
        heads /= np.linalg.norm(heads, axis=-1, keepdims=True)
        qkv = np.concatenate([heads.reshape(n, -1), rng.standard_normal((n, values))], axis=1)
        decay = np.exp(-np.exp(rng.uniform(-7, strongest, (n, n_decay))))
        return {"qkv": qkv, "decay": decay, "beta": 2 * rng.standard_normal((n, h.n_head))}

    return Case({"qkv": 2 * keys + values, "decay": n_decay, "beta": h.n_head}, {}, build, make)


def conv_case(widths: Sequence[int], taps: int) -> Case:
    rng = np.random.default_rng([7, taps])
    weights = {f"w{i}": rng.standard_normal((n, taps)).astype(np.float32) for i, n in enumerate(widths)}
    inputs = {f"x{i}": n for i, n in enumerate(widths)}

    def build(g: Graph, x: Mapping[str, Node]) -> Node:
        state = g.state("conv", (taps - 1) * sum(widths))
        return g.short_conv(state, list(x.values()), [weight(name, w) for name, w in weights.items()], "y")

    def make(rng: np.random.Generator, n: int) -> Mapping[str, Array]:
        return {name: rng.standard_normal((n, cols)) for name, cols in inputs.items()}

    return Case(inputs, weights, build, make)


def linear_conv_case(cols: int, taps: int) -> Case:
    plain = conv_case((cols,), taps)

    def build(g: Graph, x: Mapping[str, Node]) -> Node:
        state = g.state("conv", (taps - 1) * cols)
        return g.short_conv(state, list(x.values()), [weight("w0", plain.weights["w0"])], "y", linear=True)

    return Case(plain.inputs, plain.weights, build, plain.make)


def biased_conv_case(cols: int, taps: int) -> Case:
    plain = conv_case((cols,), taps)
    weights = {**plain.weights, "bias": np.random.default_rng(9).standard_normal((1, cols)).astype(np.float32)}

    def build(g: Graph, x: Mapping[str, Node]) -> Node:
        state, bias = g.state("conv", (taps - 1) * cols), Weight("bias", GGMLType.F32, (cols,))
        return g.short_conv(state, list(x.values()), [weight("w0", weights["w0"])], "y", biases=[bias])

    return Case(plain.inputs, weights, build, plain.make)


def scan_case(cols: int, n_state: int, strongest: float = 3.0) -> Case:
    """b and c lie behind something else in rows of one value; from decays that leave all to such that leave nothing."""
    rng = np.random.default_rng([11, cols])
    weights = {"a": -np.exp(rng.uniform(-4, strongest, (cols, n_state))), "d": rng.standard_normal((1, cols)),
               "dt_bias": rng.standard_normal((1, cols))}  # fmt: skip

    def build(g: Graph, x: Mapping[str, Node]) -> Node:
        b, c = (HeadSlice(x["chosen"], 5 + at, n_state, 0) for at in (0, n_state))
        d, bias = (Weight(name, GGMLType.F32, (cols,)) for name in ("d", "dt_bias"))
        state = g.state("scan", cols * n_state)
        return g.selective_scan(state, x["x"], x["dt"], b, c, "y", a=weight("a", weights["a"]), d=d, dt_bias=bias)

    def make(rng: np.random.Generator, n: int) -> Mapping[str, Array]:
        widths = {"x": cols, "dt": cols, "chosen": 5 + 2 * n_state}
        return {name: rng.standard_normal((n, width)) * (4 if name == "dt" else 1) for name, width in widths.items()}

    found = {name: w.astype(np.float32) for name, w in weights.items()}
    return Case({"x": cols, "dt": cols, "chosen": 5 + 2 * n_state}, found, build, make)


def mamba2_case(n_head: int, n_group: int, width: int, n_state: int, strongest: float = 3.0) -> Case:
    """x, b and c in one row, as the convolution leaves them; from decays that leave all to such that leave nothing."""
    rng = np.random.default_rng([13, n_head, width])
    cols, shared = n_head * width, n_group * n_state
    weights = {"a": -np.exp(rng.uniform(-4, strongest, (n_head, 1))), "d": rng.standard_normal((n_head, 1)),
               "dt_bias": rng.standard_normal((1, n_head))}  # fmt: skip

    def build(g: Graph, x: Mapping[str, Node]) -> Node:
        rows = HeadSlice(x["xbc"], 0, width, width)
        b, c = (HeadSlice(x["xbc"], cols + at, n_state, n_state) for at in (0, shared))
        a, d = (weight(name, weights[name]) for name in ("a", "d"))
        state, bias = g.state("scan", cols * n_state), Weight("dt_bias", GGMLType.F32, (n_head,))
        sizes = {"n_head": n_head, "n_group": n_group}
        return g.mamba2_scan(state, rows, x["dt"], b, c, "y", a=a, d=d, dt_bias=bias, **sizes)

    def make(rng: np.random.Generator, n: int) -> Mapping[str, Array]:
        return {"xbc": rng.standard_normal((n, cols + 2 * shared)), "dt": 4 * rng.standard_normal((n, n_head))}

    found = {name: w.astype(np.float32) for name, w in weights.items()}
    return Case({"xbc": cols + 2 * shared, "dt": n_head}, found, build, make)


def linear_case(n_head: int, width: int, strongest: float = 1.0) -> Case:
    """q, k and v of heads side by side in one row, as MiniMax-01 has them; from slopes of nearly 0 on."""
    slopes = [strongest * 0.5 ** (3 * h) for h in range(n_head)]

    def build(g: Graph, x: Mapping[str, Node]) -> Node:
        q, k, v = (HeadSlice(x["qkv"], i * width, width, 3 * width) for i in range(3))
        return g.linear_attention(g.state("linear", n_head * width * width), q, k, v, "y", slopes=slopes)

    def make(rng: np.random.Generator, n: int) -> Mapping[str, Array]:
        return {"qkv": rng.standard_normal((n, 3 * n_head * width))}

    return Case({"qkv": 3 * n_head * width}, {}, build, make)


@dataclass
class Oracle:
    """Runs a case with `compute`, in float64, over micro-batches; states stay."""

    case: Case

    def __post_init__(self) -> None:
        from leaves import leaf

        self.graph = Graph()
        leaves = {name: leaf(self.graph, name, cols) for name, cols in self.case.inputs.items()}
        self.result = self.case.build(self.graph, leaves)
        self.leaves = leaves
        self.caches = CacheStore(8, N_SEQ)

    def __call__(self, segments: Sequence[Segment], values: Mapping[str, Array]) -> Array:
        ex = ReferenceExecutor(lambda name: np.asarray(self.case.weights[name]), self.caches, np.float64)
        n = sum(s.n_tokens for s in segments)
        pos = np.concatenate([np.arange(s.pos, s.pos + s.n_tokens) for s in segments]).astype(np.int32)
        ex.state = MicroBatch(np.zeros(n, np.int32), pos, np.arange(n), np.arange(0), tuple(segments))
        for name, node in self.leaves.items():
            ex._values[node.index] = values[name]
        value: Array = self.result.op.compute(ex)
        return value

    def state(self, seq: int) -> Array:
        """What is kept of a sequence."""
        (cache,) = self.graph.caches.values()
        return self.caches.rows(cache)[seq]


def micro_batches(lengths: Sequence[Sequence[int]]) -> list[list[Segment]]:
    """Segments of micro-batches; lengths[i][j]: tokens of sequence j in micro-batch i, 0: it is not part of it."""
    past = [0] * N_SEQ
    batches = []
    for row in lengths:
        segments, start = [], 0
        for seq, n in enumerate(row):
            if n:
                segments.append(Segment(start, n, 0, past[seq], (seq * 3 + 1) % N_SEQ))
                past[seq] += n
                start += n
        batches.append(segments)
    return batches
