"""Ops of test graphs: leaves, whose values are given, and ops that only a test's own lowering rule knows."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.graph import Graph, Node, Op, Rows, RowSpec
from ikcli.graph.ops_experts import MoeRoute


@dataclass(frozen=True, slots=True)
class Leaf(Op):
    """Rows whose values are given."""

    name = "input"

    spec: RowSpec
    n_cols: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.spec, self.n_cols


@dataclass(frozen=True, slots=True)
class RouteLeaf(MoeRoute):
    """A choice of experts that is given."""

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return RowSpec(Rows.TOKENS), 2 * self.n_used


@dataclass(frozen=True, slots=True)
class Custom(Op):
    """An op with a value of this size that a test computes."""

    name = "custom"

    source: Node
    n_cols: int

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.source.rows, self.n_cols


def leaf(graph: Graph, name: str, cols: int, rows: Rows = Rows.TOKENS, factor: int = 1) -> Node:
    """Record a leaf."""
    return graph.record(Leaf(RowSpec(rows, factor), cols), name)


def route_leaf(graph: Graph, name: str, n_used: int) -> Node:
    """Record a given choice of experts."""
    return graph.record(RouteLeaf(None, None, n_used, "softmax", False, 1.0), name)  # type: ignore[arg-type]
