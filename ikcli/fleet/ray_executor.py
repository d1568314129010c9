"""Units of work in Ray actors, which Ray schedules and watches on this machine or a cluster.

Every actor reads models from its node's disk (see `files`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from ikcli.errors import IkError
from ikcli.fleet import files
from ikcli.fleet.executor import TRIES, Factory, Queue
from ikcli.fleet.ray_actor import DiedError, RayActor
from ikcli.fleet.ray_cluster import LOCAL, PATIENCE, SHARE, RayCluster, this_address
from ikcli.log import log, warn


class RayExecutor:
    """Runs units in actors on a cluster (`address`) or on this machine (`local`).

    `node`: a resource that the nodes to work on offer; every actor takes `share` of it.
    """

    def __init__(self, address: str, n_workers: int, n_threads: int, node: str = "", share: float = SHARE) -> None:
        self._cluster = RayCluster(address, n_workers * n_threads, node)
        self._n_threads, self._share = n_threads, share
        self.n_workers = n_workers

    def run(self, factory: Factory, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        """Yield results; see Executor. IkError if no cluster answers at the address."""
        if not units:
            return
        with self.connected() as ray, self._shared(factory) as factory:
            n, kind = len(self._cluster.nodes()), self._cluster.node
            log(f"ray: {n} node{'s' if n > 1 else ''}{kind and f' of {kind}'}, {self.n_workers} workers")
            yield from self._run(ray, factory, units, Queue(len(units), ahead))

    @contextmanager
    def _shared(self, factory: Factory) -> Iterator[Factory]:
        """Yield a factory whose workers fetch missing files from this machine."""
        needed = files.needed_by(factory)
        if self._cluster.address == LOCAL or not needed:
            yield factory
            return
        with files.FileServer(this_address(), needed) as server:
            yield files.Fetching(factory, tuple(needed), server.url, server.token)

    def connected(self) -> AbstractContextManager[Any]:
        """Connect to the cluster; see RayCluster."""
        return self._cluster.connected()

    def _run(self, ray: Any, factory: Factory, units: Sequence[Any], queue: Queue) -> Iterator[tuple[int, Any]]:
        resources = {self._cluster.node: self._share} if self._cluster.node else {}
        team = _Team(ray, partial(RayActor, ray, factory, num_cpus=self._n_threads, resources=resources))
        for _ in range(min(self.n_workers, len(units))):
            team.begin()

        def fill() -> None:
            while queue.ready and team.idle:
                i = queue.begin()
                team.give(i, units[i])

        try:
            while queue or team.at_work:
                i, ref, actor = team.wait()
                try:
                    result, problem = actor.outcome(ref)
                except DiedError as error:
                    team.replace(actor)
                    if i is None:
                        team.failed_to_begin(str(error))
                    else:
                        queue.again(i, f"a worker died ({error})")
                    fill()
                    continue
                team.idle.append(actor)
                if problem:
                    raise IkError(problem)
                if i is not None:
                    queue.done(i)
                fill()  # before yielding, because the caller takes a while to use the result
                if i is not None:
                    yield i, result
        finally:
            team.close()


class _Team:
    """Actors that begin, are idle, or are at work. Actors that die are replaced.

    Nothing waits for a new actor, so work goes on where Ray has no place for it.
    """

    def __init__(self, ray: Any, new: Callable[[], RayActor]) -> None:
        self._ray, self._new = ray, new
        self.idle: list[RayActor] = []
        self._busy: dict[Any, tuple[RayActor, int | None]] = {}
        self._failures = 0

    @property
    def at_work(self) -> bool:
        """Whether units are under way."""
        return any(i is not None for _, i in self._busy.values())

    def begin(self) -> None:
        """Start an actor."""
        actor = self._new()
        self._busy[actor.begun] = actor, None

    def give(self, i: int, unit: Any) -> None:
        """Let an idle actor do a unit."""
        actor = self.idle.pop(0)
        self._busy[actor.call("do", unit)] = actor, i

    def wait(self) -> tuple[int | None, Any, RayActor]:
        """Return a unit that ended (None: an actor has begun), the reference to its outcome, and its actor."""
        ready, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=PATIENCE)
        if not ready:
            if not self.idle and not self.at_work:
                warn(
                    f"no worker has begun in {PATIENCE} seconds: no node of Ray has enough free processors (-t), "
                    "or workers are still loading or fetching the model"
                )
            ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        actor, i = self._busy.pop(ready[0])
        return i, ready[0], actor

    def replace(self, actor: RayActor) -> None:
        """Start another actor in place of one that died."""
        actor.kill()
        self.begin()

    def failed_to_begin(self, why: str) -> None:
        """Raise IkError if actors cannot begin at all."""
        self._failures += 1
        if self._failures >= TRIES and not self.idle and not self.at_work:
            raise IkError(f"no worker can begin on the nodes of Ray: {why}; is ik installed there?")

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.idle, *(actor for actor, _ in self._busy.values())]:
            actor.kill()
