"""The outermost ASGI layer: prefix, CORS, loading, API keys, access log, and responses to unexpected errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import parse_qsl

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ikcli.server.http import auth
from ikcli.server.http.errors import ApiError, Style, style_of
from ikcli.server.http.held import HELD
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.state import Front, is_behind
from ikcli.server.http.users import ACCOUNT, Account

Endpoint = Callable[[Request], Awaitable[Response]]
_WHILE_LOADING = frozenset({"/models", "/v1/models", "/api/tags"})
_OF_A_FRONT = frozenset({"/health", "/usage"})
"""Paths that a router polls continuously; its questions about prompts are not logged either."""
_JSON = (b"content-type", b"application/json; charset=utf-8")
_INTERNAL = ApiError(500, "internal error; the server's log has details")
_LOADING_PAGE = (
    b'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="2"><title>ik</title>'
    b"<p>The model is loading. This page tries again by itself."
)


class _Cased(bytes):
    """A header name sent in its original case, which some clients look for; uvicorn lowercases all names."""

    def lower(self) -> bytes:
        return self


class Gateway:
    """ASGI application that wraps the actual one; see the module."""

    def __init__(
        self,
        app: ASGIApp,
        state: Front,
        log: ServerLog,
        static: frozenset[str],
        direct: Mapping[str, Endpoint] | None = None,
        methods: bytes = b"GET, POST",
    ) -> None:
        """Wrap `app`.

        `direct` holds the endpoints of POST requests that are called without the application around them. `methods` are
        the HTTP methods that pages of other origins may use.
        """
        self._methods = methods
        self._app = app
        self._direct = direct or {}
        self._state = state
        self._log = log
        self._static = static
        server = state.config.server
        self._prefix = "/" + server.api_prefix.strip("/") if server.api_prefix.strip("/") else ""
        self._unlogged = _OF_A_FRONT if is_behind(state.config) else frozenset()
        self._origins = tuple(text.strip() for text in server.cors_origins.split(",") if text.strip())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = _Exchange(send)
        headers = Headers(scope=scope)
        exchange.headers = self._cors(headers.get("origin", ""))
        path = scope["path"]
        try:
            if scope["method"] == "OPTIONS":
                await self._preflight(exchange, headers)
            else:
                await self._serve(scope, receive, exchange, headers)
        except asyncio.CancelledError:  # second signal, or a client that reads nothing: the connection is closed
            self._log.warn("operator()", "request given up", path=path)
        except ApiError as e:
            await exchange.error(e, style_of(path.removeprefix(self._prefix)))
        except Exception as e:
            self._log.error("operator()", "internal error", error=f"{type(e).__name__}: {e}", path=path)
            if not exchange.started:
                await exchange.error(_INTERNAL, style_of(path.removeprefix(self._prefix)))
        finally:
            self._access(scope, exchange)

    async def _serve(self, scope: Scope, receive: Receive, exchange: _Exchange, headers: Headers) -> None:
        path = self._inner_path(scope["path"])
        if not self._state.ready and path not in _WHILE_LOADING:
            await self._not_ready(path, exchange)
            return
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        inner = {**scope, "path": path, "raw_path": path.encode(), "method": method, "root_path": ""}
        asks = method == "GET" and b"reload" not in scope.get("query_string", b"")  # and changes nothing
        account = None if asks and auth.is_public(path, self._static) else self._account(headers)
        counted: AbstractContextManager[None] = nullcontext()
        if account is not None and method != "GET":
            exchange.user = account.user.name
            account.check_model(self._state.names or account.user.models)
            inner[ACCOUNT] = account
            counted = account.request()
        endpoint = self._direct.get(path) if method == "POST" else None
        with counted:
            if endpoint is None:
                await self._app(inner, receive, exchange.send)
                return
            inner["app"] = self._app
            response = await endpoint(Request(inner, receive))
            await response(inner, receive, exchange.send)

    def _account(self, headers: Headers) -> Account | None:
        """Return the account that the request is counted for, or None.

        Raise ApiError 401 if the request needs a key and has no valid one.
        """
        users, keys = self._state.users, self._state.keys
        account = users.find(headers) if users else None
        if account is None and (keys or users) and not (keys and auth.allowed(keys, headers)):
            raise ApiError(401, "Invalid API Key")
        return account

    def _inner_path(self, path: str) -> str:
        if not self._prefix:
            return path
        if path == self._prefix:
            return "/"
        if not path.startswith(self._prefix + "/"):
            raise ApiError(404, "File Not Found")
        return path[len(self._prefix) :]

    async def _not_ready(self, path: str, exchange: _Exchange) -> None:
        if self._state.failed:
            raise ApiError(500, "Model failed to load")
        if path == "/" or path.endswith(".html"):
            await exchange.respond(503, b"text/html; charset=utf-8", _LOADING_PAGE)
            return
        raise ApiError(503, "Loading model")

    def _cors(self, origin: str) -> list[tuple[bytes, bytes]]:
        out = [(b"server", b"ik")]
        if origin and self._origin_allowed(origin):
            out += [(_Cased(b"Access-Control-Allow-Origin"), origin.encode("latin-1", "ignore")), (b"vary", b"Origin")]
        return out

    def _origin_allowed(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        if "localhost" not in self._origins:
            return False
        host = origin.partition("://")[2].rpartition("]")[0].lstrip("[") or origin.partition("://")[2].partition(":")[0]
        return host in ("localhost", "127.0.0.1", "::1")

    async def _preflight(self, exchange: _Exchange, headers: Headers) -> None:
        """Tell a browser which requests it may send.

        Browsers that send credentials or a key take `*` literally, as a header name.
        """
        server = self._state.config.server
        allowed = server.cors_headers
        if allowed.strip() == "*":
            allowed = headers.get("access-control-request-headers", "*")
        exchange.headers += [
            (_Cased(b"Access-Control-Allow-Credentials"), b"true" if server.cors_credentials else b"false"),
            (_Cased(b"Access-Control-Allow-Methods"), _header(server.cors_methods) or self._methods),
            (_Cased(b"Access-Control-Allow-Headers"), _header(allowed)),
        ]
        await exchange.respond(200, b"text/html", b"")

    def _access(self, scope: Scope, exchange: _Exchange) -> None:
        if self._unlogged and (scope["path"] in self._unlogged or any(name == HELD for name, _ in scope["headers"])):
            return
        client = scope.get("client") or ("", 0)
        query = scope.get("query_string", b"").decode("latin-1")
        self._log.info(
            "log_server_request",
            "request",
            remote_addr=client[0],
            remote_port=client[1],
            status=exchange.status,
            method=scope["method"],
            path=scope["path"],
            params=dict(parse_qsl(query, keep_blank_values=True)[:32]),
            **({"user": exchange.user} if exchange.user else {}),
        )


def _header(text: str) -> bytes:
    """Return a valid header value from any text of a command line or client."""
    return "".join(c for c in text if c.isprintable()).encode("latin-1", "ignore")


class _Exchange:
    """Response channel to the client, which adds headers and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.headers: list[tuple[bytes, bytes]] = []
        self.started = False
        self.status = 0
        self.user = ""
        self.begun = time.monotonic()

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass a message on."""
        if not self.started and message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self.headers]
        await self._send(message)

    async def respond(self, status: int, kind: bytes, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole response."""
        head = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
        head += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        await self.send({"type": "http.response.start", "status": status, "headers": head})
        await self.send({"type": "http.response.body", "body": body})

    async def error(self, error: ApiError, style: Style) -> None:
        """Send an error as the response, unless one has begun."""
        if not self.started:
            await self.respond(error.status, _JSON[1], error.content(style), error.headers)
