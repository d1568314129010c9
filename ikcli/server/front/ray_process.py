"""The front's side of a replica on a node of Ray: an actor runs it, requests go directly to its address."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from ikcli import __version__
from ikcli.fleet.ray_cluster import last_line
from ikcli.server.front.process import LoadError, Process, print_line

_PATIENCE = 60.0  # seconds until a missing node is reported
_MORE, _KILLED = 10.0, 3.0  # extra seconds for a node to end a process: beyond its grace time; if it must end at once


class RayProcess(Process):
    """A process behind the actor that `begin` creates. `no_room` is called while no Ray node has room for it."""

    def __init__(
        self, ray: Any, begin: Callable[[], Any], *, key: str, grace: float, no_room: Callable[[], None]
    ) -> None:
        super().__init__(("", 0), key)
        self._ray, self._begin, self._grace, self._no_room = ray, begin, grace, no_room
        self._actor: Any = None
        self._node = ""
        self._pid = 0
        self._over = asyncio.Event()
        self._why = ""
        self._killed = False
        self._following: asyncio.Future[None] | None = None

    @property
    def where(self) -> str:
        """See Process."""
        if not self._node:
            return "no node yet"
        return f"node {self._node}, process {self._pid}" if self._pid else f"node {self._node}"

    async def load(self) -> None:
        """See Process. Raise LoadError if the node cannot load the model, or is lost meanwhile."""
        try:
            # in a thread, because Ray may wait for its head node here
            self._actor = await asyncio.to_thread(self._begin)
            await self._place()
            self._following = asyncio.ensure_future(self._follow())
            started = await self._actor.load.remote()
        except self._ray.exceptions.RayError as error:
            self._end(f"its node is lost: {last_line(error)}")
            raise LoadError(self._why) from None
        if "problem" in started:
            raise LoadError(started["problem"])
        self.address, self._pid = tuple(started["address"]), started["pid"]

    async def _place(self) -> None:
        found = asyncio.ensure_future(self._ask_node())
        try:
            while not (await asyncio.wait((found,), timeout=_PATIENCE))[0]:
                self._no_room()
        except asyncio.CancelledError:
            found.cancel()
            raise
        about = found.result()
        self._node = about["address"]
        if about["version"] != __version__:
            raise LoadError(
                f"node {self._node} has ik {about['version']}, the front is {__version__}; install the same on all"
            )

    async def _ask_node(self) -> dict[str, str]:
        try:
            return dict(await self._actor.node.remote())
        except self._ray.exceptions.RayError as error:
            self._end("its actor could not begin")
            raise LoadError(
                f"no actor can begin on a node of Ray: {last_line(error)}; is ik installed there?"
            ) from None

    async def _follow(self) -> None:
        """Relay its log until it ends."""
        try:
            ended = None
            while ended is None:
                lines, ended = await self._actor.news.remote()
                for text, error in lines:
                    print_line(text, error)
            self._end(ended)
        except self._ray.exceptions.RayError as error:
            self._end(f"its node is lost: {last_line(error)}")

    def _end(self, why: str) -> None:
        self._why = self._why or why
        self._over.set()

    async def wait(self) -> None:
        """See Process."""
        await self._over.wait()

    def last_words(self) -> str:
        """See Process."""
        return self._why or "it does not answer"

    async def stop(self) -> None:
        """See Process."""
        if self._actor is None:
            return
        if self._node and not (self._over.is_set() and not self._killed):
            with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
                async with asyncio.timeout(_KILLED if self._killed else self._grace + _MORE):
                    await self._actor.stop.remote()
                    if self._following is not None:
                        await self._following  # collects the rest of its log
        if self._following is not None:
            self._following.cancel()
        await asyncio.to_thread(self._release)
        self._end("it was stopped")

    def _release(self) -> None:
        """Kill the actor, since one that is merely unreachable would keep its reservation."""
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
            self._ray.kill(self._actor)

    def kill(self) -> None:
        """See Process; the node may be gone."""
        self._killed = True
        if self._node:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._actor.kill.remote()
        self._end("it did not answer")
