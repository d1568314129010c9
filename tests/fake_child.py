"""A process of a model that is none, for tests of what loads and unloads it."""

from __future__ import annotations

import asyncio
from typing import Any

from ikcli.server.router.child import LoadError
from ikcli.server.router.entries import ModelEntry


class FakeChild:
    """`broken`: the names of models that cannot be loaded."""

    broken: frozenset[str] = frozenset()

    def __init__(self, entry: ModelEntry, journal: list[str]) -> None:
        self.name, self.journal = entry.name, journal
        self.exit_code: int | None = None
        self.socket = ""
        self._ended = asyncio.Event()

    async def load(self) -> None:
        self.journal.append(f"+{self.name}")
        await asyncio.sleep(0.01)
        if self.name in self.broken:
            self.exit_code = 1
            raise LoadError("the file is broken")

    async def wait(self) -> None:
        await self._ended.wait()

    async def stop(self) -> None:
        self.journal.append(f"-{self.name}")
        self.exit_code = 0
        self._ended.set()

    def kill(self) -> None:
        self.die()

    def die(self) -> None:
        self.exit_code = -9
        self._ended.set()

    def last_words(self) -> str:
        return "its process ended by signal SIGKILL"

    async def described(self) -> dict[str, Any]:
        return {"model": {"meta": {"name": self.name}}}

    async def answer(self, target: bytes) -> tuple[int, bytes]:
        return 200, b'{"is_sleeping": false}'
