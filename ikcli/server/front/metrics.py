"""A front's own metrics as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from ikcli.server.http.metrics import PREFIX
from ikcli.server.http.users import Users


def metrics_text(families: Iterable[Metric], users: Users) -> bytes:
    """Return these families and, if there are users, the usage of each."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families([*families, *(users.collect(PREFIX) if users else ())]))
    return generate_latest(registry)


class _Families:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Return all families."""
        return iter(self._families)
