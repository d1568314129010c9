"""Recorded graphs: model code records nodes once, and backends execute them for every batch."""

from ikcli.graph.core import Cache, HeadSlice, Node, Op, Per, Place, Rows, RowSpec, Weight, power_of_two_parts
from ikcli.graph.plan import Lifetime, assign_offsets
from ikcli.graph.recorder import Graph, LowRank

__all__ = [
    "Cache",
    "Graph",
    "HeadSlice",
    "Lifetime",
    "LowRank",
    "Node",
    "Op",
    "Per",
    "Place",
    "RowSpec",
    "Rows",
    "Weight",
    "assign_offsets",
    "power_of_two_parts",
]
