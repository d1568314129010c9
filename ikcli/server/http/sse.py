"""Server-sent events: framing as llama-server writes it, and a response that sends chunks without any layer between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ikcli.server.http.jsontext import dump_bytes

JSON_LINES = "application/x-ndjson"
DONE = b"data: [DONE]\n\n"
PING = b":\n\n"


def line(value: Any) -> bytes:
    """Return one line of a stream of JSON lines, which Ollama uses instead of events."""
    return dump_bytes(value) + b"\n"


def data(value: Any) -> bytes:
    """Return one event without a name."""
    return b"data: " + dump_bytes(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """Return one event named after its `type`."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + dump_bytes(value) + b"\n\n"


class EventStream(Response):
    """Response that sends the chunks of an iterator as they come.

    `cleanup` runs before the client sees the end, whatever caused it. A client that reads nothing for `timeout` seconds
    (0: unlimited) is dropped.
    """

    def __init__(
        self,
        chunks: AsyncIterator[bytes],
        cleanup: Callable[[], None],
        timeout: float = 0,
        media_type: str = "text/event-stream",
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.body = b""
        self.raw_headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
        self._chunks = chunks
        self._cleanup = cleanup
        self._timeout = timeout
        self._sending = False
        self._sent = 0
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        if self._timeout and task is not None:
            self._watch(task, -1, 0)
        try:
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for chunk in self._chunks:
                    self._sending = True
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    self._sending = False
                    self._sent += 1
            finally:
                self._cleanup()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _watch(self, task: asyncio.Task[Any], sent: int, stuck: int) -> None:
        """Cancel the task if every check during the timeout found it in the same send."""
        stuck = stuck + 1 if self._sending and sent == self._sent else 0
        if stuck > 4:
            task.cancel()
            return
        self._timer = asyncio.get_running_loop().call_later(self._timeout / 4, self._watch, task, self._sent, stuck)
