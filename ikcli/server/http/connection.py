"""A client connection: uvicorn's protocol with fixes for what it lacks."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class Connection(HttpToolsProtocol):
    """A client connection with four differences from uvicorn's protocol.

    The keep-alive timer ends with the connection: after a reset uvicorn leaves it running, with all that it references.
    Trailers are not taken for headers. HTTP/1.0 clients know no chunked encoding, so the end of the connection ends a
    body without length. A request that asks for another protocol (`Upgrade`) is answered as if it had not.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self)  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    # called by the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        if "method" not in self.scope:  # known once the head is complete
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.stops:  # type: ignore[attr-defined]
            return
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.send = functools.partial(_send_plain, self.cycle, self.cycle.send)  # type: ignore[method-assign]

    def on_message_complete(self) -> None:
        if not self.parser.stops:  # type: ignore[attr-defined]
            super().on_message_complete()


class _Parser:
    """A request parser that continues where llhttp stops: after the head of a request with `Upgrade`.

    llhttp expects the other protocol there. Since the protocol stays HTTP, a second parser reads the head again,
    without that header, and then the body; Java's client, for one, sends a body with such a request.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self._connection)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.should_keep_alive, self.should_upgrade = self._parser.should_keep_alive, self._parser.should_upgrade
        self.get_method, self.get_http_version = self._parser.get_method, self._parser.get_http_version

    @property
    def stops(self) -> bool:
        """Whether llhttp stops before a possible body. A CONNECT request has none."""
        return bool(self.should_upgrade()) and self.get_method() != b"CONNECT"

    def feed_data(self, data: bytes) -> None:
        """Parse the data received."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as found:
            if not self.stops:
                raise
            head, offset = self._head(), found.args[0]
            self._begin()
            self.feed_data(head + data[offset:])

    def _head(self) -> bytes:
        first = b"%s %s HTTP/%s" % (self.get_method(), self._connection.url, self.get_http_version().encode())
        kept = [name + b": " + value for name, value in self._connection.headers if name != b"upgrade"]
        return b"\r\n".join([first, *kept]) + b"\r\n\r\n"


async def _send_plain(cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Any) -> None:
    """Send the parts of a body unchunked, whatever length was announced."""
    cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
