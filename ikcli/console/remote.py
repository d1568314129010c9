"""A model behind a running server (`--url`): its HTTP API, read as it streams.

`http.client` reads it: the client of the hub's library needs 100 ms more to start, and 1.4 times as long per event.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from ikcli.chat.parser import ChatDelta
from ikcli.console.answers import Answer, AnswerCounts, Body, Gather
from ikcli.errors import IkError, UsageError
from ikcli.server.http.errors import ApiError
from ikcli.server.http.generation_body import GenerationBody

_CONNECT_SECONDS = 10
_STOPS = {"stop": "eos", "length": "limit", "tool_calls": "eos"}


class _Missing(IkError):
    """The server lacks an optional endpoint."""


class RemoteModel:
    """An `AnswerSource` on a running server."""

    def __init__(self, url: str, api_key: str = "", fields: Mapping[str, Any] | None = None) -> None:
        """Connect to a server; `fields` from the command line go into every request. IkError if none answers."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url {url} is not the address of a server; write it as http://127.0.0.1:8080")
        try:
            self._port = parts.port
        except ValueError:
            raise UsageError(f"--url {url} has no valid port") from None
        self.url, self._host, self._secure = url, parts.hostname, parts.scheme == "https"
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fields = dict(fields or {})
        self.load_ms = 0.0
        models = self._get("/v1/models").get("data")
        found = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        self.name = str(found.get("id") or "model")
        self._props: dict[str, Any] = {}
        with contextlib.suppress(_Missing):  # not every server has it
            self._props = self._get("/props")

    @property
    def has_template(self) -> bool:
        """True: a server answers conversations with whatever template it has."""
        return True

    @property
    def reads_images(self) -> bool:
        """Whether the server says that its model reads images; without a word about it, the server decides."""
        modalities = self._props.get("modalities")
        return not isinstance(modalities, dict) or bool(modalities.get("vision", True))

    def complete(self, body: Body) -> RemoteStream:
        """Continue a text."""
        return RemoteStream(self, "/completion", self._fields | body | {"stream": True, "return_tokens": True})

    def chat(self, body: Body) -> RemoteStream:
        """Answer a conversation."""
        more = {"stream": True, "timings_per_token": True, "model": self.name}
        return RemoteStream(self, "/v1/chat/completions", self._fields | body | more)

    def check(self, body: Body) -> None:
        """Raise IkError if a field has a wrong type or is out of range; the server checks the rest."""
        try:
            GenerationBody.checked(body)
        except ApiError as e:
            raise IkError(e.message) from None

    def settings(self) -> dict[str, Any]:
        """Return the server's defaults, as far as it reports them, with the options of the command line."""
        found = self._props.get("default_generation_settings")
        params = found.get("params", found) if isinstance(found, dict) else {}
        n_ctx = {"n_ctx": found["n_ctx"]} if isinstance(found, dict) and "n_ctx" in found else {}
        return {**n_ctx, **(params if isinstance(params, dict) else {}), **self._fields}

    def close(self) -> None:
        """Do nothing, as no connection is kept open."""

    # --- HTTP -------------------------------------------------------------------------------------------------------
    def open(self, method: str, path: str, body: Body | None = None) -> tuple[_Connection, http.client.HTTPResponse]:
        """Open a connection and return it with its response; IkError if there is none or it is a refusal."""
        make = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = make(self._host, self._port, timeout=_CONNECT_SECONDS)
        data = None if body is None else json.dumps(body).encode("utf-8", "replace")
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt takes a while
            connection.request(method, self._prefix + path, data, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            raise IkError(f"--url {self.url}: {_reason(e)}; is the server running?") from None
        if response.status != 200:
            text = response.read().decode("utf-8", "replace")
            connection.close()
            kind = IkError if response.status in (401, 403) else _Missing
            raise kind(f"{self.url}{path}: {_refusal(response.status, text)}")
        return connection, response

    def _get(self, path: str) -> dict[str, Any]:
        connection, response = self.open("GET", path)
        with contextlib.closing(connection):
            try:
                found = json.loads(response.read())
            except (OSError, ValueError, http.client.HTTPException):
                found = None
        if not isinstance(found, dict):
            raise _Missing(f"{self.url}{path}: the response is not from a model server")
        return found


_Connection = http.client.HTTPConnection


class RemoteStream:
    """One answer as server-sent events."""

    def __init__(self, model: RemoteModel, path: str, body: Body) -> None:
        self.answer = Answer("cancelled")
        self._model, self._path, self._body = model, path, body
        self._socket: socket.socket | None = None
        self._cancelled = False
        self._gather = Gather()
        self._tokens: list[int] = []
        self._counts = AnswerCounts()
        self._stop, self._word, self._truncated = "", "", False

    def cancel(self) -> None:
        """End the answer; the server notices that its client is gone, and this side reads the end of the stream."""
        self._cancelled = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def __iter__(self) -> Iterator[ChatDelta]:
        connection, response = self._model.open("POST", self._path, self._body)
        self._socket = connection.sock or _socket_of(response)
        try:
            if self._path == "/completion":
                yield ChatDelta()  # the prompt was accepted
            for event in _events(response):
                for delta in self._read(event):
                    self._gather.add(delta)
                    yield delta
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as e:
            if not self._cancelled:
                raise IkError(f"{self._model.url}: the connection was lost: {_reason(e)}") from None
        finally:
            connection.close()
        if not self._stop and not self._cancelled:
            raise IkError(f"{self._model.url}: the answer ended early; see the log of the server")
        message = self._gather.message
        self.answer = Answer(
            self._stop or "cancelled", self._word, self._truncated, self._counts, message.content, tuple(self._tokens),
            message,
        )  # fmt: skip

    def _read(self, event: Mapping[str, Any]) -> Iterator[ChatDelta]:
        if "error" in event:
            raise IkError(f"{self._model.url}: {_message(event)}")
        if isinstance(event.get("timings"), dict):
            self._counts = AnswerCounts.of_json(event["timings"])
        if "choices" not in event:
            yield from self._read_text(event)
            return
        for choice in event["choices"]:
            yield from _deltas(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._stop = _STOPS.get(choice["finish_reason"], "eos")

    def _read_text(self, event: Mapping[str, Any]) -> Iterator[ChatDelta]:
        self._tokens += event.get("tokens") or []
        if event.get("content"):
            yield ChatDelta(content=event["content"])
        if event.get("stop"):
            self._stop = str(event.get("stop_type") or "eos")
            self._word, self._truncated = str(event.get("stopping_word") or ""), bool(event.get("truncated"))


def _deltas(delta: Mapping[str, Any]) -> Iterator[ChatDelta]:
    if delta.get("reasoning_content"):
        yield ChatDelta(reasoning=delta["reasoning_content"])
    if delta.get("content"):
        yield ChatDelta(content=delta["content"])
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        index = call.get("index", 0)
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        yield ChatDelta(index=index, id=call.get("id") or "", name=name, arguments=arguments)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream up to its end."""
    for line in response:
        if not line.startswith((b"data:", b"error:")):
            continue
        text = line.partition(b":")[2].strip()
        if text == b"[DONE]":
            return
        found = json.loads(text)
        if isinstance(found, dict):
            yield found if line.startswith(b"data:") else {"error": found}


def _socket_of(response: http.client.HTTPResponse) -> socket.socket | None:
    """Return the socket of a response after which the connection is closed; http.client has dropped it."""
    raw = getattr(getattr(response, "fp", None), "raw", None)
    found = getattr(raw, "_sock", None)
    return found if isinstance(found, socket.socket) else None


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, ssl.SSLError):
        return f"no secure connection: {error.reason or error}"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _refusal(status: int, text: str) -> str:
    try:
        return _message(json.loads(text))
    except (ValueError, TypeError, AttributeError):
        return f"HTTP status {status}"


def _message(body: Mapping[str, Any]) -> str:
    error = body["error"] if "error" in body else body.get("detail", body)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)
