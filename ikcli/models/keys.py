"""Read and check the architecture keys of a file (`<arch>.block_count`, ...)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ikcli.errors import FormatError

MAX_SIZE = 1 << 31
SPELLINGS = {"cohere2moe": "cohere2_moe", "granite-swa": "granite_swa"}
"""Other names of architectures in files, of llama.cpp and of earlier versions: ours."""


class HasShape(Protocol):
    """The part of a tensor description that hyper-parameters need."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Keys:
    """Typed access to `<arch>.<key>` with messages that name file and key.

    `arch` is our name of the architecture; the file may spell it differently.
    """

    def __init__(self, metadata: Mapping[str, Any], spelling: str, source: str) -> None:
        self.metadata, self.spelling, self.source = metadata, spelling, source
        self.alike: tuple[int, ...] = ()  # of layers that lists may leave out: which of the others they are like
        self.arch = SPELLINGS.get(spelling, spelling)

    def name(self, key: str) -> str:
        return f"{self.spelling}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.name(key) in self.metadata

    def fail(self, key: str, why: str) -> FormatError:
        return FormatError(f"{self.source}: metadata key {self.name(key)} {why}")

    def raw(self, key: str, default: Any) -> Any:
        value = self.metadata.get(self.name(key), default)
        if value is None:
            raise self.fail(key, "is missing; the file is incomplete or of another architecture")
        return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value

    def integer(self, key: str, default: int | None = None, *, least: int = 0, most: int = MAX_SIZE) -> int:
        """Return a whole number within bounds; `default` None: the key is required."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"should be a whole number, but is {short(value)}")
        if not least <= value <= most:
            raise self.fail(key, f"is {value}, outside {least}..{most}")
        return value

    def number(self, key: str, default: float | None = None, *, most: float = 1e30) -> float:
        """Return a finite number of at most this magnitude."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, f"should be a finite number, but is {short(value)}")
        if abs(value) > most:
            raise self.fail(key, f"is {value}, outside -{most:g}..{most:g}")
        return float(value)

    def per_layer(self, key: str, default: int | None = None, *, n_layer: int, least: int = 0) -> int | tuple[int, ...]:
        """Return a number, or one per layer where layers differ."""
        items = self.items(key, n_layer)
        if items is None:
            return self.integer(key, default, least=least)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in items):
            raise self.fail(key, f"should hold whole numbers, but is {short(self.raw(key, None))}")
        bad = [v for v in items if not least <= v <= MAX_SIZE]
        if bad:
            raise self.fail(key, f"holds {bad[0]}, outside {least}..{MAX_SIZE}")
        return items if len(set(items)) > 1 else items[0]

    def numbers(self, key: str, default: float | None = None, *, n_layer: int) -> tuple[float, ...]:
        """Return a finite number per layer."""
        items = self.items(key, n_layer)
        if items is None:
            return (self.number(key, default),) * n_layer
        if not all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in items):
            raise self.fail(key, f"should hold finite numbers, but is {short(self.raw(key, None))}")
        return tuple(map(float, items))

    def items(self, key: str, n_layer: int) -> tuple[Any, ...] | None:
        """Return the values of a list, one per layer; the list may be longer, for layers that the run leaves out."""
        value = self.metadata.get(self.name(key))
        if value is None or not hasattr(value, "__len__") or isinstance(value, str):
            return None
        items = tuple(v.item() if isinstance(v, np.generic) else v for v in value)
        if self.alike and len(items) < n_layer:
            items += tuple(items[il] for il in self.alike[len(items) - n_layer :] if il < len(items))
        if len(items) < n_layer:
            raise self.fail(key, f"has {len(items)} values for {n_layer} layers")
        return items[:n_layer]


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def by_layer(value: int | tuple[int, ...], n_layer: int) -> tuple[int, ...]:
    """Return a value for every layer."""
    return value if isinstance(value, tuple) else (value,) * n_layer
