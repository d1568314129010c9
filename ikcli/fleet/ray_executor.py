"""Units of work in Ray actors: scheduled, restarted and watched by Ray, on this machine or a cluster.

Models are read by every actor from its own disk (see `files`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from ikcli.errors import IkError
from ikcli.fleet import files
from ikcli.fleet.executor import TRIES, Factory, Queue, UnitWorker
from ikcli.fleet.ray_cluster import LOCAL, PATIENCE, SHARE, RayCluster, last_line, this_address
from ikcli.log import log, warn


class _Actor:
    """Holds a worker on its node. Errors of ours are values here: Ray would wrap them in its own."""

    def __init__(self, factory: Factory) -> None:
        self._worker: UnitWorker | None = None
        self._problem = ""
        try:
            self._worker = factory()
        except (IkError, OSError, MemoryError) as error:
            self._problem = _sentence(error)

    def begun(self) -> tuple[Any, str]:
        """Nothing, or what is wrong."""
        return None, self._problem

    def do(self, unit: Any) -> tuple[Any, str]:
        """A result, or what is wrong."""
        assert self._worker is not None
        try:
            return self._worker.do(unit), ""
        except (IkError, OSError, MemoryError) as error:
            return None, _sentence(error)


class RayExecutor:
    """Actors on a cluster (`address`) or on this machine (`local`).

    `node`: a resource that the nodes to work on offer, of which every actor takes `share`.
    """

    def __init__(self, address: str, n_workers: int, n_threads: int, node: str = "", share: float = SHARE) -> None:
        self._cluster = RayCluster(address, n_workers * n_threads, node)
        self._n_threads, self._share = n_threads, share
        self.n_workers = n_workers

    def run(self, factory: Factory, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        """See Executor; IkError if there is no cluster at the address."""
        if not units:
            return
        with self.connected() as ray, self._shared(factory) as factory:
            n, kind = len(self._cluster.nodes()), self._cluster.node
            log(f"ray: {n} node{'s' if n > 1 else ''}{kind and f' of {kind}'}, {self.n_workers} workers")
            yield from self._run(ray, factory, units, Queue(len(units), ahead))

    @contextmanager
    def _shared(self, factory: Factory) -> Iterator[Factory]:
        """A factory whose workers fetch from here what their nodes do not have."""
        needed = files.needed_by(factory)
        if self._cluster.address == LOCAL or not needed:
            yield factory
            return
        with files.FileServer(this_address(), needed) as server:
            yield files.Fetching(factory, tuple(needed), server.url, server.token)

    def connected(self) -> AbstractContextManager[Any]:
        """See RayCluster."""
        return self._cluster.connected()

    def _run(self, ray: Any, factory: Factory, units: Sequence[Any], queue: Queue) -> Iterator[tuple[int, Any]]:
        resources = {self._cluster.node: self._share} if self._cluster.node else {}
        crew = _Crew(ray, ray.remote(num_cpus=self._n_threads, resources=resources)(_Actor), factory)
        for _ in range(min(self.n_workers, len(units))):
            crew.begin()

        def fill() -> None:
            while queue.ready and crew.idle:
                i = queue.begin()
                crew.give(i, units[i])

        try:
            while queue or crew.at_work:
                ended, (result, problem), died = crew.wait()
                if died and ended is None:
                    crew.failed_to_begin(died)
                elif died and ended is not None:
                    queue.again(ended, f"a worker died ({died})")
                elif problem:
                    raise IkError(problem)
                elif ended is not None:
                    queue.done(ended)
                fill()  # before the result is used, which takes a while
                if ended is not None and not died:
                    yield ended, result
        finally:
            crew.close()


class _Crew:
    """Actors: those that begin, those that are idle, those at work. A new one works only when it has begun.

    What dies is replaced. As nothing waits for the new one, work goes on where there is no place for it.
    """

    def __init__(self, ray: Any, remote: Any, factory: Factory) -> None:
        self._ray, self._remote, self._factory = ray, remote, factory
        self.idle: list[Any] = []
        self._busy: dict[Any, tuple[Any, int | None]] = {}
        self._failures = 0
        found = ray.exceptions  # a result may be lost with its node, too
        self._died = (found.RayActorError, found.ObjectLostError, found.NodeDiedError, found.WorkerCrashedError)

    @property
    def at_work(self) -> bool:
        """Whether units are under way."""
        return any(i is not None for _, i in self._busy.values())

    def begin(self) -> None:
        """Start an actor."""
        actor = self._remote.remote(self._factory)
        self._busy[actor.begun.remote()] = actor, None

    def give(self, i: int, unit: Any) -> None:
        """Let an idle actor do a unit."""
        actor = self.idle.pop(0)
        self._busy[actor.do.remote(unit)] = actor, i

    def wait(self) -> tuple[int | None, tuple[Any, str], str]:
        """The unit that ended (None: an actor has begun), its result or what is wrong, and of what its actor died."""
        ready, _ = self._ray.wait(list(self._busy), num_returns=1, timeout=PATIENCE)
        if not ready:
            if not self.idle and not self.at_work:
                warn(
                    f"no worker has begun in {PATIENCE} seconds: no node of Ray has the processors for one (-t), "
                    "or they still load or fetch the model"
                )
            ready, _ = self._ray.wait(list(self._busy), num_returns=1)
        ref = ready[0]
        actor, i = self._busy.pop(ref)
        try:
            found = self._ray.get(ref)
        except self._died as error:
            self._kill(actor)  # where it is only out of reach, it would keep its place
            self.begin()
            return i, (None, ""), last_line(error)
        self.idle.append(actor)
        return i, found, ""

    def failed_to_begin(self, why: str) -> None:
        """IkError if actors cannot begin at all."""
        self._failures += 1
        if self._failures >= TRIES and not self.idle and not self.at_work:
            raise IkError(f"no worker can begin on the nodes of Ray: {why}; is ik installed there?")

    def close(self) -> None:
        """End all actors."""
        for actor in [*self.idle, *(actor for actor, _ in self._busy.values())]:
            self._kill(actor)

    def _kill(self, actor: Any) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(actor)


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, IkError) else f"a worker failed: {error or type(error).__name__}"
