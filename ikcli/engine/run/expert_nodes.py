"""`--numa distribute`: experts spread over NUMA nodes, each whole, and computed by the threads of their node.

Every node has the same part of every layer's experts. Threads take the chosen experts of their node, then help other
nodes with theirs: only this help reads remote memory, instead of most of the work as with stripes. It takes weights
that are read (`--no-mmap`, `-rtr`), since mapped ones are where the page cache has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ikcli.backends.cpu.program import MOST_NODES
from ikcli.engine.run import numa
from ikcli.engine.run.run_device import CPU
from ikcli.graph import Graph
from ikcli.graph.ops_experts import ExpertProduct

if TYPE_CHECKING:
    from ikcli.engine.run.model import Model
    from ikcli.settings.run import RunConfig

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ExpertNodes:
    """Where experts are: the number of experts by weight, and the node of each thread; empty where none are spread."""

    counts: Mapping[str, int] = field(default_factory=dict)
    nodes: Sequence[int] = ()
    n_bytes: Sequence[int] = ()  # of the experts of each node

    @property
    def n_nodes(self) -> int:
        """Return the number of nodes, 1 where experts have none."""
        return max(self.nodes, default=0) + 1

    def line(self) -> str:
        """Describe how many experts of a layer, and bytes, each node has, and the threads that compute them."""
        most, n_threads = max(self.counts.values()), [self.nodes.count(node) for node in range(self.n_nodes)]
        parts = (
            f"{len(part)} of {most} ({n_bytes / _MIB:.0f} MiB) by {n} thread{'s' if n > 1 else ''}"
            for part, n_bytes, n in zip(numa.expert_parts(most, self.n_nodes), self.n_bytes, n_threads, strict=True)
        )
        return f"numa: experts of a layer by node, computed there: {', '.join(parts)}"


def expert_nodes_of(
    config: RunConfig, n_threads: int, graphs: Iterable[Graph], model: Model, buffer_of: Mapping[str, str]
) -> ExpertNodes:
    """Return how a run spreads the experts that it reads into RAM; nothing without `--numa distribute`."""
    if config.numa != "distribute" or config.mmap:
        return ExpertNodes()
    cpus, _ = numa.plan_threads(config, n_threads)
    nodes = numa.copy_of_threads(cpus) if cpus else []
    n_nodes = max(nodes, default=0) + 1
    products = (node.op for graph in graphs for node in graph.nodes if isinstance(node.op, ExpertProduct))
    counts = {w.name: w.ne2 for op in products for w in op.matrices if buffer_of.get(w.name, CPU) == CPU}
    if not 1 < n_nodes <= MOST_NODES or not counts:
        return ExpertNodes()
    n_bytes = [0] * n_nodes
    for name, n_expert in counts.items():
        for node, part in enumerate(numa.expert_parts(n_expert, n_nodes)):
            n_bytes[node] += model.n_bytes([name]) // n_expert * len(part)
    return ExpertNodes(counts, nodes, n_bytes)
