"""Units of work in Ray actors: scheduled, restarted and watched by Ray, on this machine or a cluster.

Ray is imported by this file alone. Models are read by every actor from its own disk (see `files`).
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ikcli.errors import IkError, UnsupportedError
from ikcli.fleet import files
from ikcli.fleet.executor import TRIES, Factory, Queue, Worker
from ikcli.log import log, warn

PATIENCE = 60
"""Seconds after which who waits for a place on a node is told why."""
_KNOCK = 10  # seconds

_SHARE = 0.001  # of a resource that only names a kind of node
_PLAIN = ("CPU", "GPU", "memory", "object_store_memory")

LOCAL = "local"
"""The address that starts Ray on this machine for the time of a run."""


def load_ray() -> Any:
    """Ray, which is imported when it is asked for; UnsupportedError without it."""
    if importlib.util.find_spec("ray") is None:
        raise UnsupportedError('--ray needs Ray, which is not installed: pip install "ikcli[ray]"')
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray._private import worker

    # what Ray says about its nodes goes to stdout, where results are
    plain = getattr(worker, "print_to_stdstream", None)
    if plain is not None and not isinstance(plain, _ToStderr):
        worker.print_to_stdstream = _ToStderr(plain)
    return ray


class _ToStderr:
    """What prints the lines of others, with all of them on stderr."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __call__(self, data: Any, *args: Any, **names: Any) -> None:
        self._plain({**data, "is_err": True}, *args, **names)


class _Actor:
    """Holds a worker on its node. Errors of ours are values here: Ray would wrap them in its own."""

    def __init__(self, factory: Factory) -> None:
        self._worker: Worker | None = None
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

    def __init__(self, address: str, n_workers: int, n_threads: int, node: str = "", share: float = _SHARE) -> None:
        self._address, self._n_threads, self._node, self._share = address, n_threads, node, share
        self.n_workers = n_workers

    def run(self, factory: Factory, units: Sequence[Any], ahead: int | None = None) -> Generator[tuple[int, Any]]:
        """See Executor; IkError if there is no cluster at the address."""
        if not units:
            return
        with self.connected(), self._shared(factory) as factory:
            yield from self._run(load_ray(), factory, units, Queue(len(units), ahead))

    @contextmanager
    def _shared(self, factory: Factory) -> Iterator[Factory]:
        """A factory whose workers fetch from here what their nodes do not have."""
        needed = files.needed_by(factory)
        if self._address == LOCAL or not needed:
            yield factory
            return
        with files.FileServer(load_ray().util.get_node_ip_address(), needed) as server:
            yield files.Fetching(factory, tuple(needed), server.url, server.token)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connected to the cluster, which it may be already."""
        ray = load_ray()
        mine = not ray.is_initialized()
        if mine:
            self._connect(ray)
        try:
            yield
        finally:
            if mine:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
        try:
            self._knock()
            if self._address == LOCAL:
                cpus = max(1, self.n_workers * self._n_threads)
                offered = {self._node: 1} if self._node else None
                ray.init(num_cpus=cpus, resources=offered, include_dashboard=False, **options)
            else:
                ray.init(address=self._address, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise IkError(f"--ray {self._address}: no cluster answers there: {reason}") from None
        nodes = [n for n in ray.nodes() if n["Alive"]]
        log(f"ray: {len(nodes)} node{'s' if len(nodes) > 1 else ''}, {self.n_workers} workers")

    def _knock(self) -> None:
        """OSError if nobody listens at the address, for which Ray itself waits many minutes."""
        address = os.environ.get("RAY_ADDRESS", "") if self._address == "auto" else self._address
        host, found, port = address.rpartition("://")[2].rpartition(":")
        if found and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), _KNOCK).close()

    def _check_node(self, ray: Any) -> None:
        """IkError if no node offers the resource."""
        offered = sorted(name for name in ray.cluster_resources() if ":" not in name and name not in _PLAIN)
        if self._node and self._node not in offered:
            there = f"they offer {', '.join(offered)}" if offered else "they offer none"
            raise IkError(
                f"--ray-node {self._node}: no node of Ray has this resource, {there}; "
                f"""begin a node with ray start --resources '{{"{self._node}": 1}}'"""
            )

    def _run(self, ray: Any, factory: Factory, units: Sequence[Any], queue: Queue) -> Iterator[tuple[int, Any]]:
        self._check_node(ray)
        resources = {self._node: self._share} if self._node else {}
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


def last_line(error: Exception) -> str:
    """What is worth showing of an error of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
