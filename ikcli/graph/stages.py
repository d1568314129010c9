"""Cut a graph into pipeline stages of consecutive layers.

Nodes that belong to no layer are computed with the first layer if they come before all layers, else with the last one.
Layers after those of the model, of heads that predict further tokens, are in the last stage.
A cut before layer c is impossible where a layer before c needs a value or the cache of a layer from c on. It is also
impossible where a layer reads the cache of an earlier one across the cut, since a cache is in one stage only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ikcli.graph.core import Node, Place
from ikcli.graph.recorder import Graph


@dataclass(frozen=True, slots=True)
class StagePart:
    """The nodes of a stage, in order; values that arrive (used here or later), and values that go on."""

    nodes: tuple[Node, ...]
    arriving: tuple[Node, ...]
    leaving: tuple[Node, ...]


class LayerGraph:
    """A graph seen as layers."""

    def __init__(self, graph: Graph) -> None:
        self.n_layer = max((node.il for node in graph.nodes), default=-1) + 1
        self._graph = graph
        self._everywhere = {node for node in graph.nodes if node.op.place is Place.EVERYWHERE}
        first = next((i for i, node in enumerate(graph.nodes) if node.il >= 0), len(graph.nodes))
        self._layer: dict[Node, int] = {}
        for i, node in enumerate(graph.nodes):
            if node in self._everywhere:
                continue
            cache = next(node.caches(), None)
            outside = 0 if i < first else self.n_layer - 1
            self._layer[node] = cache.il if cache is not None else node.il if node.il >= 0 else outside

    def layer(self, node: Node) -> int:
        """Return the layer with which a node is computed (not for a node that every stage makes for itself)."""
        return self._layer[node]

    def owned(self) -> Iterator[tuple[Node, int]]:
        """Yield the nodes that are computed once, with their layers."""
        return iter(self._layer.items())

    def _sources(self, node: Node) -> Iterator[Node]:
        """Yield the values that it needs, directly or through nodes that every stage repeats."""
        for x in node.nodes():
            if x in self._everywhere:
                yield from self._sources(x)
            else:
                yield x

    def impossible_cuts(self) -> frozenset[int]:
        """Return the layers before which the graph cannot be cut."""
        bad: set[int] = set()
        for node, il in self._layer.items():
            newest = max((self._layer[x] for x in self._sources(node)), default=il)
            bad.update(range(il + 1, newest + 1))
        return frozenset(bad)

    def crossing(self, cut: int) -> tuple[Node, ...]:
        """Return the values made before layer `cut` and used from there on, in the order of the graph."""
        used = {x for node, il in self._layer.items() if il >= cut for x in self._sources(node) if self._layer[x] < cut}
        return tuple(node for node in self._graph.nodes if node in used)

    def part(self, cuts: Sequence[int], index: int) -> StagePart:
        """Return a stage; `cuts` are the first layers of all stages, then the number of layers of the model."""
        begin, end = cuts[index], cuts[index + 1]
        if index + 2 == len(cuts):
            end = max(end, self.n_layer)
        wanted: set[Node] = set()
        for node in reversed(self._graph.nodes):
            if node in self._layer:
                if not begin <= self._layer[node] < end:
                    continue
            elif node not in wanted:
                continue
            wanted.add(node)
            wanted.update(x for x in node.nodes() if x in self._everywhere)
        nodes = tuple(node for node in self._graph.nodes if node in wanted)
        return StagePart(
            nodes,
            self.crossing(begin) if index else (),
            self.crossing(end) if index + 2 < len(cuts) else (),
        )


def best_cuts(
    sizes: Sequence[int], first: int, last: int, shares: Sequence[float], impossible: frozenset[int]
) -> tuple[int, ...] | None:
    """Choose the cuts whose largest stage, in proportion to its share, is smallest.

    `sizes`: bytes by layer. `first` and `last`: bytes of the first and the last stage beside their layers. Returns None
    if there are too few possible cuts.
    """
    n, k = len(sizes), len(shares)
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    allowed = [c for c in range(1, n) if c not in impossible] + [n]

    def cost(stage: int, begin: int, end: int) -> float:
        beside = (first if stage == 0 else 0) + (last if stage == k - 1 else 0)
        return (total[end] - total[begin] + beside) / shares[stage]

    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(k):
        ends = [n] if stage == k - 1 else allowed[:-1]
        step: dict[int, tuple[float, tuple[int, ...]]] = {}
        for end in ends:
            found = [(max(c, cost(stage, b, end)), (*path, end)) for b, (c, path) in best.items() if b < end]
            if found:
                step[end] = min(found)
        best = step
    return best[n][1] if n in best else None
