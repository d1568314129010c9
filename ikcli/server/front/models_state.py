"""State shared by all requests to a server of several models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from starlette.requests import Request

from ikcli.errors import IkError
from ikcli.hub.pull import Access
from ikcli.server.front.models import ModelSupervisor
from ikcli.server.front.models_downloads import Downloads
from ikcli.server.front.models_entries import ModelEntry, ModelsFile
from ikcli.server.front.state import FrontState
from ikcli.server.front.threads import in_thread
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.users import ACCOUNT
from ikcli.settings.values import OFF, ON


@dataclass
class ModelsState(FrontState[ModelSupervisor]):
    """See FrontState.

    `read` reads the list of models again; `single`: there is only one model, which sleeps when idle.
    """

    read: Callable[[], ModelsFile] | None = None
    single: bool = False
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def downloads(self) -> Downloads:
        """The running downloads."""
        access = Access(self.config.hub.token, self.config.hub.offline)
        return Downloads(access, self.supervisor.events, self.refresh, self.log)

    async def refresh(self) -> None:
        """Read the list of models again. Raise ApiError 500, and keep the old list, if it cannot be read."""
        if self.read is None:
            return
        async with self._reading:
            try:
                file = await in_thread(self.read)
            except IkError as e:
                raise ApiError(500, f"the list of models stays as it was: {e}") from None
            self.supervisor.update(file)

    def default(self) -> ModelEntry:
        """Return the model for requests that name none. Raise ApiError 404 if the list is empty."""
        entry = self.supervisor.file.default
        if entry is None:
            raise ApiError(404, "this server has no model yet; POST /models downloads one")
        return entry


def find(state: ModelsState, name: str) -> ModelEntry:
    """Return the model with this name. Raise ApiError 404 if unknown, 503 while it is being downloaded."""
    entry = state.supervisor.file.find(name)
    if entry is None:
        if state.downloads.find(name) is not None:
            raise ApiError(503, f"model {name[:100]} is being downloaded")
        known = ", ".join(state.supervisor.file.entries) or "none yet; POST /models downloads one"
        raise ApiError(404, f"model '{name[:100]}' not found; this server has {known}")
    return entry


def check_user(request: Request, entry: ModelEntry) -> None:
    """Raise ApiError 403 unless the user of a request may use a model."""
    account = request.scope.get(ACCOUNT)
    if account is not None:
        account.check_model(entry.names)


def flag(request: Request, name: str, default: bool) -> bool:
    """Return a boolean query parameter."""
    text = request.query_params.get(name, "").lower()
    if text and text not in ON | OFF:
        raise bad_request(f"{name} must be true or false, not {text[:20]}")
    return text in ON if text else default
