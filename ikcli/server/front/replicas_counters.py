"""What replicas count. One that is started again counts from nothing; here its counters go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from ikcli.server.front.upstream import Upstream, UpstreamError
from ikcli.server.http.metrics import POSITION, PREFIX

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
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


class ReplicaCounters:
    """The numbers of a replica."""

    def __init__(self) -> None:
        self._before: dict[Key, float] = {}
        self._now: dict[Key, Sample] = {}

    async def read(self, process: Upstream) -> None:
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

    def values(self) -> dict[Key, Sample]:
        """The numbers; counters are those of all processes so far."""
        before = self._before
        return {
            key: replace(one, value=one.value + before.get(key, 0.0)) if one.counts else one
            for key, one in self._now.items()
        }


def _parse(text: str) -> Iterator[Sample]:
    """The numbers without labels but the position in a draft; those of users are counted in front."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.labels.keys() - {POSITION} and family.type in ("counter", "gauge"):
                name, position = family.name.removeprefix(PREFIX), sample.labels.get(POSITION, "")
                yield Sample(name, family.documentation, family.type == "counter", sample.value, position)
