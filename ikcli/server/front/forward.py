"""Forward a request to a process and stream the answer back.

When a client disconnects, its request in the process is cancelled too. If a process fails before the answer has begun,
the request can go to another process. An answer that has begun is cut off, so that the client notices.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ikcli.server.front.upstream import Exchange, Upstream, UpstreamError
from ikcli.server.http import jsontext
from ikcli.server.http.errors import ApiError
from ikcli.server.http.held import HELD
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.shapes.common import random_id
from ikcli.server.http.usage import REQUEST_ID
from ikcli.server.http.users import ACCOUNT, Account

_NOT_PASSED = frozenset({b"authorization", b"x-api-key", b"origin", b"accept-encoding", REQUEST_ID, HELD})
_NOT_RETURNED = frozenset({b"server", b"date", b"vary"})
_WITHOUT_BODY = frozenset({204, 304})
"""Statuses whose responses have no body, whatever their length header says."""
_PLAIN = "/:@!$&'()*+,;=~"  # characters that a path may contain unquoted
_ASK = 20  # attempts to read a request's usage after its client left

Lease = Callable[[], AbstractAsyncContextManager[Upstream]]
"""Lends a request its process until the end of the block."""


class Forwarded(Response):
    """The answer of another process.

    `what` is the name of the process in errors, `tries` the maximum number of processes asked. With several tries,
    status 503 counts as a failure: the process is shutting down.
    """

    def __init__(self, request: Request, body: bytes, lease: Lease, log: ServerLog, what: str, tries: int = 1) -> None:
        self.status_code = 502
        self.background = None
        self._request, self._body, self._lease, self._log = request, body, lease, log
        self._what, self._tries = what, tries
        self._id, self._started, self._ended, self._ok = random_id(), False, False, False
        self._account: Account | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._account = scope.get(ACCOUNT)
        work = asyncio.ensure_future(self._answer(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done() or self._ended:  # everything is sent; usage is counted next
                await work
        finally:
            for task in (work, gone):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, UpstreamError, ApiError):
                    await task

    async def _answer(self, send: Send) -> None:
        for left in reversed(range(self._tries)):
            try:
                async with self._lease() as upstream:
                    await self._pass(upstream, send, last=not left)
                return
            except UpstreamError as e:
                self._log.error("router", "no answer", asked=self._what, error=str(e), tries_left=left)
                if self._started:
                    return  # no final chunk, so the connection is cut
                if not left:
                    raise ApiError(502, f"{self._what} did not answer: {upstream.last_words()}") from None

    async def _pass(self, upstream: Upstream, send: Send, *, last: bool) -> None:
        request = self._request
        headers = [(name, value) for name, value in request.headers.raw if name not in _NOT_PASSED]
        if self._account is not None:
            headers.append((REQUEST_ID, self._id.encode()))
        left = b""
        try:
            async with Exchange(upstream, request.method, target_of(request), headers, self._body) as answer:
                if answer.status == 503 and not last:
                    raise UpstreamError("it has no answer (status 503)")
                self._ok = answer.status == 200
                if answer.is_stream:
                    async for chunk in answer.chunks():
                        await self._start(answer, send)
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                else:
                    left = await answer.body()
            self._ended = True
            await self._count(upstream)  # before the client can ask for it
            await self._start(answer, send)
            await send({"type": "http.response.body", "body": left, "more_body": False})
        finally:
            if not self._ended:
                await self._count(upstream)

    async def _start(self, answer: Exchange, send: Send) -> None:
        """Send the head once there is a body: until then another process can answer."""
        if not self._started:
            self._started = True
            dropped = _NOT_RETURNED | ({b"content-length"} if answer.status in _WITHOUT_BODY else set())
            kept = [(name, value) for name, value in answer.headers if name not in dropped]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})

    async def _count(self, upstream: Upstream) -> None:
        """Ask the process for the request's token counts; if the client left early, they may not be known yet."""
        if self._account is None or not self._ok:
            return
        for attempt in range(1 if self._ended else _ASK):
            if attempt:
                await asyncio.sleep(0.02)
            try:
                status, found = await upstream.ask("GET", b"/usage?id=" + self._id.encode())
            except UpstreamError:
                return
            if status == 200:
                used = jsontext.parse(found)
                self._account.add(used["prompt_tokens"], used["completion_tokens"])
                return


def target_of(request: Request) -> bytes:
    """Return the request target for the first line, which does not depend on the client's `Host`."""
    query: bytes = request.scope.get("query_string", b"")
    return quote(request.scope["path"], safe=_PLAIN).encode() + (b"?" + query if query else b"")


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
