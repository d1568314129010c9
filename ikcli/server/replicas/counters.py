"""Counters of replicas for Prometheus: of each, and of all together.

A replica that is started again counts from nothing; here its counters go on. The plain names have what all replicas
did together, as from one server; those with `replica_` what each did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from ikcli.server.http.metrics import PREFIX
from ikcli.server.http.users import Users
from ikcli.server.router.upstream import UpstreamError

if TYPE_CHECKING:
    from ikcli.server.replicas.crew import Replica

_MEAN = frozenset({"kv_cache_usage_ratio", "n_busy_slots_per_decode"})
_MAX = frozenset({"n_tokens_max"})


class Asked(Protocol):
    """A process that answers."""

    async def ask(self, method: str, target: bytes) -> tuple[int, bytes]: ...


@dataclass(frozen=True, slots=True)
class Value:
    """A number with its name, without the prefix."""

    name: str
    text: str
    counts: bool
    value: float


class Counters:
    """The numbers of a replica."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._now: dict[str, Value] = {}

    async def read(self, process: Asked) -> None:
        """Ask the process; one that does not answer leaves what it said last."""
        try:
            status, body = await process.ask("GET", b"/metrics")
            if status == 200:
                self._now = {value.name: value for value in _parse(body.decode("utf-8", "replace"))}
        except (UpstreamError, ValueError):
            return

    def begin_anew(self) -> None:
        """Another process begins to count."""
        for value in self._now.values():
            if value.counts:
                self._before[value.name] = self._before.get(value.name, 0.0) + value.value
        self._now = {name: Value(name, value.text, True, 0.0) for name, value in self._now.items() if value.counts}

    def values(self) -> dict[str, Value]:
        """The numbers by name; counters are those of all processes so far."""
        before = self._before
        return {
            name: Value(name, one.text, one.counts, one.value + (before.get(name, 0.0) if one.counts else 0.0))
            for name, one in self._now.items()
        }


def _parse(text: str) -> Iterator[Value]:
    """The numbers without labels; those of users are counted in front."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.labels and family.type in ("counter", "gauge"):
                name = family.name.removeprefix(PREFIX)
                yield Value(name, family.documentation, family.type == "counter", sample.value)


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
        names = dict.fromkeys(name for values in found.values() for name in values)
        for name in names:
            each = {index: values[name] for index, values in found.items() if name in values}
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
