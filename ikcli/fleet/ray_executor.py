"""Units of work in Ray actors: scheduled, restarted and watched by Ray, on this machine or a cluster.

Ray is imported by this file alone. Units and results are small; models are read by every actor from its own disk.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ikcli.errors import IkError, UnsupportedError
from ikcli.fleet.executor import Factory, again
from ikcli.log import log

LOCAL = "local"
"""The address that starts Ray on this machine for the time of a run."""


def _ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise UnsupportedError('--ray needs Ray, which is not installed: pip install "ikcli[ray]"')
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    return ray


class _Actor:
    """Holds a worker on its node."""

    def __init__(self, factory: Factory) -> None:
        self._worker = factory()

    def do(self, unit: Any) -> Any:
        """A result, or an error of ours as a value: Ray would wrap it in its own."""
        try:
            return self._worker.do(unit), None
        except IkError as error:
            return None, (type(error).__name__, str(error))


class RayExecutor:
    """Actors on a cluster (`address`) or on this machine (`local`)."""

    def __init__(self, address: str, n_workers: int, n_threads: int) -> None:
        self._address, self._n_threads = address, n_threads
        self.n_workers = n_workers

    def run(self, factory: Factory, units: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """See Executor; IkError if there is no cluster at the address."""
        if not units:
            return
        ray = _ray()
        mine = not ray.is_initialized()
        if mine:
            self._connect(ray)
        try:
            yield from self._run(ray, factory, units)
        finally:
            if mine:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
        try:
            if self._address == LOCAL:
                cpus = max(1, self.n_workers * self._n_threads)
                ray.init(num_cpus=cpus, include_dashboard=False, **options)
            else:
                ray.init(address=self._address, **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise IkError(f"--ray {self._address}: no cluster answers there: {reason}") from None
        nodes = [n for n in ray.nodes() if n["Alive"]]
        log(f"ray: {len(nodes)} node{'s' if len(nodes) > 1 else ''}, {self.n_workers} workers")

    def _run(self, ray: Any, factory: Factory, units: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        remote = ray.remote(num_cpus=self._n_threads)(_Actor)
        todo, tries = list(range(len(units)))[::-1], [0] * len(units)
        idle = [remote.remote(factory) for _ in range(min(self.n_workers, len(units)))]
        busy: dict[Any, tuple[Any, int]] = {}
        while todo or busy:
            while todo and idle:
                actor, i = idle.pop(0), todo.pop()
                tries[i] += 1
                busy[actor.do.remote(units[i])] = actor, i
            for ref in ray.wait(list(busy), num_returns=1)[0]:
                actor, i = busy.pop(ref)
                try:
                    result, problem = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    if isinstance(error, ray.exceptions.ActorDiedError) and "IkError" in str(error):
                        raise IkError(f"a worker cannot begin: {_last_line(error)}") from None
                    again(i, tries[i], "a worker died", todo)
                    idle.append(remote.remote(factory))
                    continue
                if problem is not None:
                    raise IkError(f"{problem[1]}")
                idle.append(actor)
                yield i, result


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(": ", 1)[-1] if lines else type(error).__name__
