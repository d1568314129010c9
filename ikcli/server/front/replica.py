"""A replica, and the choice of one for a request.

A request goes to the replica that holds its longest prefix, unless all slots there are busy. In that case, or if no
replica holds enough of it, the request goes to the replica with the fewest requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from ikcli.server.front.prefixes import Blocks, PrefixIndex
from ikcli.server.front.replicas_counters import ReplicaCounters
from ikcli.server.front.supervisor import READY, STARTING, Member


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """Routing hint of a request: the blocks of its prefix, or the replica of the slot that it names."""

    blocks: Blocks = ()
    replica: int | None = None


@dataclass(eq=False)
class Replica(Member):
    """One process of a model.

    `doubtful`: it failed a request and has not answered a check since. `error` is the reason for its last end.
    """

    index: int
    n_slots: int
    state: str = field(default=STARTING, kw_only=True)
    doubtful: bool = False
    n_ended: int = 0
    n_unanswered: int = 0
    error: str = ""
    held: PrefixIndex = field(default_factory=PrefixIndex)
    counters: ReplicaCounters = field(default_factory=ReplicaCounters)
    restart: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def usable(self) -> bool:
        """Whether it takes requests."""
        return self.state == READY and not self.doubtful


def choose(replicas: Sequence[Replica], blocks: Blocks, least: float) -> Replica:
    """Return the replica for a request. `least` is the share of its blocks that a preferred replica must hold."""
    shared = {one: one.held.shared(blocks) for one in replicas}
    most = max(shared.values())
    if most and most >= least * len(blocks):
        holding = [one for one in replicas if shared[one] == most and one.n_running < one.n_slots]
        if holding:
            return min(holding, key=lambda one: (one.n_running, one.used))
    return min(replicas, key=lambda one: (one.n_running, -shared[one], one.used))
