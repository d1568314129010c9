"""Counters of replicas that continue across restarts, after which a process counts from zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from ikcli.server.front.upstream import Upstream, UpstreamError
from ikcli.server.http.metrics import DECISION, POSITION, PREFIX

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class MetricSample:
    """Sample of a metric, whose name has no prefix.

    `label`: the value of its label, a position in drafts or a decision on them, if it has one.
    """

    name: str
    text: str
    counts: bool
    value: float
    label: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Key of the sample."""
        return self.name, self.label


class ReplicaCounters:
    """Metrics of a replica over all its processes."""

    def __init__(self) -> None:
        self._before: dict[Key, float] = {}
        self._now: dict[Key, MetricSample] = {}

    async def read(self, process: Upstream) -> None:
        """Read the metrics of the process, or keep the last values if it does not answer."""
        try:
            status, body = await process.ask("GET", b"/metrics")
            if status == 200:
                self._now = {value.key: value for value in _parse(body.decode("utf-8", "replace"))}
        except (UpstreamError, ValueError):
            return

    def carry_over(self) -> None:
        """Continue with a new process, which counts from zero."""
        for value in self._now.values():
            if value.counts:
                self._before[value.key] = self._before.get(value.key, 0.0) + value.value
        self._now = {key: replace(value, value=0.0) for key, value in self._now.items() if value.counts}

    def values(self) -> dict[Key, MetricSample]:
        """Return the samples; counters include all earlier processes."""
        before = self._before
        return {
            key: replace(one, value=one.value + before.get(key, 0.0)) if one.counts else one
            for key, one in self._now.items()
        }


def _parse(text: str) -> Iterator[MetricSample]:
    """Yield samples without labels other than those of drafts; the front counts users itself."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.labels.keys() - {POSITION, DECISION} and family.type in ("counter", "gauge"):
                name, label = family.name.removeprefix(PREFIX), next(iter(sample.labels.values()), "")
                yield MetricSample(name, family.documentation, family.type == "counter", sample.value, label)
