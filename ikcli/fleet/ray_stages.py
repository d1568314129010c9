"""Stages of a model in Ray actors: each on a node that has room for it, the last one where the command is if it fits.

Ray starts and watches the processes; activations go over the connections of `ikcli/engine/pipeline`, never through Ray.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ikcli.engine.pipeline.options import StageOptions
from ikcli.engine.pipeline.place import Pipeline
from ikcli.engine.pipeline.process import work
from ikcli.errors import IkError
from ikcli.fleet import files
from ikcli.fleet.ray_cluster import LOCAL, PATIENCE, RayCluster, import_ray, last_line, this_address
from ikcli.log import shown_size, warn
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.run import RunConfig

_END = 5.0  # seconds that stages get to end by themselves


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of Ray: its name for placements, its address, its memory in bytes, and whether the command runs on it."""

    id: str
    host: str
    memory: float
    is_ours: bool


def slots(nodes: Iterable[RayNode], n: int) -> list[tuple[float, RayNode]]:
    """Places for n stages, large ones first: the memory of each and its node.

    On the n nodes with most memory; if there are fewer, several stages share those that have most for each.
    """
    count = dict.fromkeys(sorted(nodes, key=lambda node: (-node.memory, node.id))[:n], 1)
    while sum(count.values()) < n:
        count[max(count, key=lambda node: node.memory / (count[node] + 1))] += 1
    found = [(node.memory / k, node) for node, k in count.items() for _ in range(k)]
    return sorted(found, key=lambda slot: -slot[0])


def place(parts: Sequence[float], nodes: Iterable[RayNode]) -> list[RayNode]:
    """The node of every stage of these bytes: large ones where most memory is.

    The last stage sends rows of the whole vocabulary to the command, so it changes places with one that is there, if
    both fit.
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


class _Actor:
    """A process that can be a stage."""

    def begun(self) -> None:
        """Answers once it is there."""

    def work(self, make: Any) -> None:
        """Be a stage until the chain ends."""
        make()


@dataclass(frozen=True, slots=True)
class _Stage:
    """Runs a stage, with the model where its node has it (see `files`)."""

    options: StageOptions

    @property
    def files(self) -> tuple[tuple[Path, str], ...]:
        """What a node must have."""
        assert self.options.config.model is not None
        return ((self.options.config.model, self.options.digest),)

    def __call__(self) -> None:
        work(self.options)


class RaySupervisor:
    """See `ikcli.engine.pipeline.supervisor.Supervisor`."""

    def __init__(self, address: str, parts: Sequence[int], n_threads: int) -> None:
        """Join the cluster and find places for stages of these bytes."""
        self._actors: list[Any] = []
        self._begun: list[Any] = []
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
        """See Supervisor."""
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
            actor = self._ray.remote(num_cpus=n_threads, scheduling_strategy=strategy)(_Actor).remote()
            self._actors.append(actor)
            self._begun.append(actor.begun.remote())
            self._ends.append(actor.work.remote(make))

    def died(self, index: int) -> str:
        """See Supervisor."""
        if time.monotonic() > self._warn_at:
            self._warn_at = math.inf
            _, waiting = self._ray.wait(self._begun, num_returns=len(self._begun), timeout=0)
            for i in (self._begun.index(ref) for ref in waiting):
                warn(f"stage {i + 1} has not begun: {self._places[i].host} has no free processors for it (-t)")
        ready, _ = self._ray.wait([self._ends[index]], timeout=0)
        if not ready:
            return ""
        try:
            self._ray.get(ready[0])
        except self._ray.exceptions.RayError as error:
            return f"its process ended: {last_line(error).partition('. ')[0]}"
        return "its process ended"

    def close(self) -> None:
        """See Supervisor."""
        if self._ends:
            self._ray.wait(self._ends, num_returns=len(self._ends), timeout=_END)
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._closing.close()


def supervise(config: RunConfig, n_bytes: Sequence[int]) -> RaySupervisor:
    """Return the supervisor of stages of `n_bytes` each, as actors of the cluster that `--ray` names."""
    assert config.fleet.ray is not None
    return RaySupervisor(config.fleet.ray, n_bytes, max(config.n_threads, config.n_threads_batch))


RAY_PIPELINE = Pipeline(supervise, shares)
