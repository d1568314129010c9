"""Threads that report to the event loop and do not keep the program from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread and return or raise its result.

    Unlike with asyncio's threads, the program does not wait for the call when it ends.
    """
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
    """Schedule a call on a loop; do nothing if the loop has ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)
