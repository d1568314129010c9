"""State on one event loop that changes: waiting for it, and work in the background that changes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ikcli.server.http.logs import ServerLog

T = TypeVar("T")


class Changing:
    """What the keepers of processes have in common. `area` is theirs in the log."""

    def __init__(self, log: ServerLog, area: str) -> None:
        self._log, self._area = log, area
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until it is true; it is asked at every change."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        """Something has changed."""
        async with self._changed:
            self._changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it in the background, until `_end_work`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error(self._area, "internal error", error=f"{type(error).__name__}: {error}")

    async def _end_work(self) -> None:
        """Cancel what is done in the background, and wait for its end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def in_thread(call: Callable[[], T]) -> T:
    """What it returns or raises; the program does not wait for it when it ends, as for threads of asyncio."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = call()
        except Exception as e:
            _on(loop, done, lambda e=e: done.set_exception(e))  # type: ignore[misc]
        else:
            _on(loop, done, lambda: done.set_result(result))

    threading.Thread(target=work, daemon=True).start()
    return await done


def _on(loop: asyncio.AbstractEventLoop, done: asyncio.Future[T], call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(lambda: None if done.done() else call())
