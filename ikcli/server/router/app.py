"""The application in front of several models: their list, loading and unloading; everything else goes to a model.

The model is that of the body's `model`, or of `?model=`, or the first of the file. A single model that sleeps when
it is idle is asked whatever requests name.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ikcli import __version__
from ikcli.server.http import convert_ollama, jsontext, static
from ikcli.server.http import fields as f
from ikcli.server.http.answer import json_response
from ikcli.server.http.app import new_app
from ikcli.server.http.body import read_body
from ikcli.server.http.errors import ApiError, bad_request, unsupported
from ikcli.server.http.gateway import Gateway
from ikcli.server.http.shapes.common import FINGERPRINT
from ikcli.server.router import lists
from ikcli.server.router.admin import Admin
from ikcli.server.router.entries import ModelEntry
from ikcli.server.router.forward import Endpoint, Forwarded, Route, add_routes
from ikcli.server.router.instance import LOADED, LOADING, UNLOADED, UNLOADING, Instance, states
from ikcli.server.router.state import RouterState, check_user, find, flag
from ikcli.server.router.upstream import Upstream


def build_app(state: RouterState) -> ASGIApp:
    """The application of a server with several models."""
    app = new_app()
    add_routes(app, (*_Own(state).routes(), *Admin(state).routes()), _forwarding(state))
    files = static.add_routes(app, state.config.server)
    return Gateway(app, state, state.log, files, methods=b"GET, POST, DELETE")


class _Own:
    """Endpoints that no model answers."""

    def __init__(self, state: RouterState) -> None:
        self._state, self._manager = state, state.manager

    def routes(self) -> list[Route]:
        """What it answers itself."""
        return [
            ("GET", ("/health", "/v1/health"), self.health),
            ("GET", ("/api/tags",), self.tags),
            ("GET", ("/api/ps",), self.running),
            ("POST", ("/api/show",), self.show),
            ("GET", ("/version", "/api/version"), self.version),
        ]

    async def health(self, request: Request) -> Response:
        """How many models are in which state; it waits for none. One model alone answers itself while it is there."""
        if self._state.single and (one := self._state.default()) is not None:
            instance = self._manager.instances[one.name]
            if instance.state == LOADED:
                return _forwarded(self._state, one, request, b"", None)
            if instance.state == LOADING and not instance.asleep:
                raise ApiError(503, "Loading model")
        return json_response({"status": "ok", "models": states(self._manager.instances.values())})

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


def _forwarding(state: RouterState) -> Endpoint:
    async def forward(request: Request) -> Response:
        path: str = request.scope["path"]
        if path == "/metrics" and not state.config.server.metrics:
            raise unsupported("This server does not support metrics endpoint. Start it with `--metrics`")
        if path == "/metrics" and "model" not in request.query_params and not state.single:
            text = lists.metrics_text(state.manager, state.users)
            return Response(text, headers={"Content-Type": lists.METRICS_TYPE})
        body = await read_body(request, state.config.server.timeout)
        entry, fields = asked_model(state, request, body)
        check_user(request, entry)
        instance = state.manager.instance(entry.name)
        if request.method == "GET" and instance.state in (UNLOADING, UNLOADED) and path.encode() in instance.kept:
            return _asleep(instance, path)
        keep = convert_ollama.keep_alive(fields.get("keep_alive")) if path.startswith("/api/") else None
        return _forwarded(state, entry, request, body, keep)

    return forward


def _asleep(instance: Instance, path: str) -> Response:
    """What a model answered before it fell asleep."""
    status, body = instance.kept[path.encode()]
    if path == "/metrics":
        return Response(body, status, headers={"Content-Type": lists.METRICS_TYPE})
    value = jsontext.parse(body)
    if "is_sleeping" in value:
        value["is_sleeping"] = True
    return json_response(value, status)


def _forwarded(state: RouterState, entry: ModelEntry, request: Request, body: bytes, keep: float | None) -> Forwarded:
    """`keep`: seconds that the model stays afterwards, as Ollama's `keep_alive` says."""
    loads = flag(request, "autoload", state.single or state.config.server.models_autoload)

    @asynccontextmanager
    async def lease() -> AsyncIterator[Upstream]:
        async with state.manager.lease(entry.name, counts=request.method != "GET", loads=loads) as child:
            if keep is not None:
                state.manager.keep(entry.name, keep)
            yield child

    return Forwarded(request, body, lease, state.log, f"model {entry.name}")


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
    entry = find(state, name) if name and not state.single else state.default()
    return entry, value if isinstance(value, dict) else {}
