"""NumPy executor of recorded graphs: every op, float32 or float64 arithmetic, no speed tricks. The oracle.

Cache tensors are kept as float32 that went through the cache type, so that what is read is what a real cache would
give back. Unwritten cells are NaN. Cells: sequence s owns s*n_ctx_seq .. (s+1)*n_ctx_seq-1, one per position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.backends.reference_kv import QUANTIZED_CACHE_TYPES, through_blocks
from ikcli.backends.reference_ops import OPS
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import TYPE_TRAITS, GGMLType
from ikcli.graph import Cache, Graph, Node, Weight
from ikcli.quant.decode import dequantize
from ikcli.quant.encode import quantize

Array = npt.NDArray[Any]
Observer = Callable[[Node, Array], None]
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


@dataclass(frozen=True, slots=True)
class Segment:
    """Adjacent tokens of one sequence: rows token0.. of the micro-batch; cells cell0 .. cell0+n_kv-1 hold its past."""

    token0: int
    n_tokens: int
    cell0: int
    n_kv: int


@dataclass(frozen=True, slots=True)
class BatchState:
    """Dynamic values of one micro-batch; `outputs` are the rows whose logits are wanted."""

    tokens: npt.NDArray[np.int32]
    pos: npt.NDArray[np.int32]
    cells: npt.NDArray[np.int64]
    outputs: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]


def through_type(x: npt.NDArray[np.float32], type_: GGMLType) -> npt.NDArray[np.float32]:
    """The values after storage as `type_`; UnsupportedError for a type that is no cache type."""
    if type_ in QUANTIZED_CACHE_TYPES:
        return through_blocks(x, type_)
    if type_ not in _FLOATS:
        known = ", ".join(TYPE_TRAITS[t].name for t in (*_FLOATS, *QUANTIZED_CACHE_TYPES))
        raise UnsupportedError(f"the KV cache cannot be of type {TYPE_TRAITS[type_].name}; choose one of {known}")
    return dequantize(quantize(x, type_), type_, (x.shape[-1], len(x))).reshape(x.shape)


class CacheStore:
    """The cache tensors of a session, (n_cells, cols) each; transposition is a matter of layout and ignored here."""

    def __init__(self, n_cells: int) -> None:
        self.n_cells = n_cells
        self._rows: dict[tuple[str, int], npt.NDArray[np.float32]] = {}

    def rows(self, cache: Cache) -> npt.NDArray[np.float32]:
        """All cells of a cache tensor."""
        key = (cache.kind, cache.il)
        if key not in self._rows:
            self._rows[key] = np.full((self.n_cells, cache.cols), np.nan, np.float32)
        return self._rows[key]

    def store(self, cache: Cache, cells: Array, x: npt.NDArray[np.float32], offset: int) -> None:
        """Write rows of x into `cells`, from column `offset` on."""
        if cache.transposed and cache.type not in _FLOATS:
            raise UnsupportedError(f"a transposed cache cannot be {TYPE_TRAITS[cache.type].name}; use f16, bf16 or f32")
        self.rows(cache)[cells, offset : offset + x.shape[1]] = through_type(x, cache.type)


@dataclass(slots=True)
class Executor:
    """Runs graphs; weights come by name as float32 in NumPy order. `observe` sees every node's value."""

    load: Callable[[str], npt.NDArray[np.float32]]
    caches: CacheStore
    dtype: type = np.float32
    observe: Observer | None = None
    state: BatchState = field(init=False)
    _values: dict[int, Array] = field(init=False, default_factory=dict)
    _weights: dict[str, Array] = field(init=False, default_factory=dict)

    def run(self, graph: Graph, state: BatchState) -> Array:
        """Execute all nodes; returns the value of the last one."""
        self.state = state
        self._values = {}
        last_use = _last_uses(graph)
        for node in graph.nodes:
            value = OPS[node.op](self, node)
            if value.shape != (self._n_rows(node), node.cols):
                raise AssertionError(f"{node!r} gave {value.shape}")
            self._values[node.index] = value
            if self.observe is not None:
                self.observe(node, value)
            for x in node.inputs:
                if isinstance(x, Node) and last_use[x.index] == node.index:
                    self._values.pop(x.index, None)
        return self._values[graph.nodes[-1].index]

    def _n_rows(self, node: Node) -> int:
        s = self.state
        n = {"n_tokens": len(s.tokens), "n_outputs": len(s.outputs), "n_kv": sum(x.n_kv for x in s.segments)}
        return n[node.rows.symbol.value] * node.rows.factor

    def value(self, x: Any) -> Array:
        """The value of a node that was executed before."""
        return self._values[x.index]

    def weight(self, w: Any) -> Array:
        """A weight in NumPy order, (matrices, rows, row length), reduced to the dimensions and rows asked for."""
        assert isinstance(w, Weight)
        if w.name not in self._weights:
            self._weights[w.name] = self.load(w.name).astype(self.dtype, copy=False)
        values = self._weights[w.name].reshape(w.shape[::-1])
        return values if w.n_rows < 0 else values[w.row0 : w.row0 + w.n_rows]

    def kv_source(self, source: Node | Cache, segment: Segment, kv0: int) -> Array:
        """Key or value rows of a segment: its cells of a cache, or rows kv0.. of a node over all segments."""
        if isinstance(source, Cache):
            return self.caches.rows(source)[segment.cell0 : segment.cell0 + segment.n_kv].astype(self.dtype)
        return self.value(source)[kv0 : kv0 + segment.n_kv]


def _last_uses(graph: Graph) -> Mapping[int, int]:
    """Index of the last node that reads each node."""
    return {x.index: node.index for node in graph.nodes for x in node.inputs if isinstance(x, Node)}
