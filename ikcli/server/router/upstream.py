"""A client of the processes that serve models: one HTTP request over a socket, the answer as it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

import httptools

Headers = Sequence[tuple[bytes, bytes]]
Address = str | tuple[str, int]
"""The path of a Unix socket, or host and port."""
_CHUNK = 1 << 16
_CONNECT = 10.0  # seconds
_OF_A_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer"})


class UpstreamError(Exception):
    """The process has ended, or its answer is none."""


class Upstream:
    """Where requests go. `key`: what they have to carry there, if anything."""

    def __init__(self, address: Address, key: str = "") -> None:
        self.address, self.key = address, key
        self.open: set[Exchange] = set()

    def last_words(self) -> str:
        """Why it does not answer, as far as that is known."""
        return "it does not answer"

    async def healthy(self, timeout: float = 10.0) -> bool:
        """Whether it says that its model is loaded."""
        try:
            status, _ = await self.ask("GET", b"/health", timeout=timeout)
        except UpstreamError:
            return False
        return status == 200

    async def answer(self, target: bytes) -> tuple[int, bytes] | None:
        """Status and body of a GET; None if it does not answer."""
        try:
            return await self.ask("GET", target)
        except UpstreamError:
            return None

    def cut(self) -> None:
        """End what is open: on a machine that is gone nobody closes connections."""
        for exchange in list(self.open):
            exchange.abort()

    async def ask(self, method: str, target: bytes, body: bytes = b"", timeout: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a short answer; UpstreamError if there is none in time."""
        try:
            async with asyncio.timeout(timeout or None), Exchange(self, method, target, (), body) as answer:
                return answer.status, await answer.body()
        except TimeoutError:
            raise UpstreamError(f"no answer within {timeout:g} seconds") from None


class Exchange:
    """One request and its answer; `async with` sends the one and reads the head of the other."""

    def __init__(self, to: Upstream, method: str, target: bytes, headers: Headers = (), body: bytes = b"") -> None:
        self._to, self._body = to, body
        lines = [method.encode() + b" " + target + b" HTTP/1.1", b"host: ik", b"connection: close"]
        kept = [(name.lower(), value) for name, value in headers]
        kept = [
            item for item in kept if item[0] not in _OF_A_CONNECTION and item[0] not in (b"host", b"content-length")
        ]
        if to.key:
            kept.append((b"authorization", b"Bearer " + to.key.encode()))
        lines += [name + b": " + value for name, value in kept]
        lines.append(b"content-length: " + str(len(body)).encode())
        self._head = b"\r\n".join(lines) + b"\r\n\r\n"
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._has_head = self._complete = False
        self._writer: asyncio.StreamWriter | None = None
        self.headers: list[tuple[bytes, bytes]] = []

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    @property
    def is_stream(self) -> bool:
        """Whether the answer comes as it is made."""
        return not any(name == b"content-length" for name, _ in self.headers)

    async def __aenter__(self) -> Exchange:
        self._to.open.add(self)
        try:
            self._reader, self._writer = await self._connect()
            self._writer.write(self._head + self._body)
            await self._writer.drain()
            while not self._has_head:
                await self._feed()
        except OSError as e:
            self._close()
            raise UpstreamError(str(e)) from None
        except BaseException:
            self._close()
            raise
        return self

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._to.address
        if isinstance(address, str):
            return await asyncio.open_unix_connection(address)
        async with asyncio.timeout(_CONNECT):  # its TimeoutError is an OSError
            return await asyncio.open_connection(*address)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        """What still computes there stops, as its client is gone."""
        self._to.open.discard(self)
        if self._writer is not None:
            self._writer.close()

    def abort(self) -> None:
        """Let it fail, as when the connection ends."""
        if self._writer is not None:
            self._writer.transport.abort()

    async def _feed(self) -> None:
        data = await self._reader.read(_CHUNK)
        if not data:
            raise UpstreamError("the connection ended within an answer")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            raise UpstreamError(f"no HTTP answer: {e}") from None

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body; UpstreamError if it ends too early."""
        while True:
            parts, self._parts = self._parts, []
            if parts:
                yield b"".join(parts)
            elif self._complete:
                return
            else:
                try:
                    await self._feed()
                except OSError as e:
                    raise UpstreamError(str(e)) from None

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self.chunks()])

    # called by the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        if name.lower() not in _OF_A_CONNECTION:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        self._parts.append(data)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        self._complete = True
