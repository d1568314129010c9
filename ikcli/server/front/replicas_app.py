"""The application in front of replicas: it answers for all of them together, and forwards everything else to one.

Slots are numbered across replicas, so the number of a slot, in a path or as `id_slot`, identifies its replica.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ikcli.server.front.app import Route, check_metrics, front_app
from ikcli.server.front.forward import Forwarded, target_of
from ikcli.server.front.metrics import metrics_text
from ikcli.server.front.prefixes import blocks_of
from ikcli.server.front.replica import Question, Replica, RoutingHint
from ikcli.server.front.replicas import ReplicaSupervisor
from ikcli.server.front.replicas_metrics import families
from ikcli.server.front.state import FrontState
from ikcli.server.front.upstream import UpstreamError
from ikcli.server.http import jsontext
from ikcli.server.http.answer import json_response
from ikcli.server.http.app import JSON
from ikcli.server.http.body import read_body
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.metrics import CONTENT_TYPE
from ikcli.server.http.page_settings import page_settings
from ikcli.server.http.routes.info import models_json
from ikcli.server.http.routes.ollama_models import entry
from ikcli.server.http.state import ServerState, names_of
from ikcli.server.http.users import ACCOUNT

_WORTH_ASKING = 8  # blocks; a shorter prompt is computed about as fast as replicas are asked about it
_MOST_ASKED = 1 << 21  # bytes of a request; larger ones hold images, which each replica would have to decode
_TRIES = 3  # replicas tried per request: one that crashes them all must not be retried forever
_GENERATING = frozenset(
    (
        "/completion", "/completions", "/v1/completions", "/chat/completions", "/v1/chat/completions", "/responses",
        "/v1/responses", "/v1/messages", "/infill", "/api/chat", "/api/generate",
    )
)  # fmt: skip
"""Paths whose requests fill the cache of a slot."""
_FOR_ALL = (
    "/lora-adapters", "/props", "/control-vectors/load", "/control-vectors/unload", "/control-vectors/apply",
)  # fmt: skip
"""Paths whose POST requests change a setting of all replicas."""


@dataclass
class ReplicasState(FrontState[ReplicaSupervisor]):
    """See FrontState."""

    @property
    def ready(self) -> bool:
        """Whether some replica has ever been ready; from then on requests wait for one."""
        return self.supervisor.opened

    @property
    def failed(self) -> bool:
        """Whether the model cannot be loaded."""
        return bool(self.supervisor.failure)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All names of the model."""
        return names_of(self.config)


def build_app(state: ReplicasState) -> ASGIApp:
    """Build the application of a server with replicas."""
    routes = ReplicasRoutes(state)
    return front_app(state, routes.routes(), routes.forward)


class ReplicasRoutes:
    """Endpoints that the front serves itself, and the one that forwards a request to a replica."""

    def __init__(self, state: ReplicasState) -> None:
        self._state, self._replicas, self._server = state, state.supervisor, state.config.server

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            ("GET", ("/health", "/v1/health"), self.health),
            ("GET", ("/models", "/v1/models", "/api/tags"), self.models),
            ("GET", ("/slots",), self.slots),
            ("GET", ("/slots/list",), self.held),
            ("GET", ("/list",), self.saved),
            ("POST", ("/delete_prompt", "/rename_prompt"), self.change_saved),
            ("POST", ("/slots/{id_slot}",), self.slot_action),
            ("POST", ("/chat/completions/control", "/v1/chat/completions/control"), self.control),
            ("POST", _FOR_ALL, self.set_for_all),
            ("GET", ("/props",), self.props),
            ("GET", ("/metrics",), self.metrics),
            ("GET", ("/openapi.json",), self.forward),
            ("GET", ("/replicas",), self.replicas),
            ("POST", ("/replicas/restart",), self.restart),
        ]

    # --- to one of them -----------------------------------------------------------------------------------------------
    async def forward(self, request: Request) -> Response:
        """Forward to the replica that suits the request best."""
        body = await read_body(request, self._state.timeout)
        fields = _fields(body)
        slot = fields.get("id_slot")
        wanted = None
        if isinstance(slot, int) and not isinstance(slot, bool) and slot >= 0:
            wanted = self._owner(slot, "id_slot is {}, but the slots are 0 to {}")
        blocks = blocks_of(fields) if request.scope["path"] in _GENERATING else ()
        asks = wanted is None and len(blocks) >= _WORTH_ASKING and len(body) <= _MOST_ASKED
        question = Question(target_of(request), body) if asks else None
        return self._forwarded(request, body, RoutingHint(blocks, wanted, question))

    def _forwarded(self, request: Request, body: bytes, hint: RoutingHint) -> Response:
        what = "the replica" if hint.replica is None else f"replica {hint.replica}"
        return Forwarded(request, body, partial(self._replicas.lease, hint), self._state.log, what, _TRIES)

    def _owner(self, slot: int, problem: str) -> int:
        """Return the index of the replica that has a slot."""
        n_slots = self._state.config.n_parallel
        if slot >= n_slots * len(self._replicas.replicas):
            raise bad_request(problem.format(slot, n_slots * len(self._replicas.replicas) - 1))
        return slot // n_slots

    async def slot_action(self, request: Request) -> Response:
        """Save, restore or erase a slot in the replica that has it."""
        text = request.path_params["id_slot"]
        number = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 1 << 60
        owner = self._owner(number, "Invalid slot ID: the slots are 0 to {1}")
        return self._forwarded(request, await read_body(request, self._state.timeout), RoutingHint((), owner))

    # --- to all of them -----------------------------------------------------------------------------------------------
    async def _ask_all(self, method: str, target: bytes, body: bytes = b"") -> list[tuple[Replica, int, bytes]]:
        """Ask all replicas; return replica, status and body of those that answer. Raise ApiError 503 if none does."""
        ready = self._replicas.ready()
        answers = await asyncio.gather(
            *(one.process.ask(method, target, body) for one in ready), return_exceptions=True
        )
        found = []
        for one, answer in zip(ready, answers, strict=True):
            if isinstance(answer, tuple):
                found.append((one, *answer))
            elif not isinstance(answer, UpstreamError):
                raise answer
        if not found:
            raise ApiError(503, "no replica answers now")
        return found

    async def _lists(self, target: bytes) -> list[tuple[Replica, list[Any]]] | Response:
        """Return the list of every replica, or the first error response."""
        found = await self._ask_all("GET", target)
        for _, status, body in found:
            if status != 200:
                return Response(body, status, media_type=JSON)
        return [(one, jsontext.parse(body)) for one, _, body in found]

    async def slots(self, request: Request) -> Response:
        """List the slots of all replicas; with `?fail_on_no_slot=1`, status 503 if none is free."""
        found = await self._lists(b"/slots")
        if isinstance(found, Response):
            return found
        slots = [slot | {"replica": one.index} for one, items in found for slot in items]
        if request.query_params.get("fail_on_no_slot", "0") not in ("", "0") and all(
            slot["is_processing"] for slot in slots
        ):
            raise ApiError(503, "no slot available")
        return json_response(slots)

    async def held(self, request: Request) -> Response:
        """List the cache contents of all slots."""
        found = await self._lists(b"/slots/list")
        if isinstance(found, Response):
            return found
        return json_response([slot | {"replica": one.index} for one, items in found for slot in items])

    async def saved(self, request: Request) -> Response:
        """List the saved slots of all directories; local replicas share one."""
        found = await self._lists(b"/list")
        if isinstance(found, Response):
            return found
        by_name = {item["filename"]: item for _, items in found for item in items}
        return json_response([by_name[name] for name in sorted(by_name)])

    async def change_saved(self, request: Request) -> Response:
        """Delete or rename a saved slot in the first replica that has the file."""
        target, body = request.scope["path"].encode(), await read_body(request, self._state.timeout)
        found = None
        for one in self._replicas.ready():
            try:
                found = await one.process.ask("POST", target, body)
            except UpstreamError:
                continue
            if found[0] != 404:
                break
        if found is None:
            raise ApiError(503, "no replica answers now")
        return Response(found[1], found[0], media_type=JSON)

    async def control(self, request: Request) -> Response:
        """Control the answer with this ID in the replica that generates it."""
        target, body = request.scope["path"].encode(), await read_body(request, self._state.timeout)
        found = await self._ask_all("POST", target, body)
        _, status, answer = next((one for one in found if _did_it(one[2])), found[0])
        return Response(answer, status, media_type=JSON)

    async def set_for_all(self, request: Request) -> Response:
        """Apply a setting to all replicas and to later ones."""
        target, body = request.scope["path"].encode(), await read_body(request, self._state.timeout)
        found = await self._ask_all("POST", target, body)
        for _, status, answer in found:
            if status != 200:
                return Response(answer, status, media_type=JSON)
        self._replicas.remember(target, body)
        return Response(found[0][2], media_type=JSON)

    # --- about all of them --------------------------------------------------------------------------------------------
    async def health(self, request: Request) -> Response:
        """Count slots and replicas without asking a replica, unless the slots themselves are requested."""
        replicas = self._replicas.replicas
        total = sum(one.n_slots for one in self._replicas.ready())
        busy = sum(min(one.n_running, one.n_slots) for one in self._replicas.ready())
        out: dict[str, Any] = {"status": "ok", "slots_idle": total - busy, "slots_processing": busy}
        out["replicas"] = dict(Counter(one.state for one in replicas))
        if "include_slots" in request.query_params and self._server.slots:
            found = await self._lists(b"/slots")
            if not isinstance(found, Response):
                out["slots"] = [slot | {"replica": one.index} for one, items in found for slot in items]
        if total == busy and "fail_on_no_slot" in request.query_params:
            return json_response(out | {"status": "no slot available"}, 503)
        return json_response(out)

    async def models(self, request: Request) -> Response:
        """Describe the model; while it loads, from the options."""
        if self._replicas.ready():
            return self._forwarded(request, b"", RoutingHint())
        state = ServerState(self._state.config, SimpleNamespace(state="loading"), started=self._state.started)
        if request.scope["path"] == "/api/tags":
            return json_response({"models": [entry(state)]})
        return json_response(models_json(state))

    async def props(self, request: Request) -> Response:
        """Return the properties of one replica, with the slot count of all."""
        _, status, body = (await self._ask_all("GET", b"/props"))[0]
        if status != 200:
            return Response(body, status, media_type=JSON)
        replicas = self._replicas.replicas
        more: dict[str, Any] = {"total_slots": sum(one.n_slots for one in replicas), "replicas": len(replicas)}
        more["ui_settings"] = page_settings(self._server)[0]
        return json_response(jsontext.parse(body) | more)

    async def metrics(self, request: Request) -> Response:
        """Return metrics of all replicas together, of each replica, and of users."""
        check_metrics(self._state)
        await asyncio.gather(*(one.counters.read(one.process) for one in self._replicas.ready()))
        headers = {"Process-Start-Time-Unix": str(self._state.started), "Content-Type": CONTENT_TYPE}
        return Response(metrics_text(families(self._replicas.replicas), self._state.users), headers=headers)

    async def replicas(self, request: Request) -> Response:
        """Report on each replica."""
        return json_response([_about(one) for one in self._replicas.replicas])

    async def restart(self, request: Request) -> Response:
        """Restart one replica after the other and answer when all are back.

        This needs a server key, not a user's.
        """
        if request.scope.get(ACCOUNT) is not None or not self._state.keys:
            raise ApiError(403, "this needs a key of --api-key or --api-key-file; without, send the server SIGHUP")
        await asyncio.shield(asyncio.ensure_future(self._replicas.restart()))
        return json_response({"success": True})


def _fields(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a JSON object; other bodies give no fields, and the replica reports their errors."""
    try:
        value = jsontext.parse(body) if body.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _did_it(answer: bytes) -> bool:
    return bool(_fields(answer).get("success"))


def _about(one: Replica) -> dict[str, Any]:
    first = one.index * one.n_slots
    return {
        "id": one.index,
        "state": one.state,
        "where": one.process.where if one.process is not None else "",
        "slots": [*range(first, first + one.n_slots)],
        "requests_processing": one.n_running,
        "starts": one.n_starts,
        "error": one.error,
    }
