"""The application in front of several models: their list, loading and unloading; everything else goes to a model.

The model is that of the body's `model`, or of `?model=`, or the first of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ikcli import __version__
from ikcli.config import RunConfig
from ikcli.server.http import convert_ollama, jsontext, static
from ikcli.server.http import fields as f
from ikcli.server.http.answer import json_response
from ikcli.server.http.app import new_app
from ikcli.server.http.body import read_body, read_object
from ikcli.server.http.errors import ApiError, bad_request, unsupported
from ikcli.server.http.gateway import Gateway
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.routes import ROUTERS
from ikcli.server.http.shapes.common import FINGERPRINT, random_id
from ikcli.server.http.usage import REQUEST_ID
from ikcli.server.http.users import ACCOUNT, Account, Users
from ikcli.server.router import lists
from ikcli.server.router.child import Child
from ikcli.server.router.entries import ModelEntry
from ikcli.server.router.manager import LOADED, UNLOADED, Manager, states
from ikcli.server.router.upstream import Exchange, UpstreamError

_NOT_PASSED = frozenset({b"authorization", b"x-api-key", b"origin", b"accept-encoding", REQUEST_ID})
_ASK = 20  # times that the use of a request is asked for, which may have been none
_NOT_RETURNED = frozenset({b"server", b"date", b"vary"})


@dataclass
class RouterState:
    """What all requests share."""

    config: RunConfig
    manager: Manager
    keys: tuple[str, ...] = ()
    log: ServerLog = field(default_factory=ServerLog)
    users: Users = field(default_factory=Users)
    names: tuple[str, ...] = ()
    started: int = field(default_factory=lambda: int(time.time()))
    ready: bool = True
    failed: bool = False


def build_app(state: RouterState) -> ASGIApp:
    """The application of a server with several models."""
    app = new_app()
    app.openapi_url = None
    own = _Own(state)
    for method, paths, endpoint in own.routes():
        for path in paths:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
    forward = _forwarding(state)
    for route in (route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)):
        if route.include_in_schema:  # what nobody knows, as the icon of a page, has no model loaded
            app.add_api_route(route.path, forward, methods=[*(route.methods or ())], response_model=None)
    files = static.add_routes(app, state.config.server)
    return Gateway(app, state, state.log, files)


class _Own:
    """Endpoints that no model answers."""

    def __init__(self, state: RouterState) -> None:
        self._state, self._manager = state, state.manager

    def routes(self) -> list[tuple[str, tuple[str, ...], Callable[[Request], Awaitable[Response]]]]:
        """Method, paths, endpoint."""
        return [
            ("GET", ("/health", "/v1/health"), self.health),
            ("GET", ("/models", "/v1/models"), self.models),
            ("POST", ("/models/load",), self.load),
            ("POST", ("/models/unload",), self.unload),
            ("GET", ("/api/tags",), self.tags),
            ("GET", ("/api/ps",), self.running),
            ("POST", ("/api/show",), self.show),
            ("GET", ("/version", "/api/version"), self.version),
        ]

    async def health(self, request: Request) -> Response:
        """How many models are in which state; it waits for none."""
        return json_response({"status": "ok", "models": states(self._manager.instances.values())})

    async def models(self, request: Request) -> Response:
        """All models with their states."""
        data = [lists.entry(one, self._state.started) for one in self._manager.instances.values()]
        return json_response({"object": "list", "data": data})

    async def load(self, request: Request) -> Response:
        """Load `model`, and answer when it is loaded."""
        entry = await self._named(request)
        if self._manager.instances[entry.name].state == LOADED:
            raise bad_request(f"model {entry.name} is loaded already")
        await self._manager.load(entry.name)
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        """Unload `model` when its requests are done, and answer then."""
        entry = await self._named(request)
        if self._manager.instances[entry.name].state == UNLOADED:
            raise bad_request(f"model {entry.name} is not loaded")
        await self._manager.unload(entry.name)
        return json_response({"success": True})

    async def _named(self, request: Request) -> ModelEntry:
        body = await read_object(request, self._state.config.server.timeout)
        if body.get("model") is None:
            raise bad_request("model is required")
        entry = find(self._state, f.text(body["model"], "model"))
        check_user(request, entry)
        return entry

    async def tags(self, request: Request) -> Response:
        """All models (Ollama)."""
        found = self._manager.instances.values()
        return json_response({"models": [lists.tag(one, self._state.started) for one in found]})

    async def running(self, request: Request) -> Response:
        """The loaded models (Ollama)."""
        found = [one for one in self._manager.instances.values() if one.state == LOADED]
        return json_response({"models": [lists.running(one, self._state.started) for one in found]})

    async def show(self, request: Request) -> Response:
        """About a model (Ollama), which is not loaded for that."""
        body = await read_body(request, self._state.config.server.timeout)
        entry, _ = asked_model(self._state, request, body)
        check_user(request, entry)
        if self._manager.instances[entry.name].state == LOADED:
            return Forwarded(self._state, entry, request, body, None)
        return json_response(await asyncio.to_thread(lists.shown, entry, self._state.started))

    async def version(self, request: Request) -> Response:
        """Version and build."""
        return json_response({"version": __version__, "build_info": FINGERPRINT})


def find(state: RouterState, name: str) -> ModelEntry:
    """The model of this name; ApiError 404 if there is none."""
    entry = state.manager.file.find(name)
    if entry is None:
        known = ", ".join(state.manager.file.entries)
        raise ApiError(404, f"model '{name[:100]}' not found; this server has {known}")
    return entry


def check_user(request: Request, entry: ModelEntry) -> None:
    """ApiError 403 if the user of a request may not use a model."""
    account = request.scope.get(ACCOUNT)
    if account is not None:
        account.check_model(entry.names)


def _forwarding(state: RouterState) -> Callable[[Request], Awaitable[Response]]:
    async def forward(request: Request) -> Response:
        path = request.url.path
        if path == "/metrics" and "model" not in request.query_params:
            return await _metrics(state)
        body = await read_body(request, state.config.server.timeout)
        entry, fields = asked_model(state, request, body)
        check_user(request, entry)
        keep = convert_ollama.keep_alive(fields.get("keep_alive")) if path.startswith("/api/") else None
        return Forwarded(state, entry, request, body, keep)

    return forward


async def _metrics(state: RouterState) -> Response:
    if not state.config.server.metrics:
        raise unsupported("This server does not support metrics endpoint. Start it with `--metrics`")
    return Response(lists.metrics_text(state.manager, state.users), headers={"Content-Type": lists.METRICS_TYPE})


def asked_model(state: RouterState, request: Request, body: bytes) -> tuple[ModelEntry, dict[str, Any]]:
    """The model that a request is for, and its fields; ApiError if there is none, or the body cannot be read."""
    name: Any = request.query_params.get("model")
    value: Any = None
    if body.strip():
        try:
            value = jsontext.parse(body)
        except ValueError as e:
            raise bad_request(str(e)) from None
        if isinstance(value, dict) and (value.get("model") or value.get("name")):
            name = f.text(value.get("model") or value["name"], "model")
    entry = find(state, name) if name else state.manager.file.default
    return entry, value if isinstance(value, dict) else {}


class Forwarded(Response):
    """The answer of a model, passed on as it comes. A client that goes away ends it there, too.

    `keep`: seconds that the model stays afterwards, as Ollama's `keep_alive` says.
    """

    def __init__(
        self, state: RouterState, entry: ModelEntry, request: Request, body: bytes, keep: float | None
    ) -> None:
        self.status_code = 502
        self.background = None
        self._state, self._entry, self._request, self._body = state, entry, request, body
        self._id, self._ok, self._keep = random_id(), False, keep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = self._request.method != "GET"
        self._account = scope.get(ACCOUNT)
        async with self._state.manager.lease(self._entry.name, counts=counts) as child:
            if self._keep is not None:
                self._state.manager.keep(self._entry.name, self._keep)
            work = asyncio.ensure_future(self._pass(child, send))
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
            finally:
                for task in (work, gone):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, UpstreamError, ApiError):
                        await task
                if self._account is not None and self._ok:
                    await self._count(child, self._account)

    async def _pass(self, child: Child, send: Send) -> None:
        request, started = self._request, False
        query = request.scope.get("query_string", b"")
        target = request.url.path.encode() + (b"?" + query if query else b"")
        headers = [(name, value) for name, value in request.headers.raw if name not in _NOT_PASSED]
        if self._account is not None:
            headers.append((REQUEST_ID, self._id.encode()))
        try:
            async with Exchange(child.socket, request.method, target, headers, self._body) as answer:
                kept = [(name, value) for name, value in answer.headers if name not in _NOT_RETURNED]
                await send({"type": "http.response.start", "status": answer.status, "headers": kept})
                started, self._ok = True, answer.status == 200
                async for chunk in answer.chunks():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except UpstreamError as e:
            self._state.log.error("router", "no answer", model=self._entry.name, error=str(e))
            if started:
                raise  # the connection is cut, so that the client sees that something is missing
            raise ApiError(502, f"model {self._entry.name} did not answer: {child.last_words()}") from None

    async def _count(self, child: Child, account: Account) -> None:
        """Ask the model's process what the request took; it may not have seen yet that a client is gone."""
        target = b"/usage?id=" + self._id.encode()
        for _ in range(_ASK):
            try:
                async with Exchange(child.socket, "GET", target) as answer:
                    if answer.status == 200:
                        used = jsontext.parse(await answer.body())
                        account.add(used["prompt_tokens"], used["completion_tokens"])
                        return
            except UpstreamError:
                return
            await asyncio.sleep(0.02)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
