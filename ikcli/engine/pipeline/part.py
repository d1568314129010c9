"""The runner of one stage: programs of its layers on the CPU, with memory for values that arrive and leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.run_device import CPU
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.graph import Cache, Graph, Node, Rows
from ikcli.graph.split import GraphSplit, NodePlaces
from ikcli.graph.stages import LayerGraph, StagePart

_SLACK = 512  # bytes after every value that kernels may read


class StageRunner(Runner):
    """Run the layers of one stage.

    `split_points` holds the first layer of every stage, then the number of layers.
    """

    def __init__(self, cpu: CpuDevice, split_points: Sequence[int], index: int) -> None:
        super().__init__(cpu)
        self.split_points, self.index = tuple(split_points), index
        self._parts: dict[int, StagePart] = {}  # by id of the graph

    @property
    def is_last(self) -> bool:
        return self.index == len(self.split_points) - 2

    def part(self, graph: Graph) -> StagePart:
        """Return the part of a graph that this stage computes."""
        if id(graph) not in self._parts:
            self._parts[id(graph)] = LayerGraph(graph).part(self.split_points, self.index)
        return self._parts[id(graph)]

    def _plan(
        self,
        graph: Graph,
        result: Node,
        rows: Mapping[Rows, int],
        batch_invariant: bool,
        places: NodePlaces,
        streamed: frozenset[str],
    ) -> DividedProgram:
        part = self.part(graph)
        made = set(part.nodes)
        used = {x for node in part.nodes for x in node.nodes()}
        imports = [x for x in part.arriving if x in used]
        exports = [x for x in part.leaving if x in made]
        kept = result if self.is_last else None
        states = graph.states if self.is_last and graph.wants_states else None
        split = GraphSplit(CPU, list(part.nodes), imports, exports)
        whole = self.cpu.plan([split], rows, self._n_cells, batch_invariant, result=kept, states=states)
        memory: dict[Node, tuple[int, int]] = {}
        at = 0
        for node in (*imports, *exports):
            size = -(-(rows[node.rows.symbol] * node.rows.factor * node.cols * 4 + _SLACK) // 64) * 64
            memory[node] = (at, size)
            at += size
        return DividedProgram(graph, result, [split], [0], {CPU: whole}, memory, at, states=states)

    @property
    def own_caches(self) -> list[Cache]:
        """Return the cache tensors that this stage has made."""
        return list(self._caches[CPU])

    def cache_tensors(self, programs: Sequence[DividedProgram]) -> dict[str, list[Cache]]:
        """Return the cache tensors of the layers of this stage."""
        found = {c: None for p in programs for split in p.splits for node in split.nodes for c in node.caches()}
        return {CPU: list(found)}
