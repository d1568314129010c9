"""Choose the layers at which a model is split into stages, by the memory of its layers."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ikcli.engine.plan.programs import Graphs
from ikcli.engine.run.model import Model
from ikcli.errors import UnsupportedError, UsageError
from ikcli.graph import Cache
from ikcli.graph.stages import LayerGraph, best_cuts
from ikcli.settings.run import RunConfig


def find_split_points(
    config: RunConfig, model: Model, graphs: Graphs, cache_bytes: Callable[[Cache], int]
) -> tuple[int, ...]:
    """Return the first layer of every stage, then the number of layers.

    The bytes of the stages are in proportion to `--stage-split`. Raise UsageError or UnsupportedError if there are too
    many stages.
    """
    n, split = config.fleet.stages, config.fleet.stage_split
    if split and (len(split) != n or min(split) <= 0):
        raise UsageError(f"--stage-split needs {n} shares above 0, one for each of the --stages {n}")
    layered = [LayerGraph(graph) for graph, _ in graphs.values()]
    n_layer = layered[0].n_layer
    if n > n_layer:
        raise UsageError(f"--stages {n}: the model has only {n_layer} layers")
    weights: list[set[str]] = [set() for _ in range(n_layer)]
    outside: list[set[str]] = [set(), set()]  # with the first stage, with the last
    caches: dict[Cache, int] = {}
    for one in layered:
        for node, il in one.owned():
            at = weights[il] if node.il >= 0 and il < n_layer else outside[bool(il)]
            at.update(w.name for w in node.weights())
            caches.update(dict.fromkeys(node.caches(), min(il, n_layer - 1)))
    sizes = [model.n_bytes(names) for names in weights]
    for cache, il in caches.items():
        sizes[il] += cache_bytes(cache)
    impossible = frozenset[int]().union(*(one.impossible_cuts() for one in layered))
    found = best_cuts(sizes, model.n_bytes(outside[0]), model.n_bytes(outside[1]), split or (1.0,) * n, impossible)
    if found is None:
        raise UnsupportedError(
            f"--stages {n}: {model.hp.arch} cannot be cut so often, as some of its layers use caches or values of "
            f"others; cuts are possible before layers {_ranges(set(range(1, n_layer)) - impossible) or 'none'}"
        )
    return found


def _ranges(numbers: Collection[int]) -> str:
    """Format numbers as `1-13, 15`."""
    out: list[list[int]] = []
    for i in sorted(numbers):
        if out and out[-1][1] == i - 1:
            out[-1][1] = i
        else:
            out.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in out)
