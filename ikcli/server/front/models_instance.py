"""A model of the list and its process while it is loaded."""

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
"""Paths that a sleeping model answers without waking, with kept answers."""


@dataclass(eq=False)
class Instance(Member):
    """A model and its process, if it has one.

    `ttl` is the number of seconds that it stays loaded without a request, None for unlimited. `holds_memory` is set as
    soon as there is room for it. `failure` is that of the last load. `asleep`: it is unloaded, or being unloaded,
    because it was idle for its TTL. `info` is its self-description after loading, `kept` its answers from before it
    fell asleep.
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
        """State in the words of llama-server's model list."""
        return SLEEPING if self.asleep and self.state == DOWN else _STATUS[self.state]


def states(instances: Iterable[Instance]) -> dict[str, int]:
    """Count models by status."""
    found = dict.fromkeys((*_STATUS.values(), SLEEPING), 0)
    for one in instances:
        found[one.status] += 1
    return found
