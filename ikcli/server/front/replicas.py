"""Several replicas of one model: keep them alive, check their health, restart them in turn, choose one by prefix.

A replica that ends or stops answering is started again: at once the first time, then after growing pauses.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ikcli.errors import IkError
from ikcli.server.front.asking import ask_held
from ikcli.server.front.process import LoadError, Process
from ikcli.server.front.replica import Replica, RoutingHint, choose
from ikcli.server.front.supervisor import DOWN, DRAINING, READY, ProcessSupervisor
from ikcli.server.front.upstream import UpstreamError
from ikcli.server.http.errors import ApiError
from ikcli.server.http.logs import ServerLog

_CHECK, _PATIENCE, _MISSES = 2.0, 10.0, 3  # seconds between health checks, seconds for an answer, misses allowed
_LONGEST_PAUSE, _SETTLED = 60.0, 30.0  # seconds


class ReplicaSupervisor(ProcessSupervisor[Replica, RoutingHint]):
    """Supervisor of replicas. `make(index, n)` returns the process for the n-th start of a replica.

    `least`: see `choose`. `patience` is the time in seconds that a request waits for a replica, and that running
    requests get before a restart. `one_first`: the others start after the first, so that they find its compiled
    kernels. `renew` is called before a restart of all; see ReplicaPlacement.
    """

    def __init__(
        self,
        n: int,
        n_slots: int,
        make: Callable[[int, int], Process],
        log: ServerLog,
        *,
        least: float = 0.5,
        patience: float = 600.0,
        one_first: bool = True,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(log, "replicas")
        self.replicas = [Replica(i, n_slots) for i in range(n)]
        self.opened = False
        self.failure = ""
        self.on_failure: Callable[[], None] = lambda: None
        self.settings: list[tuple[bytes, bytes]] = []
        """Paths and bodies of settings for all replicas, posted to every process that starts."""
        self._make, self._least, self._patience = make, least, patience
        self._one_first, self._renew = one_first, renew
        self._clock = itertools.count(1)
        self._rolling = False

    # --- requests ---------------------------------------------------------------------------------------------------
    def members(self) -> list[Replica]:
        """See ProcessSupervisor."""
        return self.replicas

    def _touch(self, one: Replica, hint: RoutingHint, *, begins: bool) -> None:
        """Count the start of a request: from then on the replica holds its prefix."""
        if begins:
            one.used = next(self._clock)
            one.held.add(hint.blocks)

    def _unanswered(self, one: Replica, process: Any) -> None:
        """Check the replica's health before it gets the next request."""
        one.n_unanswered += 1
        if one.process is process and one.state == READY:
            one.doubtful = True
            self._spawn(self._check(one))

    async def _pick(self, hint: RoutingHint) -> Replica:
        """Wait for a usable replica and choose one. Raise ApiError 503 after `patience`."""
        try:
            async with asyncio.timeout(self._patience or None):
                await self._until(lambda: self._closing or bool(self._usable(hint)))
        except TimeoutError:
            errors = [one.error for one in self.replicas if one.error]
            why = f": {errors[-1]}" if errors else ""
            raise ApiError(503, f"no replica became ready within {self._patience:g} seconds{why}") from None
        self._check_open()
        usable = self._usable(hint)
        if hint.question is not None:
            answers = await ask_held(usable, hint.question)
            usable = [one for one in usable if one.usable] or usable
            return choose(usable, hint.blocks, self._least, answers)
        return choose(usable, hint.blocks, self._least)

    def _usable(self, hint: RoutingHint) -> list[Replica]:
        wanted = self.replicas if hint.replica is None else [self.replicas[hint.replica]]
        return [one for one in wanted if one.usable]

    def ready(self) -> list[Replica]:
        """Return the replicas that answer."""
        return [one for one in self.replicas if one.state in (READY, DRAINING)]

    # --- lives ------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Keep all replicas alive until cancelled."""
        self._spawn(self._live(self.replicas[0]))
        if self._one_first:
            await self._until(lambda: self.opened or bool(self.failure))
        for one in self.replicas[1:]:
            self._spawn(self._live(one))
        while True:
            await asyncio.sleep(_CHECK)
            await asyncio.gather(*(self._check(one) for one in self.replicas if one.state == READY))

    async def _live(self, one: Replica) -> None:
        while not self._closing:
            began = asyncio.get_running_loop().time()
            why = await self._one_life(one)
            if asyncio.get_running_loop().time() - began > _SETTLED:
                one.n_ended = 0
            if not why or self._closing:
                continue
            one.error = why
            one.n_ended += 1
            self._log.error("replicas", "replica ended", replica=one.index, error=why)
            if not self.opened and all(other.n_ended for other in self.replicas if other.n_starts):
                self.failure = why
                self.on_failure()
                await self._notify()
                return
            await self._notify()
            if one.n_ended > 1:
                await asyncio.sleep(min(2.0 ** (one.n_ended - 2), _LONGEST_PAUSE))

    def remember(self, path: bytes, body: bytes) -> None:
        """Remember a setting for all replicas; one that sets everything of its path replaces earlier ones."""
        if path.startswith(b"/control-vectors/"):  # kept in order: ids depend on earlier loads
            if (path, body) not in self.settings[-1:]:
                self.settings.append((path, body))
        else:
            self.settings = [*(one for one in self.settings if one[0] != path), (path, body)]

    async def _one_life(self, one: Replica) -> str:
        """Run a process from start to end; return the reason for its end, or an empty text if the end was requested."""
        process = self._make(one.index, one.n_starts)
        one.doubtful = False
        one.restart.clear()
        one.held.clear()
        self._log.info("replicas", "starting replica", replica=one.index)
        try:
            await self._start(one, process)
            for path, body in self.settings:
                await process.ask("POST", path, body)
            one.state, self.opened = READY, True
            self._log.info("replicas", "replica ready", replica=one.index, where=process.where)
            await self._notify()
            return await self._until_over(one, process)
        except (LoadError, UpstreamError, OSError) as e:
            return str(e)
        finally:
            one.state = DOWN
            process.cut()
            await process.stop()
            one.counters.carry_over()
            await self._notify()

    async def _until_over(self, one: Replica, process: Process) -> str:
        ended, asked = asyncio.ensure_future(process.wait()), asyncio.ensure_future(one.restart.wait())
        try:
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                return process.last_words()
            one.state = DRAINING
            self._log.info("replicas", "draining replica", replica=one.index, requests=one.n_running)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience or None):
                    await self._until(lambda: not one.n_running)
            await one.counters.read(process)
            return ""
        finally:
            for task in (ended, asked):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _check(self, one: Replica) -> None:
        """Check a replica's health; kill it after several missed answers in a row."""
        process = one.process
        for _ in range(_MISSES):  # with pauses: a process stopped from outside may finish its requests
            if await process.healthy(timeout=_PATIENCE):
                one.doubtful = False
                await self._notify()
                return
            if one.process is not process or one.state != READY:
                return
            one.doubtful = True
            await asyncio.sleep(_CHECK)
        self._log.error("replicas", "replica does not answer", replica=one.index)
        process.kill()

    async def restart(self) -> None:
        """Restart one replica after the other, each once its requests are done.

        Raise ApiError if one does not come back.
        """
        if self._rolling:
            raise ApiError(409, "the replicas are being restarted already", "invalid_request_error")
        self._rolling = True
        try:
            await asyncio.to_thread(self._renew)
            for one in self.replicas:
                await self._restart(one)
        except IkError as e:
            raise ApiError(500, f"nothing was restarted: {e}") from None
        finally:
            self._rolling = False

    async def _restart(self, one: Replica) -> None:
        await self._until(lambda: one.state in (READY, DOWN) or self._closing)
        n_starts, n_ended = one.n_starts, one.n_ended
        if one.state == READY:
            one.restart.set()
        await self._until(
            lambda: (one.n_starts > n_starts and one.state == READY) or one.n_ended > n_ended or self._closing
        )
        self._check_open()
        if one.n_ended > n_ended:
            raise ApiError(500, f"replica {one.index} did not come back, the rest stays as it is: {one.error}")

    def restart_in_background(self) -> None:
        """Restart without waiting, and log failures."""
        self._spawn(self._restart_logged())

    async def _restart_logged(self) -> None:
        try:
            await self.restart()
        except ApiError as e:
            self._log.error("replicas", "rolling restart ended", error=e.message)
