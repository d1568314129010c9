"""Messages between stages over TCP: a kind, a few fields as JSON, and bytes. Nothing that arrives is ever executed.

A client first sends the secret of the run; other connections are closed.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from hmac import compare_digest
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import IkError

_HEAD = struct.Struct("<IIQ")  # kind, bytes of the fields, bytes of the payload
_MOST_WORDS = 1 << 20
_PATIENCE = 20  # seconds until a connection without replies counts as lost

Buffer = bytes | memoryview | npt.NDArray[Any]


class LostLinkError(IkError):
    """The other end of a connection has gone."""


class MessageKind(IntEnum):
    """The kind of a message. The first ones are sent once, outside of the chain."""

    HELLO = 1
    NEXT = 2
    READY = 3
    FAILED = 4  # an error while loading, or the loss of a neighbour
    RUN = 10
    RESULT = 11
    READ = 12
    CELLS = 13
    WRITE = 14
    MOVE = 15
    OUTPUTS = 16
    SCALES = 17
    ERROR = 18
    STOP = 19


class Link:
    """A connection. The payload that `receive` returns is valid until the next call."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(1 << 16)
        self._head = bytearray(_HEAD.size)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", _PATIENCE // 2), ("TCP_KEEPINTVL", _PATIENCE // 4), ("TCP_KEEPCNT", 2)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _PATIENCE)

    def send(self, kind: MessageKind, words: dict[str, Any], payload: Sequence[Buffer] = ()) -> None:
        """Send a message; raise LostLinkError if the other end has gone."""
        text = json.dumps(words).encode()
        parts = [v.cast("B") for v in map(_view, payload) if v.nbytes]
        head = _HEAD.pack(kind, len(text), sum(p.nbytes for p in parts)) + text
        try:
            self._send([memoryview(head), *parts])
        except OSError as error:
            raise LostLinkError(f"a connection was lost: {error.strerror or error}") from None

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            n = self._sock.sendmsg(parts[:64])
            while parts and n >= parts[0].nbytes:
                n -= parts.pop(0).nbytes
            if n:
                parts[0] = parts[0][n:]

    def receive(
        self, *, keep: bool = False, timeout: float | None = None
    ) -> tuple[MessageKind, dict[str, Any], memoryview]:
        """Return the next message; raise LostLinkError if the other end has gone.

        `keep`: put the payload into memory of its own.
        """
        try:
            if timeout is not None:
                self._sock.settimeout(timeout)
            self._fill(memoryview(self._head))
            kind, n_words, n_bytes = _HEAD.unpack(self._head)
            if n_words > _MOST_WORDS:
                raise LostLinkError("a connection was closed: what arrived is not a message")
            text = bytearray(n_words)
            self._fill(memoryview(text))
            if keep:
                data = memoryview(bytearray(n_bytes))
            else:
                if len(self._buffer) < n_bytes:
                    self._buffer = bytearray(n_bytes)
                data = memoryview(self._buffer)[:n_bytes]
            self._fill(data)
            return MessageKind(kind), json.loads(text), data
        except OSError as error:
            raise LostLinkError(f"a connection was lost: {error.strerror or error}") from None
        except (ValueError, RecursionError):
            raise LostLinkError("a connection was closed: what arrived is not a message") from None

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            n = self._sock.recv_into(view[at:])
            if not n:
                raise LostLinkError("a connection was closed by the other end")
            at += n

    @property
    def host(self) -> str:
        """Return the address of this end."""
        return str(self._sock.getsockname()[0])

    def close(self) -> None:
        """Close the connection; a thread that waits on it gets an error."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _view(data: Buffer) -> memoryview:
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


class StageListener:
    """Accepts connections from clients that know the secret."""

    def __init__(self, host: str, secret: str) -> None:
        self._secret = secret
        self._sock = socket.create_server((host, 0), backlog=64)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    def accept(self, timeout: float) -> tuple[Link, dict[str, Any]] | None:
        """Return a connection and its hello; None after `timeout` seconds, or if the client did not know the secret."""
        self._sock.settimeout(timeout)
        try:
            sock, _ = self._sock.accept()
        except TimeoutError:
            return None
        sock.settimeout(5)  # a silent stranger blocks nobody
        head = bytearray(_HEAD.size)
        try:
            if not _fill(sock, head):
                raise OSError
            kind, n_words, n_bytes = _HEAD.unpack(head)
            text = bytearray(n_words if kind == MessageKind.HELLO and n_words < 4096 and not n_bytes else 0)
            words = json.loads(text) if text and _fill(sock, text) else None
        except (OSError, ValueError, RecursionError):
            words = None
        if not isinstance(words, dict) or not compare_digest(str(words.get("secret", "")), self._secret):
            sock.close()
            return None
        return Link(sock), words

    def close(self) -> None:
        self._sock.close()


def _fill(sock: socket.socket, buffer: bytearray) -> bool:
    view, at = memoryview(buffer), 0
    while at < len(view):
        n = sock.recv_into(view[at:])
        if not n:
            return False
        at += n
    return True


def connect(address: tuple[str, int], hello: dict[str, Any]) -> Link:
    """Connect to a listener; raise IkError if it cannot be reached."""
    try:
        sock = socket.create_connection(address, timeout=30)
    except OSError as error:
        raise IkError(f"{address[0]}:{address[1]} cannot be reached: {error.strerror or error}") from None
    link = Link(sock)
    link.send(MessageKind.HELLO, hello)
    return link
