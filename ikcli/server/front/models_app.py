"""The application in front of several models: it lists and manages them, and forwards everything else to one.

The body's `model`, or `?model=`, names the model; the default is the first of the list. A single model that sleeps when
idle gets all requests, whatever model they name.
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
from ikcli.server.front import models_lists as lists
from ikcli.server.front.app import Route, check_metrics, front_app
from ikcli.server.front.forward import Forwarded
from ikcli.server.front.metrics import metrics_text
from ikcli.server.front.models import ModelUse
from ikcli.server.front.models_admin import ModelsAdmin
from ikcli.server.front.models_entries import ModelEntry
from ikcli.server.front.models_instance import Instance, states
from ikcli.server.front.models_state import ModelsState, check_user, find, flag
from ikcli.server.front.supervisor import DOWN, DRAINING, READY, STARTING
from ikcli.server.front.upstream import Upstream
from ikcli.server.http import fields as f
from ikcli.server.http import jsontext
from ikcli.server.http.answer import json_response
from ikcli.server.http.body import read_body
from ikcli.server.http.dialects import ollama
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.metrics import CONTENT_TYPE
from ikcli.server.http.shapes.common import FINGERPRINT


def build_app(state: ModelsState) -> ASGIApp:
    """Build the application of a server with several models."""
    routes = ModelsRoutes(state)
    own = (*routes.routes(), *ModelsAdmin(state).routes())
    return front_app(state, own, routes.forward, methods=b"GET, POST, DELETE")


class ModelsRoutes:
    """Endpoints that the front serves itself, and the one that forwards a request to its model."""

    def __init__(self, state: ModelsState) -> None:
        self._state, self._models = state, state.supervisor

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            ("GET", ("/health", "/v1/health"), self.health),
            ("GET", ("/api/tags",), self.tags),
            ("GET", ("/api/ps",), self.running),
            ("POST", ("/api/show",), self.show),
            ("GET", ("/version", "/api/version"), self.version),
            ("GET", ("/metrics",), self.metrics),
        ]

    # --- about all of them --------------------------------------------------------------------------------------------
    async def health(self, request: Request) -> Response:
        """Return the number of models by state, without waiting. A single model answers itself while it is loaded."""
        if self._state.single and (one := self._state.default()) is not None:
            instance = self._models.instances[one.name]
            if instance.state == READY:
                return self._forwarded(one, request, b"", None)
            if instance.state == STARTING and not instance.asleep:
                raise ApiError(503, "Loading model")
        return json_response({"status": "ok", "models": states(self._models.instances.values())})

    async def tags(self, request: Request) -> Response:
        """List all models (Ollama)."""
        found = self._models.instances.values()
        return json_response({"models": [lists.tag(one, self._state.started) for one in found]})

    async def running(self, request: Request) -> Response:
        """List the loaded models (Ollama)."""
        found = [one for one in self._models.instances.values() if one.state == READY]
        return json_response({"models": [lists.running(one, self._state.started) for one in found]})

    async def show(self, request: Request) -> Response:
        """Describe a model (Ollama) without loading it."""
        body = await read_body(request, self._state.timeout)
        entry, _ = asked_model(self._state, request, body)
        check_user(request, entry)
        if self._models.instances[entry.name].state == READY:
            return self._forwarded(entry, request, body, None)
        return json_response(await asyncio.to_thread(lists.shown, entry, self._state.started))

    async def version(self, request: Request) -> Response:
        """Return version and build."""
        return json_response({"version": __version__, "build_info": FINGERPRINT})

    async def metrics(self, request: Request) -> Response:
        """Return the front's metrics or, with `?model=`, those of a loaded model."""
        check_metrics(self._state)
        if "model" in request.query_params or self._state.single:
            return await self.forward(request)
        text = metrics_text(lists.families(self._models), self._state.users)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    # --- to one of them -----------------------------------------------------------------------------------------------
    async def forward(self, request: Request) -> Response:
        """Forward to the model of the request.

        A sleeping model is not woken for an answer that was kept when it fell asleep.
        """
        path: str = request.scope["path"]
        body = await read_body(request, self._state.timeout)
        entry, fields = asked_model(self._state, request, body)
        check_user(request, entry)
        instance = self._models.instance(entry.name)
        if request.method == "GET" and instance.state in (DRAINING, DOWN) and path.encode() in instance.kept:
            return _asleep(instance, path)
        keep = ollama.keep_alive(fields.get("keep_alive")) if path.startswith("/api/") else None
        return self._forwarded(entry, request, body, keep)

    def _forwarded(self, entry: ModelEntry, request: Request, body: bytes, keep: float | None) -> Forwarded:
        """Forward to a model; `keep` is the seconds that it stays loaded afterwards (Ollama's `keep_alive`)."""
        loads = flag(request, "autoload", self._state.single or self._state.config.server.models_autoload)
        use = ModelUse(entry.name, counts=request.method != "GET", loads=loads)

        @asynccontextmanager
        async def upstream() -> AsyncIterator[Upstream]:
            async with self._models.lease(use) as process:
                if keep is not None:
                    self._models.keep(entry.name, keep)
                yield process

        return Forwarded(request, body, upstream, self._state.log, f"model {entry.name}")


def _asleep(instance: Instance, path: str) -> Response:
    """Return the answer that a sleeping model gave before it fell asleep."""
    status, body = instance.kept[path.encode()]
    if path == "/metrics":
        return Response(body, status, headers={"Content-Type": CONTENT_TYPE})
    value = jsontext.parse(body)
    if "is_sleeping" in value:
        value["is_sleeping"] = True
    return json_response(value, status)


def asked_model(state: ModelsState, request: Request, body: bytes) -> tuple[ModelEntry, dict[str, Any]]:
    """Return the model of a request and the fields of its body.

    Raise ApiError if the model is unknown or the body is not JSON.
    """
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
