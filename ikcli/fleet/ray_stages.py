"""Pipeline stages in Ray actors: each on a node with room for it, the last one on the command's node if it fits there.

Ray starts and watches the processes. Activations go over the connections of `ikcli/engine/pipeline`, never through Ray.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ikcli.engine.pipeline.options import StageOptions
from ikcli.engine.pipeline.place import Pipeline
from ikcli.engine.pipeline.process import work
from ikcli.errors import IkError
from ikcli.fleet import files
from ikcli.fleet.ray_actor import DiedError, RayActor
from ikcli.fleet.ray_cluster import LOCAL, PATIENCE, RayCluster, import_ray, last_line, this_address
from ikcli.log import shown_size, warn
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.run import RunConfig

_END = 5.0  # seconds that stages get to end on their own


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of Ray: its id, address and memory in bytes, and whether the command runs on it."""

    id: str
    host: str
    memory: float
    is_ours: bool


def slots(nodes: Iterable[RayNode], n: int) -> list[tuple[float, RayNode]]:
    """Return places for n stages as (memory in bytes, node), largest first.

    They are on the n nodes with most memory. If there are fewer nodes, those with most memory per stage hold several.
    """
    count = dict.fromkeys(sorted(nodes, key=lambda node: (-node.memory, node.id))[:n], 1)
    while sum(count.values()) < n:
        count[max(count, key=lambda node: node.memory / (count[node] + 1))] += 1
    found = [(node.memory / k, node) for node, k in count.items() for _ in range(k)]
    return sorted(found, key=lambda slot: -slot[0])


def place(parts: Sequence[float], nodes: Iterable[RayNode]) -> list[RayNode]:
    """Return the node of every stage, given the bytes of each: large stages go where most memory is.

    The last stage sends rows of the whole vocabulary to the command. It therefore swaps places with a stage that is on
    the command's node, if both fit.
    """
    order = sorted(range(len(parts)), key=lambda i: -parts[i])
    places = dict(zip(order, slots(nodes, len(parts)), strict=True))
    last = len(parts) - 1
    room, node = places[last]
    for i, (other_room, other) in places.items():
        if other.is_ours and not node.is_ours and parts[last] <= other_room and parts[i] <= room:
            places[i], places[last] = places[last], places[i]
            break
    return [places[i][1] for i in range(len(parts))]


def shares(fleet: BatchConfig) -> tuple[float, ...]:
    """Return the share of the model that each stage gets, in proportion to the memory of the nodes."""
    assert fleet.ray is not None
    with RayCluster(fleet.ray, fleet.stages).connected():
        rooms = [room for room, _ in slots(_nodes(), fleet.stages)]
    return tuple(round(room / sum(rooms), 4) for room in rooms)


def _nodes() -> list[RayNode]:
    ray = import_ray()
    ours = ray.get_runtime_context().get_node_id()
    found = [
        RayNode(n["NodeID"], n["NodeManagerAddress"], float(n["Resources"]["memory"]), n["NodeID"] == ours)
        for n in ray.nodes()
        if n["Alive"] and n["Resources"].get("CPU") and n["Resources"].get("memory")
    ]
    if not found:
        raise IkError("--ray: no node of Ray has processors and memory for a stage")
    return found


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage that an actor runs, with the model where its node has it (see `files`)."""

    options: StageOptions

    @property
    def files(self) -> tuple[tuple[Path, str], ...]:
        """The files a node must have."""
        assert self.options.config.model is not None
        return ((self.options.config.model, self.options.digest),)

    def __call__(self) -> _Stage:
        return self

    def work(self) -> None:
        """Run the stage until the pipeline ends."""
        work(self.options)


class RaySupervisor:
    """The supervisor of stages that are Ray actors; see `ikcli.engine.pipeline.supervisor.Supervisor`."""

    def __init__(self, address: str, parts: Sequence[int], n_threads: int) -> None:
        """Join the cluster and find places for stages of these bytes."""
        self._actors: list[RayActor] = []
        self._ends: list[Any] = []
        with ExitStack() as stack:
            stack.enter_context(RayCluster(address, len(parts) * n_threads).connected())
            self._ray, self._places = import_ray(), place(parts, _nodes())
            self.host = "127.0.0.1" if address == LOCAL else this_address()
            self._closing = stack.pop_all()
        for node in dict.fromkeys(self._places):
            here = [i for i, other in enumerate(self._places) if other == node]
            if (size := sum(parts[i] for i in here)) > node.memory:
                names = " and ".join(str(i + 1) for i in here)
                warn(
                    f"stage{'s' * (len(here) > 1)} {names} of {shown_size(size)} on {node.host}, where Ray has "
                    f"{shown_size(int(node.memory))}: what does not fit is read from disk for every token"
                )
        self._warn_at = math.inf

    def begin(self, stages: Sequence[StageOptions]) -> None:
        """Start the stages; see Supervisor."""
        self._warn_at = time.monotonic() + PATIENCE
        on_this_machine = stages[0].config.fleet.ray == LOCAL
        needed = [] if on_this_machine else files.needed_by(_Stage(stages[0]))
        if needed:
            server = self._closing.enter_context(files.FileServer(stages[0].driver[0], needed))
        place_on = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        for options, node in zip(stages, self._places, strict=True):
            n_threads = max(options.config.n_threads, options.config.n_threads_batch)
            make: Any = _Stage(options if on_this_machine else replace(options, host=node.host))
            if needed:
                make = files.Fetching(make, tuple(needed), server.url, server.token)
            strategy = place_on(node.id, soft=False)
            actor = RayActor(self._ray, make, num_cpus=n_threads, scheduling_strategy=strategy)
            self._actors.append(actor)
            self._ends.append(actor.call("work"))

    def died(self, index: int) -> str:
        """Return why a stage ended; see Supervisor."""
        if time.monotonic() > self._warn_at:
            self._warn_at = math.inf
            placed = [actor.placed for actor in self._actors]
            _, waiting = self._ray.wait(placed, num_returns=len(placed), timeout=0)
            for i in (placed.index(ref) for ref in waiting):
                warn(f"stage {i + 1} has not started: {self._places[i].host} has no free processors for it (-t)")
        ready, _ = self._ray.wait([self._ends[index]], timeout=0)
        if not ready:
            return ""
        try:
            _, problem = self._actors[index].outcome(ready[0])
        except (DiedError, self._ray.exceptions.RayError) as error:
            problem = last_line(error).partition(". ")[0]
        return f"its process ended: {problem}" if problem else "its process ended"

    def close(self) -> None:
        """End the stages and leave the cluster; see Supervisor."""
        if self._ends:
            self._ray.wait(self._ends, num_returns=len(self._ends), timeout=_END)
        for actor in self._actors:
            actor.kill()
        self._closing.close()


def supervise(config: RunConfig, n_bytes: Sequence[int]) -> RaySupervisor:
    """Return the supervisor of stages of `n_bytes` each, as actors of the cluster that `--ray` names."""
    assert config.fleet.ray is not None
    return RaySupervisor(config.fleet.ray, n_bytes, max(config.n_threads, config.n_threads_batch))


RAY_PIPELINE = Pipeline(supervise, shares)
