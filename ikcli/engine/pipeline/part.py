"""The runner of one stage: programs of its layers on the CPU, with memory for what arrives and leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.run_device import CPU
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.graph import Cache, Graph, Node, Rows
from ikcli.graph.split import NodePlaces, Turn
from ikcli.graph.stages import LayerGraph, StagePart

_SLACK = 512  # bytes behind every value, which kernels may read


class StageRunner(Runner):
    """See the module. `cuts`: the first layer of every stage, then the number of layers."""

    def __init__(self, cpu: CpuDevice, cuts: Sequence[int], index: int) -> None:
        super().__init__(cpu)
        self.cuts, self.index = tuple(cuts), index
        self._parts: dict[int, StagePart] = {}  # by id of the graph

    @property
    def is_last(self) -> bool:
        return self.index == len(self.cuts) - 2

    def part(self, graph: Graph) -> StagePart:
        """What this stage does of a graph."""
        if id(graph) not in self._parts:
            self._parts[id(graph)] = LayerGraph(graph).part(self.cuts, self.index)
        return self._parts[id(graph)]

    def _plan(
        self,
        graph: Graph,
        result: Node,
        rows: Mapping[Rows, int],
        independent: bool,
        places: NodePlaces,
        streamed: frozenset[str],
    ) -> DividedProgram:
        part = self.part(graph)
        made = set(part.nodes)
        used = {x for node in part.nodes for x in node.nodes()}
        imports = [x for x in part.arriving if x in used]
        exports = [x for x in part.leaving if x in made]
        kept = result if self.is_last else None
        turn = Turn(CPU, list(part.nodes), imports, exports)
        whole = self.cpu.plan([turn], rows, self._n_cells, independent, result=kept)
        memory: dict[Node, tuple[int, int]] = {}
        at = 0
        for node in (*imports, *exports):
            size = -(-(rows[node.rows.symbol] * node.rows.factor * node.cols * 4 + _SLACK) // 64) * 64
            memory[node] = (at, size)
            at += size
        return DividedProgram(graph, result, [turn], [0], {CPU: whole}, memory, at)

    @property
    def own_caches(self) -> list[Cache]:
        """Those that were made."""
        return list(self._caches[CPU])

    def cache_tensors(self, programs: Sequence[DividedProgram]) -> dict[str, list[Cache]]:
        """Those of the layers of this stage."""
        found = {c: None for p in programs for turn in p.turns for node in turn.nodes for c in node.caches()}
        return {CPU: list(found)}
