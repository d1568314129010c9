"""Counters of replicas for Prometheus: of each, and of all together.

A replica that is started again counts from nothing; here its counters go on. The plain names have what all replicas
did together, as from one server; those with `replica_` what each did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from ikcli.server.http.metrics import POSITION, PREFIX, per_position
from ikcli.server.http.users import Users
from ikcli.server.router.upstream import UpstreamError

if TYPE_CHECKING:
    from ikcli.server.replicas.crew import Replica

Key = tuple[str, str]
_MEAN = frozenset({"kv_cache_usage_ratio", "n_busy_slots_per_decode"})
_MAX = frozenset({"n_tokens_max"})


class Asked(Protocol):
    """A process that answers."""

    async def ask(self, method: str, target: bytes) -> tuple[int, bytes]: ...


@dataclass(frozen=True, slots=True)
class Value:
    """A number with its name, without the prefix; `position` in a draft, for those that are counted so."""

    name: str
    text: str
    counts: bool
    value: float
    position: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others."""
        return self.name, self.position


class Counters:
    """The numbers of a replica."""

    def __init__(self) -> None:
        self._before: dict[Key, float] = {}
        self._now: dict[Key, Value] = {}

    async def read(self, process: Asked) -> None:
        """Ask the process; one that does not answer leaves what it said last."""
        try:
            status, body = await process.ask("GET", b"/metrics")
            if status == 200:
                self._now = {value.key: value for value in _parse(body.decode("utf-8", "replace"))}
        except (UpstreamError, ValueError):
            return

    def begin_anew(self) -> None:
        """Another process begins to count."""
        for value in self._now.values():
            if value.counts:
                self._before[value.key] = self._before.get(value.key, 0.0) + value.value
        self._now = {key: replace(value, value=0.0) for key, value in self._now.items() if value.counts}

    def values(self) -> dict[Key, Value]:
        """The numbers; counters are those of all processes so far."""
        before = self._before
        return {
            key: replace(one, value=one.value + before.get(key, 0.0)) if one.counts else one
            for key, one in self._now.items()
        }


def _parse(text: str) -> Iterator[Value]:
    """The numbers without labels but the position in a draft; those of users are counted in front."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.labels.keys() - {POSITION} and family.type in ("counter", "gauge"):
                name, position = family.name.removeprefix(PREFIX), sample.labels.get(POSITION, "")
                yield Value(name, family.documentation, family.type == "counter", sample.value, position)


def metrics_text(replicas: Sequence[Replica], users: Users) -> bytes:
    """What was read of all, and what is known of them here."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(replicas, users))
    return generate_latest(registry)


class _Collector:
    def __init__(self, replicas: Sequence[Replica], users: Users) -> None:
        self._replicas, self._users = replicas, users

    def collect(self) -> Iterator[Metric]:
        """All families."""
        found = {one.index: one.counters.values() for one in self._replicas}
        keys = dict.fromkeys(key for values in found.values() for key in values)
        yield from _by_position(found)
        for name, position in keys:
            if position:
                continue
            each = {index: values[name, ""] for index, values in found.items() if (name, "") in values}
            first = next(iter(each.values()))
            yield _family(first, {"": _together(name, [value.value for value in each.values()])})
            yield _family(first, {str(index): value.value for index, value in each.items()})
        for name, text, counts, attribute in (
            ("up", "1 while requests may go to the replica.", False, "usable"),
            ("router_requests_processing", "Requests given to the replica.", False, "n_running"),
            ("starts", "How often the replica was started.", True, "n_starts"),
            ("requests_unanswered", "Requests whose answer the replica did not end.", True, "n_unanswered"),
        ):
            values = {str(one.index): float(getattr(one, attribute)) for one in self._replicas}
            yield _family(Value(name, text, counts, 0.0), values)
        if self._users:
            yield from self._users.collect(PREFIX)


def _by_position(found: Mapping[int, Mapping[Key, Value]]) -> Iterator[Metric]:
    """What drafts have brought at each position, all replicas together."""
    accepted: Counter[int] = Counter()
    for values in found.values():
        for (_, position), one in values.items():
            if position:
                accepted[int(position)] += int(one.value)
    if accepted:
        yield per_position(accepted)


def _family(about: Value, values: dict[str, float]) -> Metric:
    """By replica, or under the plain name if the key is empty."""
    make = CounterMetricFamily if about.counts else GaugeMetricFamily
    if "" in values:
        return make(PREFIX + about.name, about.text, value=values[""])
    family = make(PREFIX + "replica_" + about.name, about.text, labels=["replica"])
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def _together(name: str, values: Sequence[float]) -> float:
    if name in _MAX:
        return max(values)
    return sum(values) / len(values) if name in _MEAN else sum(values)
