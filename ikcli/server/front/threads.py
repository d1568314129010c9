"""Work in threads that reports to the event loop, and does not keep the program from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Return or raise what the call does; unlike a thread of asyncio it is not waited for when the program ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        on_loop(loop, lambda: None if done.done() else set_it())

    def work() -> None:
        try:
            result = call()
        except Exception as e:
            settle(lambda e=e: done.set_exception(e))  # type: ignore[misc]
        else:
            settle(lambda: done.set_result(result))

    threading.Thread(target=work, daemon=True).start()
    return await done


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Have a loop call this; a loop that has ended no longer does."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
