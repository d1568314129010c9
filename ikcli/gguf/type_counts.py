"""How much of a model file each tensor type takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import TensorInfo


@dataclass(frozen=True, slots=True)
class TypeCount:
    """How much of a model is of one tensor type."""

    type: GGMLType
    n_tensors: int
    n_elements: int
    n_bytes: int


def count_types(tensors: Sequence[TensorInfo]) -> list[TypeCount]:
    """Histogram of tensor types in order of first appearance."""
    totals: dict[GGMLType, list[int]] = {}
    for t in tensors:
        total = totals.setdefault(t.type, [0, 0, 0])
        for i, v in enumerate((1, t.n_elements, t.n_bytes)):
            total[i] += v
    return [TypeCount(t, *v) for t, v in totals.items()]
