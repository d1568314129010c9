"""Server-sent events about models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Receive

from ikcli.server.front.forward import disconnected
from ikcli.server.http import sse

_MOST = 10_000
"""Maximum number of events waiting for a listener; a slower one is disconnected."""


class Events:
    """Sender of events to all listeners."""

    def __init__(self) -> None:
        self._listeners: set[asyncio.Queue[bytes]] = set()

    def send(self, model: str, event: str, data: Any = None) -> None:
        """Send an event to all listeners; model `*` means all models."""
        value = {"model": model, "event": event} | ({} if data is None else {"data": data})
        for queue in list(self._listeners):
            self._put(queue, sse.data(value))

    def _put(self, queue: asyncio.Queue[bytes], chunk: bytes) -> None:
        """Queue a chunk for a listener; an empty one ends the stream."""
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
        """Yield events until the client disconnects, and a comment after `ping` idle seconds (0: never)."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners.add(queue)
        gone = asyncio.ensure_future(disconnected(receive))
        gone.add_done_callback(lambda _: queue.put_nowait(b""))
        try:
            chunk = sse.PING  # shows the client that it is connected
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
