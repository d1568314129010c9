"""Accumulate activation second moments, the sums of squares of the inputs of every weight matrix, while a session
decodes.

A session's observer sees the output of every node right after it was computed. The inputs of matrix products are
outputs of earlier nodes, so streams are attached to those nodes: one stream per distinct input, shared by all weights
that read it (q, k, v; up and gate). Experts: the route node tells which rows go to which expert; the input of the down
projection is already sorted by expert. MLA: k_b and v_b have one row of sums per head; the normed latent also serves
kv_b, which the absorbed form never multiplies with. Corresponds to examples/imatrix of ik_llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.errors import NonFiniteError
from ikcli.graph import Graph, HeadSlice, Node, Rows
from ikcli.graph.ops_experts import ExpertProduct, route_of
from ikcli.graph.ops_rows import MulMatHeads, Product, RmsNorm
from ikcli.imatrix.covariance import Products, block_size
from ikcli.imatrix.sums import F64, StreamSums, Sums
from ikcli.quant.covariance_file import Moments

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(eq=False, slots=True)
class InputStream:
    """One input of the weight matrices `names`; accumulates `sums` (n_mat, ne0) and `counts` (n_mat,).

    With a `route`, matrices are experts; `by_expert` inputs are sorted by expert. `heads` selects columns per head.
    """

    names: list[str]
    sums: F64
    counts: F64
    route: Node | None = None
    by_expert: bool = False
    heads: HeadSlice | None = None
    products: Products | None = None  # bytes of input covariances

    def add(self, x: F32, ids: I32 | None) -> None:
        """Add the rows of x; `ids` (rows, n_used) are the experts of each token, -1 for dropped slots."""
        if ids is not None:
            self._add_experts(x, ids)
            return
        squares = np.square(x)
        if self.heads is not None:
            h, n_head = self.heads, len(self.counts)
            columns = h.offset + h.head_stride * np.arange(n_head)[:, None] + np.arange(h.width)
            self.sums += squares.sum(axis=0, dtype=np.float64)[columns]
            for i in range(n_head if self.products is not None else 0):
                self._add_products(i, x[:, columns[i]])
        else:
            self.sums[0] += squares.sum(axis=0, dtype=np.float64)
            self._add_products(0, x)
        self.counts += len(x)

    def _add_experts(self, x: F32, ids: I32) -> None:
        n_expert = len(self.counts)
        chosen = ids[ids >= 0]
        counts = np.bincount(chosen, minlength=n_expert)
        if self.by_expert:
            ends = np.cumsum(counts)
            for e in np.flatnonzero(counts):
                rows = x[ends[e] - counts[e] : ends[e]]
                self.sums[e] += np.square(rows).sum(axis=0, dtype=np.float64)
                self._add_products(int(e), rows)
        else:
            squares = np.square(x)
            rows_of = np.broadcast_to(np.arange(len(x))[:, None], ids.shape)[ids >= 0]
            for e in np.flatnonzero(counts):  # a matrix product would depend on the number of threads
                rows = rows_of[chosen == e]
                self.sums[e] += squares[rows].sum(axis=0, dtype=np.float64)
                if self.products is not None:
                    self._add_products(int(e), x[rows])
        self.counts += counts

    def _add_products(self, matrix: int, rows: F32) -> None:
        if self.products is not None:
            self.products.add(matrix, rows)


@dataclass(slots=True)
class Collector:
    """The observer of a session; made by `watch`."""

    streams: dict[Node, list[InputStream]] = field(default_factory=dict)
    routed: dict[Node, list[Node]] = field(default_factory=dict)  # route -> per-token inputs computed before it
    _held: dict[Node, F32] = field(default_factory=dict)
    _ids: dict[Node, I32] = field(default_factory=dict)

    def __call__(self, node: Node, value: npt.NDArray[np.generic]) -> None:
        """Take the output of a node."""
        if node in self.routed:
            n_used = route_of(node).n_used
            self._ids[node] = np.array(value.view(np.int32)[:, n_used:])
            for source in self.routed[node]:
                held = self._held[source]
                for s in self.streams[source]:
                    if s.route is node:
                        s.add(held, self._ids[node])
                if node is self._last_route(source):
                    del self._held[source]
        if node not in self.streams:
            return
        x = value.astype(np.float32, copy=False)
        if not np.isfinite(x).all():
            names = ", ".join(n for s in self.streams[node] for n in s.names)
            raise NonFiniteError(f"{node.name}, the input of {names}, holds NaN or Inf; try --check-tensors")
        for s in self.streams[node]:
            if s.route is None:
                s.add(x, None)
            elif s.by_expert or s.route.index < node.index:  # the experts are known already
                s.add(x, self._ids[s.route])
            else:
                self._held[node] = x.copy()

    def _last_route(self, source: Node) -> Node:
        """Return the last route by which experts read the rows of a node; groups of experts have one of their own."""
        return [route for route, sources in self.routed.items() if source in sources][-1]

    def all_streams(self) -> Iterable[InputStream]:
        """Return every stream once."""
        return (s for found in self.streams.values() for s in found)

    def take(self) -> Sums:
        """Return the sums since the last call and restart them at zero. Input covariances keep accumulating."""
        found = Sums()
        for s in self.all_streams():
            found.streams.append(StreamSums(tuple(s.names), s.sums, s.counts, s.route is not None))
            s.sums, s.counts = np.zeros_like(s.sums), np.zeros_like(s.counts)
        return found

    def product_sizes(self, limit: int) -> list[int]:
        """Return the bytes for the covariance of every input, each at most `limit` where blocks of columns allow it."""
        return [4 * n * ne0 * block_size(n, ne0, limit) for n, ne0 in (s.sums.shape for s in self.all_streams())]

    def measure_products(self, limit: int) -> None:
        """Accumulate input covariances as well."""
        for s in self.all_streams():
            n_mat, ne0 = s.sums.shape
            s.products = Products.empty(n_mat, ne0, block_size(n_mat, ne0, limit))

    def moments(self) -> list[tuple[list[str], Moments]]:
        """Return the covariances so far with the weights they belong to; inputs that were never seen are left out."""
        found = ((s.names, s.products.moments()) for s in self.all_streams() if s.products is not None)
        return [(names, m) for names, m in found if m.counts.any()]


_OUTPUTS = ("output.weight", "token_embd.weight")


def watch(graphs: Iterable[Graph], *, output_name: str | None = None) -> Collector:
    """Return a collector for all matrices in these graphs except the output, and for the tensor `output_name`."""
    out = Collector()
    for graph in graphs:
        for node in graph.nodes:
            _watch_node(out, node, output_name)
    return out


def _watch_node(out: Collector, node: Node, output_name: str | None) -> None:
    op = node.op
    if isinstance(op, RmsNorm) and op.w.name.endswith(".attn_kv_a_norm.weight"):
        kv_b = op.w.name.replace("attn_kv_a_norm", "attn_kv_b")
        _attach(out, node, [kv_b], 1, op.w.ne0)
    named = (w for w in node.weights() if w.name not in _OUTPUTS or w.name == output_name)
    wanted = [w for w in named if ".lora_" not in w.name]  # adapters are not what will be quantized
    if not wanted or not isinstance(op, Product):
        return
    names, first, source = [w.name for w in wanted], wanted[0], op.source
    if isinstance(op, ExpertProduct):
        route = op.sort.route
        if not _attach(out, source, names, first.ne2, first.ne0, route=route, by_expert=op.sorted_in):
            return
        feeds = out.routed.setdefault(route, [])
        if not op.sorted_in and source.index < route.index and source not in feeds:
            feeds.append(source)
    elif isinstance(op, MulMatHeads):
        _attach(out, source, names, first.ne2, first.ne0, heads=op.x)
    elif source.rows.symbol is not Rows.KV:  # cached rows would be counted again with every micro-batch
        _attach(out, source, names, 1, first.ne0)


def _attach(
    out: Collector,
    source: Node,
    names: list[str],
    n_mat: int,
    ne0: int,
    *,
    route: Node | None = None,
    by_expert: bool = False,
    heads: HeadSlice | None = None,
) -> bool:
    """Measure the input of these weights, except those with an input already; return whether any is left."""
    known = {name for s in out.all_streams() for name in s.names}
    names = [name for name in dict.fromkeys(names) if name not in known]
    if not names:
        return False
    found = out.streams.setdefault(source, [])
    same = next((s for s in found if s.route is route and s.by_expert == by_expert and s.heads == heads), None)
    if same is not None and same.sums.shape == (n_mat, ne0):
        same.names += names
        return True
    found.append(InputStream(names, np.zeros((n_mat, ne0)), np.zeros(n_mat), route, by_expert, heads))
    return True
