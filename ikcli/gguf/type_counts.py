"""Count the tensors and bytes of each tensor type in a model file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import TensorInfo


@dataclass(frozen=True, slots=True)
class TypeCount:
    """The share of a model that has one tensor type."""

    type: GGMLType
    n_tensors: int
    n_elements: int
    n_bytes: int


def count_types(tensors: Sequence[TensorInfo]) -> list[TypeCount]:
    """Return a histogram of tensor types, in order of first appearance."""
    totals: dict[GGMLType, list[int]] = {}
    for t in tensors:
        total = totals.setdefault(t.type, [0, 0, 0])
        for i, v in enumerate((1, t.n_elements, t.n_bytes)):
            total[i] += v
    return [TypeCount(t, *v) for t, v in totals.items()]
