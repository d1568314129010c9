"""The actor on a Ray node that runs `ik serve` as a child process at the node's address.

The front asks the actor to load, to report news and to stop; requests go directly to the process. Errors are returned
as values, because Ray would wrap exceptions in its own.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ikcli import __version__
from ikcli.errors import IkError
from ikcli.fleet.ray_cluster import this_address
from ikcli.gguf import digests as digest
from ikcli.server.front.child import Child
from ikcli.server.front.environment import GPUS, plain_environment
from ikcli.server.front.process import LoadError

_PAUSE = 0.05  # seconds in which log lines are batched
_MOST_LINES = 10_000
_CHECK = 1.0  # seconds

News = tuple[list[tuple[str, bool]], str | None]
"""New log lines, each with whether it is from stderr, and the reason for the end of the process (None: it runs)."""


@dataclass(frozen=True, slots=True)
class ReplicaLaunch:
    """Launch spec of a replica on a node.

    `inputs` holds the files it reads, with digests; `grace`: see Child. `own_gpus`: it may use only the GPUs that Ray
    assigned.
    """

    name: str
    options: tuple[str, ...]
    inputs: tuple[tuple[Path, str], ...]
    key: str
    grace: float
    prefix: bool
    own_gpus: bool

    def __call__(self) -> ReplicaLaunch:
        """Check the files and return this launch spec.

        Raise IkError if a file has changed since the front started, or since a rolling restart began.
        """
        for path, wanted in self.inputs:
            if digest.of_input(path) != wanted:
                raise IkError(
                    f"{path} on node {this_address()} is another file than that of the server: to serve a new one "
                    "restart all (SIGHUP, or POST /replicas/restart), else put the same file there or remove it"
                )
        return self

    def child(self, say: Callable[[str, bool], None]) -> Child:
        """Return the process without starting it."""
        environment = plain_environment()
        if not self.own_gpus and environment.get(GPUS) == "":  # Ray hides all GPUs from actors that reserve none
            del environment[GPUS]
        return Child(
            self.name, self.options, this_address(), grace=self.grace, prefix=self.prefix, key=self.key,
            environment=environment, say=say,
        )  # fmt: skip


class ReplicaActor:
    """The actor. `start` fetches the files that the node lacks and returns a ReplicaLaunch."""

    def __init__(self, start: Callable[[], ReplicaLaunch]) -> None:
        self._start = start
        self._child: Child | None = None
        self._watch: asyncio.Future[None] | None = None
        self._node_watch: asyncio.Future[None] | None = None
        self._lines: deque[tuple[str, bool]] = deque(maxlen=_MOST_LINES)
        self._new = asyncio.Event()
        self._ended: str | None = None

    async def node(self) -> dict[str, str]:
        """Return the node's version of ik and its address."""
        self._node_watch = self._node_watch or asyncio.ensure_future(self._end_with_node())
        return {"version": __version__, "address": this_address()}

    async def load(self) -> dict[str, Any]:
        """Start the process, wait until its model is loaded, and return address and process ID, or the problem."""
        try:
            start = await asyncio.to_thread(self._start)
            self._child = start.child(self._say)
            await self._child.load()
        except (IkError, LoadError, OSError, MemoryError) as error:
            return {"problem": str(error) or type(error).__name__}
        self._watch = asyncio.ensure_future(self._until_ended(self._child))
        return {"address": self._child.address, "pid": self._child.pid}

    async def _end_with_node(self) -> None:
        """Exit when the node's own process (our parent) does: Ray leaves waiting actors behind."""
        parent = os.getppid()
        while os.getppid() == parent:
            await asyncio.sleep(_CHECK)
        await self.stop()
        os._exit(1)

    def _say(self, line: str, error: bool) -> None:
        self._lines.append((line, error))
        self._new.set()

    async def _until_ended(self, child: Child) -> None:
        await child.wait()
        await child.stop()  # collects the rest of its log
        self._ended = child.last_words()
        self._new.set()

    async def news(self) -> News:
        """Return news as soon as there is any."""
        await self._new.wait()
        if self._ended is None:
            await asyncio.sleep(_PAUSE)
        self._new.clear()
        lines = list(self._lines)
        self._lines.clear()
        return lines, self._ended

    async def stop(self) -> None:
        """End the process; running requests may finish within the grace time."""
        if self._child is not None:
            await self._child.stop()
        if self._watch is not None:
            await self._watch
        self._ended = self._ended or "it did not begin"
        self._new.set()

    async def kill(self) -> None:
        """End the process at once."""
        if self._child is not None:
            self._child.kill()
