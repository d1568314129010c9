"""The application in front of several models: their list, loading and unloading; everything else goes to a model.

The model is that of the body's `model`, or of `?model=`, or the first of the file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

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
from ikcli.server.http.shapes.common import FINGERPRINT
from ikcli.server.http.users import ACCOUNT, Users
from ikcli.server.router import lists
from ikcli.server.router.entries import ModelEntry
from ikcli.server.router.forward import Forwarded, add_routes
from ikcli.server.router.manager import LOADED, UNLOADED, Manager, states
from ikcli.server.router.upstream import Upstream


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
    own = _Own(state)
    for method, paths, endpoint in own.routes():
        for path in paths:
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
    add_routes(app, _forwarding(state))
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
            return _forwarded(self._state, entry, request, body, None)
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
        return _forwarded(state, entry, request, body, keep)

    return forward


def _forwarded(state: RouterState, entry: ModelEntry, request: Request, body: bytes, keep: float | None) -> Forwarded:
    """`keep`: seconds that the model stays afterwards, as Ollama's `keep_alive` says."""

    @asynccontextmanager
    async def lease() -> AsyncIterator[Upstream]:
        async with state.manager.lease(entry.name, counts=request.method != "GET") as child:
            if keep is not None:
                state.manager.keep(entry.name, keep)
            yield child

    return Forwarded(request, body, lease, state.log, f"model {entry.name}")


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
