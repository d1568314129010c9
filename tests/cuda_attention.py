"""Runs graphs with KV caches on the emulated CUDA device, and the float64 oracle of their attention nodes.

    run = Run(max_tokens=8, n_cells=64)
    q = run.input("q", 128)
    ...                                          # kv_store and attention nodes on run.graph
    out = run([Segment(3, cell=0, pos=10)], {q: array})
Caches are host rows (`run.caches`), converted for the device and back; cells that must not be read are NaN, or codes
with NaN scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_emulation import EmulatedDevice
from cuda_graphs import keep
from leaves import Leaf, leaf

from ikcli.backends.cuda.device import Launch
from ikcli.backends.cuda.kv_layout import from_device, planes, to_device
from ikcli.backends.cuda.lower import Counts, DeviceLimits, GpuLowering, GpuProgram, all_rules, lower
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES, row_n_bytes
from ikcli.graph import Cache, Graph, HeadSlice, Node, Per, Rows, Weight
from ikcli.graph.micro_batch import PLACE_WORDS, SEEN
from ikcli.graph.ops_attention import Attention
from ikcli.quant.decode import dequantize

Array = npt.NDArray[Any]
LIMITS = DeviceLimits((9, 0), 132, 232448, 233472, 60 << 20, "emulated H200")
SMALL = DeviceLimits((8, 9), 76, 101376, 102400, 64 << 20, "emulated RTX 4080")


@dataclass(frozen=True, slots=True)
class Segment:
    """n_tokens of one sequence: cells from `cell`, `pos` positions cached before; `window`: see micro_batch.Segment."""

    n_tokens: int
    cell: int = 0
    pos: int = 0
    window: int = 0


@dataclass
class Run:
    """One graph, its caches and what was launched."""

    max_tokens: int
    n_cells: int
    limits: DeviceLimits = LIMITS
    batch_invariant: bool = False
    window_cells: int = 0
    graph: Graph = field(default_factory=Graph)
    leaves: list[Node] = field(default_factory=list)
    caches: dict[Cache, Array] = field(default_factory=dict)
    weights: dict[Weight, Array] = field(default_factory=dict)
    launched: list[Launch] = field(default_factory=list)
    ranges: Array | None = None  # (tokens, 2): first and end of the positions that come with each token

    def __post_init__(self) -> None:
        self.graph.il = 0

    def input(self, name: str, cols: int, rows: Rows = Rows.TOKENS) -> Node:
        """A leaf whose rows are given at run time."""
        node = leaf(self.graph, name, cols, rows)
        self.leaves.append(node)
        return node

    def program(self, *results: Node) -> GpuProgram:
        """The lowered graph."""
        most = {Rows.TOKENS: self.max_tokens, Rows.OUTPUTS: 1, Rows.KV: self.n_cells}
        low = GpuLowering(most, self.n_cells, self.limits, self.window_cells, self.batch_invariant)
        return lower(self.graph.nodes, [*results, *self.leaves], low, all_rules().replaced({Leaf: keep}))

    def __call__(
        self, segments: Sequence[Segment], values: Mapping[Node, Array], *results: Node, seed: int = 1,
        counts: Counts | None = None,
    ) -> list[Array]:  # fmt: skip
        """Values of the results (default: the last node); caches are changed."""
        results = results or (self.graph.nodes[-1],)
        program, device = self.program(*results), EmulatedDevice(seed=seed)
        try:
            return self._run(program, device, segments, values, results, counts)
        finally:
            device.close()

    def _run(
        self, program: GpuProgram, device: EmulatedDevice, segments: Sequence[Segment], values: Mapping[Node, Array],
        results: Sequence[Node], counts: Counts | None,
    ) -> list[Array]:  # fmt: skip
        s = device.stream()

        def upload(data: Array, owner: str) -> int:
            memory = device.alloc(data.nbytes, owner)
            device.upload(s, memory.address, np.ascontiguousarray(data))
            return memory.address

        words, rows = step_block(segments, upload)
        if self.ranges is not None:
            places = np.zeros((len(self.ranges), PLACE_WORDS), np.int32)
            places[:, SEEN : SEEN + 2] = self.ranges
            words[14] = upload(places, "places")
        addresses = {}
        for cache, data in self.caches.items():
            addresses[cache] = device.alloc(data.nbytes, cache.kind).address
            for plane, part in zip(planes(cache, self.cells(cache)), to_device(cache, data), strict=True):
                device.upload(s, addresses[cache] + plane.offset, part)
        arena = device.alloc(max(program.arena_bytes, 1), "arena")
        weights = {w.name: upload(x, w.name) for w, x in self.weights.items()}
        constants = {b: upload(np.frombuffer(data, np.uint8), "constant") for b, data in program.constants.items()}
        program.bind(upload(words, "step"), arena.address, constants, weights, addresses)
        for node, x in values.items():
            device.upload(s, program.node_address(node), x.astype(np.float32))
        longest = max(x.pos + x.n_tokens for x in segments)
        most = program.lowering.max_rows
        exact = Counts(rows[Rows.TOKENS], 1, rows[Rows.KV], len(segments), longest, self.ranges is not None)
        self.launched = [
            Launch(r.kernel, r.grid, r.block, r.shared, r.args) for r in program.launches(counts or exact.bucket(most))
        ]
        for launch in self.launched:
            device.launch(s, launch)
        found = []
        for node in results:
            if node.cols:
                found.append(np.empty((rows[node.rows.symbol], node.cols), np.float32))
                device.download(s, found[-1], program.node_address(node))
        for cache, data in self.caches.items():
            parts = [np.empty((len(p), p.shape[1]), np.uint8) for p in to_device(cache, data)]
            for plane, part in zip(planes(cache, self.cells(cache)), parts, strict=True):
                device.download(s, part, addresses[cache] + plane.offset)
            device.synchronize()
            data[:] = from_device(cache, parts)
        device.synchronize()
        return found

    def cells(self, cache: Cache) -> int:
        """Rows of a cache."""
        return self.window_cells if cache.per is Per.WINDOW else self.n_cells

    def kernels(self) -> list[str]:
        """Kernels of the last run, without those that store."""
        return [x.kernel for x in self.launched if not x.kernel.startswith("kv_store")]


def step_block(segments: Sequence[Segment], upload: Any) -> tuple[Array, dict[Rows, int]]:
    """The step block and the rows per symbol."""
    table, cells, pos, start, n_kv = [], [], [], 0, 0
    for s in segments:
        end = s.pos + s.n_tokens
        table.append([start, s.n_tokens, s.cell, s.pos, n_kv, end])
        pos += range(s.pos, end)
        cells += range(s.cell + s.pos, s.cell + end)
        start, n_kv = start + s.n_tokens, n_kv + end
    words = np.zeros(16, np.int64)
    words[:4] = start, 0, n_kv, len(segments)
    words[5] = upload(np.array(pos, np.int32), "pos")
    words[6] = upload(np.array(cells, np.int64), "cells")
    words[8] = upload(np.array(table, np.int64), "segments")
    words[11] = upload(
        np.concatenate([s.window + np.arange(s.pos, s.pos + s.n_tokens) for s in segments]), "window cells"
    )
    words[12] = upload(np.array([s.window for s in segments], np.int64), "windows")
    return words, {Rows.TOKENS: start, Rows.OUTPUTS: 0, Rows.KV: n_kv}


# --- cache rows -------------------------------------------------------------------------------------------------------
def random_rows(rng: np.random.Generator, n: int, cols: int, type_: GGMLType) -> Array:
    """Host bytes of n cache rows: Gaussian floats; blocks of any codes, scales of either sign."""
    if n == 0:
        return np.empty((0, row_n_bytes(type_, cols)), np.uint8)
    x = rng.standard_normal((n, cols))
    if type_ == GGMLType.F32:
        return x.astype(np.float32).view(np.uint8)
    if type_ == GGMLType.F16:
        return x.astype(np.float16).view(np.uint8)
    if type_ == GGMLType.BF16:
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    size = TYPES[type_].type_size
    rows = rng.integers(0, 256, (n, row_n_bytes(type_, cols)), dtype=np.uint8)
    levels = {GGMLType.Q8_0: 74, GGMLType.Q8_KV: 74, GGMLType.IQ4_NL: 66, GGMLType.Q6_0: 18, GGMLType.Q5_0: 9,
              GGMLType.Q5_1: 9, GGMLType.Q4_0: 4.6, GGMLType.Q4_1: 4.6}[type_]  # fmt: skip
    scale = rng.uniform(0.7, 1.4, (n, cols // 32)) / levels * rng.choice([-1, 1], (n, cols // 32))
    if type_ == GGMLType.Q8_KV:
        rows[:, :4] = scale[:, :1].astype(np.float32).view(np.uint8)
        return rows
    blocks = rows.reshape(n, -1, size)
    blocks[..., :2] = scale.astype(np.float16)[..., None].view(np.uint8)
    if type_ in (GGMLType.Q5_1, GGMLType.Q4_1):
        low = -scale * (15.5 if type_ == GGMLType.Q5_1 else 7.5)
        blocks[..., 2:4] = low.astype(np.float16)[..., None].view(np.uint8)
    return rows


def decode(rows: Array, type_: GGMLType) -> Array:
    """Host bytes of cache rows as float64."""
    traits = TYPES[type_]
    cols = (rows.shape[1] - traits.row_meta_size) // traits.type_size * traits.block_size
    values = dequantize(np.ascontiguousarray(rows).reshape(-1), type_, (cols, len(rows)))
    return values.astype(np.float64).reshape(len(rows), cols)


def fill(run: Run, cache: Cache, segments: Sequence[Segment], rng: np.random.Generator) -> None:
    """Random rows for what segments have cached before, bytes 0xff (NaN) everywhere else."""
    if cache.transposed:
        data = np.full((cache.cols, row_n_bytes(cache.type, run.n_cells)), 0xFF, np.uint8)
        size = TYPES[cache.type].type_size
        for s in segments:
            data[:, s.cell * size : (s.cell + s.pos) * size] = random_rows(rng, cache.cols, s.pos, cache.type)
    else:
        data = np.full((run.cells(cache), row_n_bytes(cache.type, cache.cols)), 0xFF, np.uint8)
        for s in segments:
            rows = random_rows(rng, s.pos, cache.cols, cache.type)
            if cache.per is Per.WINDOW:  # those from cell 0 on
                kept = rows[max(-s.window, 0) :]
                data[s.window + s.pos - len(kept) : s.window + s.pos] = kept
            else:
                data[s.cell : s.cell + s.pos] = rows
    run.caches[cache] = data


# --- oracle -----------------------------------------------------------------------------------------------------------
def expected(run: Run, node: Node, segments: Sequence[Segment], values: Mapping[Node, Array]) -> Array:
    """The attention node in float64, from what the caches hold and the leaves."""
    a = node.op
    assert isinstance(a, Attention)
    group = a.group
    out, token, kv_row = [], 0, 0
    for s in segments:
        end = s.pos + s.n_tokens

        def rows(source: Node | Cache, s: Segment = s, end: int = end, kv_row: int = kv_row) -> Array:
            if isinstance(source, Node):
                return values[source][kv_row : kv_row + end].astype(np.float64)
            if source.transposed:
                return decode(run.caches[source], source.type)[:, s.cell : s.cell + end].T
            if source.per is Per.WINDOW:
                cells = s.window + np.arange(end)
                return decode(run.caches[source][np.where(cells < 0, 0, cells)], source.type)
            return decode(run.caches[source][s.cell : s.cell + end], source.type)

        def head(x: Array, part: HeadSlice, h: int) -> Array:
            at = part.offset + h * part.head_stride
            return x[:, at : at + part.width]

        pos = s.pos + np.arange(s.n_tokens)
        seen_from = np.array([a.first_seen(int(p)) for p in pos])
        last = np.full_like(pos, end - 1) if a.both else pos
        if a.ranged and run.ranges is not None:
            first, stop = run.ranges[token : token + s.n_tokens].T
            seen_from, last = np.minimum(seen_from, first), np.maximum(last, stop - 1)
        hidden = (np.arange(end) > last[:, None]) | (np.arange(end) < seen_from[:, None])
        gone = np.arange(end) < seen_from.min()  # what no query sees may be anything

        def visible(x: Array, gone: Array = gone) -> Array:
            return np.where(gone[:, None], 0, x)

        heads = []
        sources = {p.source: rows(p.source) for p in (*a.k, a.v)}
        for h in range(a.n_head):
            q = np.hstack([head(values[p.source][token : token + s.n_tokens].astype(np.float64), p, h) for p in a.q])
            k = visible(np.hstack([head(sources[p.source], p, h // group) for p in a.k]))
            scores = q @ k.T * np.float64(np.float32(a.scale))
            if a.softcap:
                scores = a.softcap * np.tanh(scores / a.softcap)
            scores = np.where(hidden, -np.inf, scores)
            sink = -np.inf if a.sinks is None else float(run.weights[a.sinks][h])
            top = np.maximum(scores.max(axis=1, keepdims=True), sink)
            p = np.exp(scores - top)
            p /= p.sum(axis=1, keepdims=True) + np.exp(sink - top)
            heads.append(p @ visible(head(sources[a.v.source], a.v, h // group)))
        out.append(np.hstack(heads))
        token, kv_row = token + s.n_tokens, kv_row + end
    return np.vstack(out)


def error(found: Array, wanted: Array) -> float:
    """Relative error in the 2-norm; NaN where something is not finite."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
