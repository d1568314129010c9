"""A replica, and the choice of one for a request.

A request goes to the replica that holds its longest prefix, of those with a free slot. If all slots are busy or no
replica holds enough of it, the request goes to the replica with the fewest requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ikcli.server.front.prefixes import Blocks, PrefixIndex
from ikcli.server.front.replicas_counters import ReplicaCounters
from ikcli.server.front.supervisor import READY, STARTING, Member

_STEP = 64  # tokens
_NO_ANSWERS: Mapping[Replica, Held] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Question:
    """A request as replicas get it: target and body."""

    target: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class RoutingHint:
    """Routing hint of a request: the blocks of its prefix, or the replica of the slot that it names.

    `question`: what replicas are asked to learn how much of its prompt they hold.
    """

    blocks: Blocks = ()
    replica: int | None = None
    question: Question | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A replica's answer: tokens of a prompt, and how many of the first ones its slots, RAM and disk hold."""

    n_prompt: int
    n_slot: int
    n_ram: int
    n_disk: int

    @property
    def share(self) -> float:
        """Return the share of the prompt that is held, in steps so small that computing one costs next to nothing."""
        return _steps(self.n_slot + self.n_ram + self.n_disk) / max(_steps(self.n_prompt), 1)

    @property
    def at_hand(self) -> int:
        """Return the steps that need not be read from disk."""
        return _steps(self.n_slot + self.n_ram)


def _steps(n_tokens: int) -> int:
    return n_tokens // _STEP


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

    @property
    def has_free_slot(self) -> bool:
        """Whether a request would begin at once."""
        return self.n_running < self.n_slots


def choose(
    replicas: Sequence[Replica], blocks: Blocks, least: float, answers: Mapping[Replica, Held] = _NO_ANSWERS
) -> Replica:
    """Return the replica for a request. `least` is the share of its prompt that a preferred replica must hold.

    `answers`: what replicas say that they hold; others are judged by the blocks of earlier requests.
    """
    shares = {
        one: answers[one].share if one in answers else one.held.shared(blocks) / max(len(blocks), 1)
        for one in replicas
    }  # fmt: skip
    holding = [one for one in replicas if one.has_free_slot and shares[one] and shares[one] >= least]
    if holding:
        at_hand = {one: answers[one].at_hand if one in answers else 0 for one in holding}
        return min(holding, key=lambda one: (-shares[one], -at_hand[one], one.n_running, one.used))
    return min(replicas, key=lambda one: (one.n_running, -shares[one], one.used))
