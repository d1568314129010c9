"""Split a graph between devices: which device computes a node, and in which order the devices run.

Nodes with weights are computed where the weights are, cache and attention where the cache is, and the rest where its
inputs are: `Op.place`. Small values that every device can make for itself are made on each that needs them. A schedule
is a list of splits (`GraphSplit`, as in ggml). A split is a run of nodes of one device that depends on earlier splits
only. Values that another device waits for come first: a split is cut behind them, so that the rest runs while the other
device works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ikcli.graph.core import Cache, Node, Place, Weight
from ikcli.graph.recorder import Graph


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """Devices of weights as ops use them, of a layer's cache, and of a layer's sums (-1: outside of layers)."""

    weight: Callable[[Node, Weight], str]
    cache: Callable[[int], str]
    home: Callable[[int], str]


@dataclass(slots=True)
class GraphSplit:
    """A split: nodes that one device computes in a row; `imports` arrive before them, `exports` leave afterwards."""

    device: str
    nodes: list[Node]
    imports: list[Node] = field(default_factory=list)
    exports: list[Node] = field(default_factory=list)
    after: tuple[int, ...] = ()  # indices of splits on other devices that must be done first


def assign(graph: Graph, places: NodePlaces) -> dict[Node, str]:
    """Return the device of every node except the repeated ones."""
    device: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op.place is not Place.EVERYWHERE:
            device[node] = _device(node, places, device)
    return device


def _device(node: Node, places: NodePlaces, device: dict[Node, str]) -> str:
    if node.op.place is Place.HOST:
        return places.home(-1)
    cache = next(node.caches(), None)
    if cache is not None:
        return places.cache(cache.il)
    weight = next(node.weights(), None)
    if weight is not None and node.op.place is Place.WEIGHT:
        return places.weight(node, weight)
    found = [device[x] for x in node.nodes() if x in device]
    if found and (len(set(found)) == 1 or node.op.place is Place.FIRST_INPUT):
        return found[0]
    return places.home(node.il)


@dataclass(frozen=True, slots=True)
class _Task:
    """A node on a device; `index` is the place in the graph."""

    node: Node
    device: str
    needs: frozenset[tuple[Node, str]]  # of this device or, where it has no such task, of another


def schedule(
    graph: Graph, device: dict[Node, str], result: Node, *, cut: Iterable[str] = (), states: Node | None = None
) -> list[GraphSplit]:
    """Order the nodes of an assigned graph into splits.

    `cut`: devices that continue while others wait for their values. `states`: a second result.
    """
    tasks = _tasks(graph, device)
    cutting = set(cut)
    left = list(tasks)
    done: set[tuple[Node, str]] = set()
    turns: list[GraphSplit] = []
    while left:
        current = next((t for t in left if t.node.op.place is not Place.EVERYWHERE), left[0]).device
        taken, rest = _take(left, current, done)
        early = _early(taken, current)
        if early:
            taken, rest = early, [t for t in left if t not in set(early)]
        parts = _divide(taken, left, current) if current in cutting else [taken]
        for part in parts:
            turns.append(GraphSplit(current, [t.node for t in part]))
        done |= {(t.node, current) for t in taken}
        left = rest
    _connect(turns, device, [result] if states is None else [result, states])
    return turns


def _tasks(graph: Graph, device: dict[Node, str]) -> list[_Task]:
    """Return one task per node (repeated nodes: one per device that needs them), in the order of the graph."""
    users: dict[Node, set[str]] = {}
    for node in reversed(graph.nodes):
        own = {device[node]} if node in device else users.get(node, set())
        for x in node.nodes():
            if x not in device:
                users.setdefault(x, set()).update(own)
    tasks: list[_Task] = []
    stores: dict[Cache, tuple[Node, str]] = {}
    readers: dict[Cache, list[tuple[Node, str]]] = {}
    for node in graph.nodes:
        for where in [device[node]] if node in device else sorted(users.get(node, set())):
            needs = {(x, device.get(x, where)) for x in node.nodes()}
            for cache in node.caches():
                if cache in stores:
                    needs.add(stores[cache])
                if node.op.stores:
                    needs.update(readers.pop(cache, []))
                    stores[cache] = (node, where)
                else:
                    readers.setdefault(cache, []).append((node, where))
            tasks.append(_Task(node, where, frozenset(needs)))
    return tasks


def _take(left: Sequence[_Task], device: str, done: set[tuple[Node, str]]) -> tuple[list[_Task], list[_Task]]:
    """Return all tasks of the device that can run now, one after the other, and the others."""
    ready = set(done)
    taken: list[_Task] = []
    rest: list[_Task] = []
    for task in left:
        if task.device == device and task.needs <= ready:
            ready.add((task.node, device))
            taken.append(task)
        else:
            rest.append(task)
    return taken, rest


def _early(taken: list[_Task], device: str) -> list[_Task]:
    """Return the tasks that end a split (`Op.ends_split`) with their own inputs, if there are any."""
    last = [t for t in taken if t.node.op.ends_split]
    return _with_inputs(taken, [last[0], *(t for t in last if t.node.il == last[0].node.il)], device) if last else []


def _with_inputs(taken: list[_Task], wanted: list[_Task], device: str) -> list[_Task]:
    own = {t.node: t for t in taken}
    found: set[Node] = set()
    left = list(wanted)
    while left:
        task = left.pop()
        if task.node not in found:
            found.add(task.node)
            left += [own[n] for n, where in task.needs if where == device and n in own]
    return [t for t in taken if t.node in found]


def _divide(taken: list[_Task], left: Sequence[_Task], device: str) -> list[list[_Task]]:
    """Return the tasks that other devices depend on, with their own inputs, then the tasks that can wait."""
    own = {t.node: t for t in taken}
    wanted = [own[n] for t in left if t.device != device for n, where in t.needs if where == device and n in own]
    first = _with_inputs(taken, wanted, device)
    names = {t.node for t in first}
    return [p for p in (first, [t for t in taken if t.node not in names]) if p]


def _connect(turns: list[GraphSplit], device: dict[Node, str], results: Sequence[Node]) -> None:
    """Fill in the values that pass from one split to another."""
    made = {(n, t.device): i for i, t in enumerate(turns) for n in t.nodes}
    imported: set[tuple[Node, str]] = set()
    for turn in turns:
        after = set()
        for node in turn.nodes:
            for x in node.nodes():
                if (x, turn.device) in made or (x, turn.device) in imported:
                    continue
                source = made[x, device[x]]
                turn.imports.append(x)
                imported.add((x, turn.device))
                after.add(source)
                if x not in turns[source].exports:
                    turns[source].exports.append(x)
        turn.after = tuple(sorted(after))
    for result in results:
        last = turns[made[result, device[result]]]
        if result not in last.exports:
            last.exports.append(result)
