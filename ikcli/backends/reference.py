"""Execute recorded graphs in NumPy: every op, float32 or float64 arithmetic, no speed tricks. The oracle of the tests.

Cache tensors are kept as float32 that went through the cache type, so reads return what a real cache would give back.
Unwritten cells are NaN. Sequence s owns cells s*n_ctx_seq .. (s+1)*n_ctx_seq-1, one per position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.backends.reference_kv import QUANTIZED_CACHE_TYPES, through_blocks
from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Cache, Graph, Node, Per, Rows, Weight
from ikcli.graph.micro_batch import MicroBatch
from ikcli.quant.decode import dequantize
from ikcli.quant.encode import quantize

Array = npt.NDArray[Any]
Observer = Callable[[Node, Array], None]
_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def through_type(x: npt.NDArray[np.float32], type_: GGMLType) -> npt.NDArray[np.float32]:
    """Return the values after storage as `type_`; raise UnsupportedError if caches cannot have that type."""
    if type_ in QUANTIZED_CACHE_TYPES:
        return through_blocks(x, type_)
    if type_ not in _FLOATS:
        known = ", ".join(TYPES[t].name for t in (*_FLOATS, *QUANTIZED_CACHE_TYPES))
        raise UnsupportedError(f"the KV cache cannot be of type {TYPES[type_].name}; choose one of {known}")
    return dequantize(quantize(x, type_), type_, (x.shape[-1], len(x))).reshape(x.shape)


class CacheStore:
    """The cache tensors of a session, (rows, cols) each; transposition only changes the layout and is ignored here."""

    def __init__(self, n_cells: int, n_seq: int = 1, n_window: int = 0) -> None:
        """Allocate the store; `n_window` is the number of window cells per sequence."""
        self.n_cells, self.n_seq, self.n_window = n_cells, n_seq, n_window
        self._rows: dict[tuple[str, int], npt.NDArray[np.float32]] = {}

    def rows(self, cache: Cache) -> npt.NDArray[np.float32]:
        """Return all rows of a cache tensor."""
        key = (cache.kind, cache.il)
        if key not in self._rows:
            self._rows[key] = np.full((self._n_rows(cache), cache.cols), np.nan, np.float32)
        return self._rows[key]

    def _n_rows(self, cache: Cache) -> int:
        return cache.rows(self.n_cells, self.n_seq, self.n_window)

    def store(self, cache: Cache, cells: Array, x: npt.NDArray[np.float32], offset: int) -> None:
        """Write rows of x into `cells`, from column `offset` on."""
        if cache.transposed and cache.type not in _FLOATS:
            raise UnsupportedError(f"a transposed cache cannot be {TYPES[cache.type].name}; use f16, bf16 or f32")
        self.rows(cache)[cells, offset : offset + x.shape[1]] = through_type(x, cache.type)


@dataclass(slots=True)
class ReferenceExecutor:
    """Runs graphs; weights come by name as float32 in NumPy order. `observe` sees every node's value."""

    load: Callable[[str], npt.NDArray[np.float32]]
    caches: CacheStore
    dtype: type = np.float32
    observe: Observer | None = None
    state: MicroBatch = field(init=False)
    _values: dict[int, Array] = field(init=False, default_factory=dict)
    _weights: dict[str, Array] = field(init=False, default_factory=dict)

    def run(self, graph: Graph, state: MicroBatch) -> Array:
        """Execute all nodes and return the value of the last one."""
        self.state = state
        self._values = {}
        last_use = _last_uses(graph)
        for node in graph.nodes:
            value = node.op.compute(self)
            if value.shape != (self._n_rows(node), node.cols):
                raise AssertionError(f"{node!r} gave {value.shape}")
            self._values[node.index] = value
            if self.observe is not None:
                self.observe(node, value)
            for x in node.nodes():
                if last_use[x.index] == node.index:
                    self._values.pop(x.index, None)
        return self._values[graph.nodes[-1].index]

    def _n_rows(self, node: Node) -> int:
        s = self.state
        n = {Rows.TOKENS: len(s.tokens), Rows.OUTPUTS: len(s.outputs), Rows.KV: sum(x.n_kv for x in s.segments)}
        return n[node.rows.symbol] * node.rows.factor

    def value(self, node: Node) -> Array:
        """Return the value of a node that was executed before."""
        return self._values[node.index]

    def weight(self, w: Weight) -> Array:
        """Return a weight in NumPy order, (matrices, rows, row length), reduced to the rows asked for."""
        if w.name not in self._weights:
            self._weights[w.name] = self.load(w.name).astype(self.dtype, copy=False)
        values = self._weights[w.name].reshape(w.shape[::-1])
        return values if w.n_rows < 0 else values[w.row0 : w.row0 + w.n_rows]

    def cached(self, cache: Cache) -> Array:
        """Return all rows of a cache tensor."""
        return self.caches.rows(cache)

    def store(self, cache: Cache, x: Array, offset: int) -> None:
        """Write a row per token of the micro-batch, from column `offset` on."""
        cells = self.state.window_cells if cache.per is Per.WINDOW else self.state.cells
        self.caches.store(cache, cells, x.astype(np.float32), offset)


def _last_uses(graph: Graph) -> Mapping[int, int]:
    """Return for every node the index of the last node that reads it."""
    return {x.index: node.index for node in graph.nodes for x in node.nodes()}
