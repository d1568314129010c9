"""The routers of a recorded graph, and what the next one would choose, asked before its layer has been computed.

The experts of a layer are guessed by its router from what the router of the layer before reads: the hidden state
changes little from layer to layer. Where both read normed rows, the weights of the two norms are exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.model import Model
from ikcli.graph import Graph, Node, Weight
from ikcli.graph.core import Op
from ikcli.graph.micro_batch import MicroBatch
from ikcli.graph.ops_experts import MoeRoute, route_parts
from ikcli.graph.ops_rows import Add, MulMat, RmsNorm

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Router:
    """The router of layer `il`: its route, and the rows, matrix and bias of its logits where it is a plain product."""

    il: int
    route: Node
    x: Node | None
    w: Weight | None
    bias: Weight | None

    @property
    def op(self) -> MoeRoute:
        """Return the op that chooses."""
        assert isinstance(self.route.op, MoeRoute)
        return self.route.op

    @property
    def norm(self) -> Weight | None:
        """Return the weights of the norm that made the rows it reads, if one did."""
        op = None if self.x is None else self.x.op
        return op.w if isinstance(op, RmsNorm) and op.w.ne0 == self.x_cols else None

    @property
    def x_cols(self) -> int:
        """Return the length of the rows it reads; 0 where they are not known."""
        return 0 if self.x is None else self.x.cols


def routers_of(graph: Graph) -> list[Router]:
    """Return the routers of a graph in the order of its layers."""
    return [_router(node) for node in graph.nodes if isinstance(node.op, MoeRoute)]


def _router(route: Node) -> Router:
    assert isinstance(route.op, MoeRoute)
    op: Op = route.op.logits.op
    bias: Weight | None = None
    if isinstance(op, Add) and isinstance(op.y, Weight):
        bias = op.y
        op = op.x.op
    if isinstance(op, MulMat):
        return Router(route.il, route, op.x, op.w, bias)
    return Router(route.il, route, None, None, None)


class NextExperts:
    """Guess the experts of every layer from the rows that the router of the layer before reads."""

    def __init__(self, model: Model, routers: Sequence[Router]) -> None:
        """Read the routers, as float32: n_expert x n_embd for each layer."""
        self._next: dict[Node, tuple[Router, F32, F32 | None, _Values]] = {}
        for now, after in pairwise(routers):
            if now.x is None or after.w is None or now.x_cols != after.x_cols or after.w.name not in model.file.tensors:
                continue
            w = model.values(after.w.name).reshape(-1, after.x_cols).astype(np.float32)
            if now.norm is not None and after.norm is not None:
                old, new = (model.values(n.name).reshape(-1) for n in (now.norm, after.norm))
                w = w * np.divide(new, old, out=np.zeros_like(new), where=old != 0)
            bias = None if after.bias is None else model.values(after.bias.name).reshape(-1)
            chosen = after.op.bias
            weights = {} if chosen is None else {chosen.name: model.values(chosen.name).reshape(-1)}
            self._next[now.route] = after, w, bias, _Values(weights)

    @classmethod
    def none(cls) -> NextExperts:
        """Return one that knows no routers."""
        found = cls.__new__(cls)
        found._next = {}
        return found

    def join(self, other: NextExperts) -> None:
        """Know the routers of another graph, too."""
        self._next |= other._next

    def after(self, route: Node, x: F32) -> tuple[Router, I32] | None:
        """Return the next layer's router and its guessed experts (rows, n_used), given the rows that `route`'s reads.

        None behind the last layer, and where a router is not a plain product.
        """
        found = self._next.get(route)
        if found is None:
            return None
        router, w, bias, values = found
        values.logits = x @ w.T if bias is None else x @ w.T + bias
        return router, route_parts(router.op.compute(values), router.op.n_used)[1]


class _Values:
    """Inputs of `MoeRoute.compute`: logits, and the weights that only choose."""

    dtype: type = np.float32
    state: MicroBatch

    def __init__(self, weights: Mapping[str, F32]) -> None:
        self._weights = weights
        self.logits: F32 = np.empty((0, 0), np.float32)

    def value(self, node: Node) -> F32:
        return self.logits

    def weight(self, w: Weight) -> F32:
        return self._weights[w.name]

    def cached(self, cache: object) -> F32:
        raise NotImplementedError("routers have no cache")

    def store(self, cache: object, x: object, offset: int) -> None:
        raise NotImplementedError("routers have no cache")
