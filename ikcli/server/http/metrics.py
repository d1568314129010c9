"""/metrics: the engine's counters as Prometheus text, under llama-server's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ikcli.server.http.users import Users
from ikcli.server.slots.states import EngineMetrics

PREFIX = "llamacpp:"
CONTENT_TYPE = "text/plain; version=0.0.4"

_COUNTERS = (
    ("prompt_tokens", "Number of prompt tokens processed.", "prompt_tokens_total"),
    ("prompt_seconds", "Prompt process time.", "prompt_seconds_total"),
    ("tokens_predicted", "Number of generation tokens processed.", "tokens_predicted_total"),
    ("tokens_predicted_seconds", "Predict process time.", "tokens_predicted_seconds_total"),
    ("n_decode", "Number of computed batches.", "n_decode_total"),
    ("prompt_tokens_from_slots", "Prompt tokens that a slot had.", "prompt_tokens_slot_total"),
    ("prompt_tokens_from_ram", "Prompt tokens that came from the prompt cache in RAM.", "prompt_tokens_ram_total"),
    ("prompt_tokens_from_disk", "Prompt tokens that came from disk.", "prompt_tokens_disk_total"),
    ("spec_decode_num_draft_tokens", "Drafted tokens.", "draft_tokens_total"),
    ("spec_decode_num_accepted_tokens", "Accepted drafted tokens.", "draft_tokens_accepted_total"),
    ("spec_decode_num_drafts", "Drafts that were checked.", "drafts_total"),
)
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
POSITION = "position"
STEPS, DECISION = "spec_decode_num_steps", "decision"
_GAUGES = (
    ("prompt_tokens_seconds", "Average prompt throughput in tokens/s.", "prompt_tokens_seconds"),
    ("predicted_tokens_seconds", "Average generation throughput in tokens/s.", "predicted_tokens_seconds"),
    ("kv_cache_usage_ratio", "KV-cache usage. 1 means 100 percent usage.", "kv_cache_usage_ratio"),
    ("kv_cache_tokens", "KV-cache tokens.", "kv_cache_tokens"),
    ("requests_processing", "Number of requests processing.", "requests_processing"),
    ("requests_deferred", "Number of requests deferred.", "requests_deferred"),
    ("n_tokens_max", "Largest number of tokens a slot held.", "n_tokens_max"),
    ("n_busy_slots_per_decode", "Average number of busy slots per computed batch.", "n_busy_slots_per_decode"),
    ("prompt_cache_bytes", "Memory of prompts kept in RAM.", "prompt_cache_bytes"),
    ("prompt_cache_entries", "Prompts kept in RAM.", "prompt_cache_entries"),
)


class _Collector:
    def __init__(self, values: EngineMetrics, users: Users) -> None:
        self._values, self._users = values, users

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, value=float(getattr(self._values, field)))
        if self._values.accepted_by_position:
            yield per_position(self._values.accepted_by_position)
        if self._values.draft_decisions:
            yield per_decision(self._values.draft_decisions)
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(PREFIX + name, text, value=float(getattr(self._values, field)))
        yield from _experts(self._values)
        if self._users:
            yield from self._users.collect(PREFIX)


def _experts(values: EngineMetrics) -> Iterator[Metric]:
    """Yield where the experts of each layer are, and how often those used were in the faster place."""
    if not values.expert_places:
        return
    labels = ["layer", "place"]
    counts = GaugeMetricFamily(PREFIX + "experts", "Routed experts of a layer in a place.", labels=labels)
    sizes = GaugeMetricFamily(PREFIX + "expert_bytes", "Bytes of routed experts of a layer in a place.", labels=labels)
    for p in values.expert_places:
        counts.add_metric([str(p.il), p.place], float(p.n_experts))
        sizes.add_metric([str(p.il), p.place], float(p.n_bytes))
    yield from (counts, sizes)
    if values.expert_uses:
        uses = CounterMetricFamily(PREFIX + "expert_uses", "Uses of experts that a cache may hold.", labels=["cache"])
        hits = CounterMetricFamily(PREFIX + "expert_hits", "Uses of experts that a cache held.", labels=["cache"])
        for cache, (used, held) in sorted(values.expert_uses.items()):
            uses.add_metric([cache], float(used))
            hits.add_metric([cache], float(held))
        yield from (uses, hits)


def per_position(accepted: Mapping[int, float]) -> Metric:
    """Return the accepted tokens by their position in the draft."""
    family = CounterMetricFamily(PREFIX + PER_POSITION, "Accepted tokens by position in the draft.", labels=[POSITION])
    for position, value in sorted(accepted.items()):
        family.add_metric([str(position)], float(value))
    return family


def per_decision(steps: Mapping[str, float]) -> Metric:
    """Return the steps by what was decided of their drafts, and why."""
    family = CounterMetricFamily(PREFIX + STEPS, "Steps by the decision on drafts.", labels=[DECISION])
    for decision, value in sorted(steps.items()):
        family.add_metric([decision], float(value))
    return family


def prometheus_text(values: EngineMetrics, users: Users) -> bytes:
    """Return the counters in the Prometheus text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(values, users))
    return generate_latest(registry)
