"""LoRA adapter scales in requests: `[{"id": 0, "scale": 0.5}]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ikcli.server.http import fields as f
from ikcli.server.http.errors import bad_request


def scales_of(value: Any, name: str, n_adapters: int) -> tuple[float, ...]:
    """Return one scale per adapter, 0 for adapters missing from the list. Raise ApiError 400 for an unknown id."""
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
    """Return the complete list of adapters and their scales in the same form."""
    return [{"id": i, "scale": scale} for i, scale in enumerate(scales)]
