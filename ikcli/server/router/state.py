"""What all requests to a server of several models share, and which model one is for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from starlette.requests import Request

from ikcli.errors import IkError
from ikcli.hub.pull import Access
from ikcli.server.http.errors import ApiError, bad_request
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.users import ACCOUNT, Users
from ikcli.server.router.changing import in_thread
from ikcli.server.router.downloads import Downloads
from ikcli.server.router.entries import ModelEntry, ModelsFile
from ikcli.server.router.manager import Manager
from ikcli.settings.run import RunConfig
from ikcli.settings.values import OFF, ON


@dataclass
class RouterState:
    """`read` reads the list of models again. `single`: there is one model, which sleeps when it is idle."""

    config: RunConfig
    manager: Manager
    keys: tuple[str, ...] = ()
    log: ServerLog = field(default_factory=ServerLog)
    users: Users = field(default_factory=Users)
    read: Callable[[], ModelsFile] | None = None
    single: bool = False
    names: tuple[str, ...] = ()
    started: int = field(default_factory=lambda: int(time.time()))
    ready: bool = True
    failed: bool = False
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @cached_property
    def downloads(self) -> Downloads:
        """Models that are being downloaded."""
        access = Access(self.config.hub.token, self.config.hub.offline)
        return Downloads(access, self.manager.events, self.refresh, self.log)

    async def refresh(self) -> None:
        """Take the list of models as it is now; ApiError 500 if it cannot be read, and then all stays as it was."""
        if self.read is None:
            return
        async with self._reading:
            try:
                file = await in_thread(self.read)
            except IkError as e:
                raise ApiError(500, f"the list of models stays as it was: {e}") from None
            self.manager.update(file)

    def default(self) -> ModelEntry:
        """The model of requests that name none; ApiError 404 if there is none at all."""
        entry = self.manager.file.default
        if entry is None:
            raise ApiError(404, "this server has no model yet; POST /models downloads one")
        return entry


def find(state: RouterState, name: str) -> ModelEntry:
    """The model of this name; ApiError if there is none (404), or it is on its way (503)."""
    entry = state.manager.file.find(name)
    if entry is None:
        if state.downloads.find(name) is not None:
            raise ApiError(503, f"model {name[:100]} is being downloaded")
        known = ", ".join(state.manager.file.entries) or "none yet; POST /models downloads one"
        raise ApiError(404, f"model '{name[:100]}' not found; this server has {known}")
    return entry


def check_user(request: Request, entry: ModelEntry) -> None:
    """ApiError 403 if the user of a request may not use a model."""
    account = request.scope.get(ACCOUNT)
    if account is not None:
        account.check_model(entry.names)


def flag(request: Request, name: str, default: bool) -> bool:
    """A parameter of the address that is true or false."""
    text = request.query_params.get(name, "").lower()
    if text and text not in ON | OFF:
        raise bad_request(f"{name} must be true or false, not {text[:20]}")
    return text in ON if text else default
