"""A model of the list, and its process while it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ikcli.server.front.child import Child
from ikcli.server.front.models_entries import ModelEntry
from ikcli.server.front.supervisor import DOWN, DRAINING, READY, STARTING, Member
from ikcli.server.http.errors import ApiError

UNLOADED, SLEEPING = "unloaded", "sleeping"
_STATUS = {DOWN: UNLOADED, STARTING: "loading", READY: "loaded", DRAINING: "unloading"}
KEPT = (b"/props", b"/v1/props", b"/metrics")
"""Paths that a sleeping model answers without waking, with its answers from before."""


@dataclass(eq=False)
class Instance(Member):
    """A model and its process, if it has one.

    `ttl`: seconds that it stays without a request, None: for ever. `holds_memory` from the moment that there is room.
    `failure` is that of the last load. `asleep`: it is or is being unloaded, as it was not used for its time. `info` is
    what it said of itself when it was loaded, `kept` what it answered before it fell asleep.
    """

    entry: ModelEntry
    process: Child | None = field(default=None, kw_only=True)
    holds_memory: bool = False
    ttl: float | None = None
    failure: ApiError | None = None
    exit_code: int | None = None
    asleep: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    kept: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The state in the words of llama-server's model list."""
        return SLEEPING if self.asleep and self.state == DOWN else _STATUS[self.state]


def states(instances: Iterable[Instance]) -> dict[str, int]:
    """Count models by status."""
    found = dict.fromkeys((*_STATUS.values(), SLEEPING), 0)
    for one in instances:
        found[one.status] += 1
    return found
