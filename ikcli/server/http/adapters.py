"""Scales of low-rank adapters in requests: `[{"id": 0, "scale": 0.5}]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request


def scales_of(value: Any, name: str, n_adapters: int) -> tuple[float, ...]:
    """A scale for every adapter: 0 for those that the list does not name. ApiError 400 for ids that do not exist."""
    scales = [0.0] * n_adapters
    for i, item in enumerate(f.array(value, name)):
        entry = f.table(item, f"{name}[{i}]")
        for key in ("id", "scale"):
            if entry.get(key) is None:
                raise bad_request(f"{name}[{i}].{key} is required")
        number = f.integer(entry["id"], f"{name}[{i}].id")
        if not 0 <= number < n_adapters:
            known = f"ids are 0 to {n_adapters - 1}" if n_adapters else "no adapter is loaded"
            raise bad_request(f"{name}[{i}].id: invalid adapter id {number}, {known}")
        scales[number] = f.real(entry["scale"], f"{name}[{i}].scale")
    return tuple(scales)


def scales_json(scales: Sequence[float]) -> list[dict[str, Any]]:
    """The same list, complete."""
    return [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
