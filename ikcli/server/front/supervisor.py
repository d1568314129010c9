"""Supervisor of the processes that answer requests.

Everything runs on one event loop. A policy decides which process a request gets, and when processes start and end:
`models.py` for several models, `replicas.py` for several replicas of one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ikcli.server.front.process import Process
from ikcli.server.front.upstream import Upstream, UpstreamError
from ikcli.server.http.errors import ApiError
from ikcli.server.http.logs import ServerLog

DOWN, STARTING, READY, DRAINING = "down", "starting", "ready", "draining"


@dataclass(eq=False, kw_only=True)
class Member:
    """Place for one process, which the supervisor fills and empties.

    `used` is the time of its last use, by its clock.
    """

    state: str = DOWN
    process: Any = None
    n_running: int = 0
    n_starts: int = 0
    used: float = 0.0


M = TypeVar("M", bound=Member)
Hint = TypeVar("Hint")
"""A hint by which the supervisor chooses the process for a request."""


class ProcessSupervisor(ABC, Generic[M, Hint]):
    """See the module. `area` is the supervisor's name in the log."""

    def __init__(self, log: ServerLog, area: str) -> None:
        self._log, self._area = log, area
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    # --- the policy ---------------------------------------------------------------------------------------------------
    @abstractmethod
    def members(self) -> Sequence[M]:
        """Return all places for processes."""

    @abstractmethod
    async def run(self) -> None:
        """Do the ongoing work while the server listens, until cancelled."""

    @abstractmethod
    async def _pick(self, hint: Hint) -> M:
        """Return a ready member, waiting for one if necessary. Raise ApiError if there is none."""

    @abstractmethod
    def _touch(self, one: M, hint: Hint, *, begins: bool) -> None:
        """Note that a request begins or ends."""

    def _unanswered(self, one: M, process: Any) -> None:
        """Note that a process did not answer a request."""

    # --- requests -----------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def lease(self, hint: Hint) -> AsyncIterator[Upstream]:
        """Lend a request its process, which stays until the end of the block. Raise ApiError if there is none."""
        one = await self._pick(hint)
        process = one.process
        one.n_running += 1
        self._touch(one, hint, begins=True)
        try:
            yield process
        except UpstreamError:
            self._unanswered(one, process)
            raise
        finally:
            one.n_running -= 1
            self._touch(one, hint, begins=False)
            await self._notify()

    # --- the lives of processes ---------------------------------------------------------------------------------------
    async def _start(self, one: M, process: Process) -> None:
        """Start a process in its place and wait until its model is loaded. Raise LoadError if that fails."""
        one.process, one.state = process, STARTING
        one.n_starts += 1
        await process.load()

    async def close(self) -> None:
        """End all processes once their requests are done."""
        self._closing = True
        await self._notify()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """End all processes at once."""
        for one in self.members():
            if one.process is not None and one.state != DOWN:
                one.process.kill()

    def _check_open(self) -> None:
        if self._closing:
            raise ApiError(503, "The server is shutting down")

    # --- state that changes -------------------------------------------------------------------------------------------
    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, checking it at every change."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        """Wake all waiters after a change."""
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the background until the supervisor is closed."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error(self._area, "internal error", error=f"{type(error).__name__}: {error}")
