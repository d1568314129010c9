"""The tensors of a model: expected shapes, their check against a file, and access by name while a graph is recorded.

Shapes are in GGUF order (row length first). Attribute names are the tensor names of the file:
`w.layer(3).attn_q` is `blk.3.attn_q.weight`, `w.layer(3).attn_q_bias` is `blk.3.attn_q.bias` (also `scale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.graph import Weight
from ikcli.graph.ops_experts import in_slots


class TensorLike(Protocol):
    """Type and shape of a stored tensor."""

    @property
    def type(self) -> GGMLType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An expected tensor: its shape, other accepted shapes of the same bytes, and whether it may be absent.

    `unless`: another tensor with the same content, which replaces this one.
    """

    shape: tuple[int, ...]
    required: bool = True
    also: tuple[tuple[int, ...], ...] = ()
    unless: str = ""


TensorSpecs = dict[str, TensorSpec]


def check_tensors(specs: TensorSpecs, tensors: Mapping[str, TensorLike], source: str) -> None:
    """Raise FormatError for a required tensor that is absent or a tensor of another shape."""
    for name, spec in specs.items():
        tensor = tensors.get(name)
        if tensor is None:
            if spec.required and spec.unless not in tensors:
                _check_split_experts(name, tensors, source)
                raise FormatError(f"{source}: tensor '{name}' is missing; the file is incomplete")
        elif not any(_same(tensor.shape, s) for s in (spec.shape, *spec.also)):
            raise FormatError(
                f"{source}: check_tensor_dims: tensor '{name}' has wrong shape; "
                f"expected {_dims(spec.shape)}, got {_dims(tensor.shape)}"
            )


def _check_split_experts(name: str, tensors: Mapping[str, TensorLike], source: str) -> None:
    """Raise UnsupportedError if the file has one tensor per expert (files of 2023) instead of a joined one."""
    one = name.replace("_exps.", ".0.")
    if "_exps." in name and one in tensors:
        raise UnsupportedError(
            f"{source}: the experts are stored one by one ('{one}'); convert the model again with a current converter, "
            f"which writes them as '{name}'"
        )


def _same(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether shapes are equal up to trailing ones."""
    n = max(len(a), len(b))
    return a + (1,) * (n - len(a)) == b + (1,) * (n - len(b))


def _dims(shape: tuple[int, ...]) -> str:
    return ", ".join(str(n) for n in shape)


class Weights:
    """Graph weights by name; `data` returns small ones as numbers."""

    def __init__(
        self,
        tensors: Mapping[str, TensorLike],
        source: str,
        data: Callable[[str], npt.NDArray[np.float32]] | None = None,
    ) -> None:
        self._tensors = tensors
        self._source = source
        self._data = data

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> Weight | None:
        """Return the tensor, or None."""
        t = self._tensors.get(name)
        return None if t is None else Weight(name, t.type, tuple(t.shape))

    def __getitem__(self, name: str) -> Weight:
        """Return the tensor; raise FormatError if it is absent."""
        weight = self.get(name)
        if weight is None:
            raise FormatError(f"{self._source}: tensor '{name}' is missing; the file is incomplete")
        return weight

    def data(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values of a tensor as float32, shape in NumPy order."""
        if self._data is None:
            raise FormatError(f"{self._source}: the values of '{name}' are needed, but no data was opened")
        return np.asarray(self._data(self[name].name), dtype=np.float32)

    def factors(self, own: Container[str]) -> dict[str, float | Weight]:
        """Return the factors `<name>.scale` beside matrices `<name>.weight`, by the names of the matrices.

        A matrix has one, a tensor of experts one for each. Tensors that the architecture itself reads (`own`) may have
        that name and another shape.
        """
        found: dict[str, float | Weight] = {}
        for name, tensor in self._tensors.items():
            matrix = self.get(f"{name.removesuffix('.scale')}.weight")
            if not name.endswith(".scale") or matrix is None or len(matrix.shape) < 2:
                continue
            if math.prod(tensor.shape) != matrix.ne2:
                if name in own:
                    continue
                raise FormatError(
                    f"{self._source}: tensor '{name}' has {math.prod(tensor.shape)} factors, '{matrix.name}' needs "
                    f"{matrix.ne2}"
                )
            one = len(matrix.shape) == 2
            found[matrix.name] = float(self.data(name).reshape(-1)[0]) if one else self[name]
        return found

    def layer(self, il: int, prefix: str = "") -> LayerWeights:
        """Return the tensors `<prefix>blk.<il>.*`."""
        return LayerWeights(self, il, prefix)


class LayerWeights:
    """Tensors of one block as attributes; `get` for optional ones."""

    __slots__ = ("_block", "_weights", "il")

    def __init__(self, weights: Weights, il: int, prefix: str = "") -> None:
        self._weights, self.il, self._block = weights, il, f"{prefix}blk.{il}"

    def _name(self, attr: str) -> str:
        for kind in ("bias", "scale"):
            if attr.endswith(f"_{kind}") and attr != "layer_output_scale":
                return f"{self._block}.{attr.removesuffix(f'_{kind}')}.{kind}"
        return f"{self._block}.{attr}.weight"

    def __getattr__(self, attr: str) -> Weight:
        if attr.startswith("__"):
            raise AttributeError(attr)
        return self._weights[self._name(attr)]

    def get(self, attr: str) -> Weight | None:
        """Return the tensor, or None."""
        return self._weights.get(self._name(attr))

    def in_slots(self, n_slots: int) -> LayerWeights:
        """Return the tensors of the block with only those experts that are in slots on a GPU."""
        return _InSlots(self._weights, self.il, n_slots)

    def of_groups(self) -> LayerWeights:
        """Return the tensors of the block with the experts of groups in place of its experts."""
        return _OfGroups(self._weights, self.il)

    def with_ending_or_not(self, name: str) -> Weight:
        """Return a tensor whose name lacks the ending in files of llama.cpp."""
        return self.get(name) or self.tensor(name)

    def tensor(self, name: str) -> Weight:
        """Return a tensor whose name has no ending."""
        return self._weights[f"{self._block}.{name}"]


class _OfGroups(LayerWeights):
    """Tensors of one block; as experts those that groups of experts have in common (GroveMoE)."""

    __slots__ = ()

    def _name(self, attr: str) -> str:
        return super()._name(attr).replace("_exps.", "_chexps.")


class _InSlots(LayerWeights):
    """Tensors of one block; of experts those in slots."""

    __slots__ = ("_n_slots",)

    def __init__(self, weights: Weights, il: int, n_slots: int) -> None:
        super().__init__(weights, il)
        self._n_slots = n_slots

    def __getattr__(self, attr: str) -> Weight:
        w = super().__getattr__(attr)
        return in_slots(w, self._n_slots) if attr.endswith("_exps") else w

    def get(self, attr: str) -> Weight | None:
        """Return the tensor, or None."""
        w = super().get(attr)
        return in_slots(w, self._n_slots) if w is not None and attr.endswith("_exps") else w
