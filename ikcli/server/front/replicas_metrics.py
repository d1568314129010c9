"""Metrics of replicas for Prometheus.

Plain names are those of one server and cover all replicas; names with `replica_` have one value per replica.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ikcli.server.front.replica import Replica
from ikcli.server.front.replicas_counters import Key, MetricSample
from ikcli.server.http.metrics import PER_POSITION, PREFIX, STEPS, per_decision, per_position

_MEAN = frozenset({"kv_cache_usage_ratio", "n_busy_slots_per_decode"})
_MAX = frozenset({"n_tokens_max"})


def families(replicas: Sequence[Replica]) -> Iterator[Metric]:
    """Return the metrics read from replicas and those that the front keeps about them."""
    found = {one.index: one.counters.values() for one in replicas}
    keys = dict.fromkeys(key for values in found.values() for key in values)
    yield from _of_drafts(found)
    for name, label in keys:
        if label:
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
        values = {str(one.index): float(getattr(one, attribute)) for one in replicas}
        yield _family(MetricSample(name, text, counts, 0.0), values)


def _of_drafts(found: Mapping[int, Mapping[Key, MetricSample]]) -> Iterator[Metric]:
    """Return accepted draft tokens by position, and steps by decision, over all replicas."""
    totals: dict[str, Counter[str]] = {PER_POSITION: Counter(), STEPS: Counter()}
    for values in found.values():
        for (name, label), one in values.items():
            if label and name in totals:
                totals[name][label] += int(one.value)
    if accepted := totals[PER_POSITION]:
        yield per_position({int(position): n for position, n in accepted.items()})
    if steps := totals[STEPS]:
        yield per_decision(steps)


def _family(about: MetricSample, values: dict[str, float]) -> Metric:
    """Return a family by replica, or under the plain name if the key is empty."""
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
