"""Server-sent events about models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive

from ikcli.server.front.forward import disconnected
from ikcli.server.http import sse

_MOST = 10_000
"""Events that may wait for a listener; a slower one is disconnected."""


class Events:
    """Sends events to all listeners."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes]] = set()

    def send(self, model: str, event: str, data: Any = None) -> None:
        """Send an event to all listeners; `*` is all models."""
        value = {"model": model, "event": event} | ({} if data is None else {"data": data})
        for queue in list(self._listeners):
            self._put(queue, sse.data(value))

    def _put(self, queue: asyncio.Queue[bytes], chunk: bytes) -> None:
        """Queue a chunk; an empty one ends the stream."""
        if queue.qsize() >= _MOST:
            chunk = b""
        if not chunk:
            self._listeners.discard(queue)
        queue.put_nowait(chunk)

    def close(self) -> None:
        """End all streams."""
        for queue in list(self._listeners):
            self._put(queue, b"")

    async def listen(self, receive: Receive, ping: float) -> AsyncIterator[bytes]:
        """Yield events until the client disconnects; after `ping` idle seconds (0: never), a comment."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.add(queue)
        gone = asyncio.ensure_future(disconnected(receive))
        gone.add_done_callback(lambda _: queue.put_nowait(b""))
        try:
            chunk = sse.PING  # so that the client knows that it is heard
            while chunk:
                yield chunk
                try:
                    async with asyncio.timeout(ping or None):
                        chunk = await queue.get()
                except TimeoutError:
                    chunk = sse.PING
        finally:
            self._listeners.discard(queue)
            gone.cancel()
