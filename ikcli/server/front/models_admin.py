"""Endpoints that manage models: list, load, unload, download, delete, and a stream of events."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from ikcli.errors import IkError
from ikcli.hub.cache import plan_removal, remove
from ikcli.server.front import models_lists as lists
from ikcli.server.front.app import Route
from ikcli.server.front.models_downloads import ModelDownload
from ikcli.server.front.models_entries import CACHE, ModelEntry
from ikcli.server.front.models_instance import UNLOADED
from ikcli.server.front.models_state import ModelsState, check_user, find, flag
from ikcli.server.front.supervisor import READY
from ikcli.server.front.threads import in_thread
from ikcli.server.http import fields as f
from ikcli.server.http import sse
from ikcli.server.http.answer import json_response
from ikcli.server.http.body import read_object
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.users import ACCOUNT

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class ModelsAdmin:
    """Management endpoints."""

    def __init__(self, state: ModelsState) -> None:
        self._state, self._models = state, state.supervisor

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            ("GET", ("/models", "/v1/models"), self.models),
            ("POST", ("/models",), self.download),
            ("DELETE", ("/models",), self.delete),
            ("GET", ("/models/sse",), self.events),
            ("POST", ("/models/load",), self.load),
            ("POST", ("/models/unload",), self.unload),
        ]

    async def models(self, request: Request) -> Response:
        """List all models with their states; `?reload=1` reads their sources again first."""
        if flag(request, "reload", False):
            await self._state.refresh()
        found = self._models.instances
        data = [lists.entry(one, self._state.started) for one in found.values()]
        coming = [one for one in self._state.downloads.running.values() if one.name not in found]
        data += [lists.coming(one.name, one.progress(), self._state.started) for one in coming]
        out: dict[str, Any] = {"object": "list", "data": data}
        if self._state.single:
            out["models"] = [item for one in found.values() for item in one.info.get("catalogue", ())]
        return json_response(out)

    async def events(self, request: Request) -> Response:
        """Stream events about models."""
        ping = max(self._state.config.server.sse_ping_interval, 0)
        events = self._models.events.listen(request.receive, ping)
        return sse.EventStream(events, lambda: None, self._state.config.server.timeout)

    async def load(self, request: Request) -> Response:
        """Load `model` and answer once it is loaded."""
        entry = self._known(request, await self._name(request))
        if self._models.instances[entry.name].state == READY:
            raise bad_request(f"model {entry.name} is loaded already")
        await self._models.load(entry.name)
        return json_response({"success": True})

    async def unload(self, request: Request) -> Response:
        """Unload `model` once its requests are done, then answer; cancel its download if one is running."""
        name = await self._name(request)
        coming = self._state.downloads.find(name)
        if coming is not None:
            self._cancel(request, coming)
            return json_response({"success": True})
        entry = self._known(request, name)
        if self._models.instances[entry.name].status == UNLOADED:
            raise bad_request(f"model {entry.name} is not loaded")
        await self._models.unload(entry.name)
        return json_response({"success": True})

    async def download(self, request: Request) -> Response:
        """Start downloading `model`, given as `user/repo:quant`."""
        name = await self._name(request)
        self._check_owner(request)
        if self._models.file.find(name) is not None:
            raise bad_request(f"model {name} is there already")
        await self._state.downloads.start(name)
        return json_response({"success": True})

    def _cancel(self, request: Request, coming: ModelDownload) -> None:
        self._check_owner(request)
        self._state.downloads.cancel(coming)

    async def delete(self, request: Request) -> Response:
        """Delete the model `?model=` from the cache; models from elsewhere cannot be deleted."""
        self._check_owner(request)
        name = request.query_params.get("model")
        if not name:
            raise bad_request("?model=NAME is required")
        entry = self._known(request, name)
        if entry.source != CACHE:
            raise bad_request(f"model {entry.name} is not one of the cache, and only those can be deleted")
        for other in self._models.file.entries.values():
            if other.name != entry.name and other.config.model == entry.config.model:
                raise bad_request(
                    f"the file of {entry.name} is that of {other.name}, too, which is not one of the cache"
                )
        try:
            removal = await in_thread(lambda: plan_removal(str(entry.config.model)))
            await self._models.remove(entry.name)
            await in_thread(lambda: remove(removal))
        except (IkError, OSError) as e:
            await self._state.refresh()
            raise ApiError(500, f"model {entry.name} could not be deleted: {e}") from None
        await self._state.refresh()
        self._state.log.info("router", "model deleted", model=entry.name)
        return json_response({"success": True})

    async def _name(self, request: Request) -> str:
        body = await read_object(request, self._state.config.server.timeout)
        if body.get("model") is None:
            raise bad_request("model is required")
        return f.text(body["model"], "model")

    def _known(self, request: Request, name: str) -> ModelEntry:
        entry = self._state.default() if self._state.single else find(self._state, name)
        check_user(request, entry)
        return entry

    def _check_owner(self, request: Request) -> None:
        """Raise ApiError if the client may not change the list of models: a user with limits or a foreign page."""
        if not self._models.file.downloads:
            raise bad_request("this server does not serve the models of the cache; start it with --models-cache")
        if request.scope.get(ACCOUNT) is not None:
            raise ApiError(403, "a user may not change which models there are; it takes a key of --api-key")
        origin = urlsplit(request.headers.get("origin", "")).hostname
        if origin and not self._state.keys and origin not in _LOCAL | {request.url.hostname}:
            raise ApiError(403, f"web pages of {origin} may do this only if the server has an --api-key")
