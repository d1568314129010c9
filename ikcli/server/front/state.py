"""State shared by all requests to a front."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ikcli.server.front.supervisor import ProcessSupervisor
from ikcli.server.http.logs import ServerLog
from ikcli.server.http.users import Users
from ikcli.settings.run import RunConfig

S = TypeVar("S", bound=ProcessSupervisor)


@dataclass
class FrontState(Generic[S]):
    """State for the gateway (`http.state.Front`), with the supervisor of the processes behind it."""

    config: RunConfig
    supervisor: S
    keys: tuple[str, ...] = ()
    log: ServerLog = field(default_factory=ServerLog)
    users: Users = field(default_factory=Users)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def timeout(self) -> float:
        """Seconds for reading a request."""
        return float(self.config.server.timeout)

    @property
    def ready(self) -> bool:
        """Whether the server takes requests."""
        return True

    @property
    def failed(self) -> bool:
        """Whether the server can never take requests."""
        return False

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model, if there is only one."""
        return ()
