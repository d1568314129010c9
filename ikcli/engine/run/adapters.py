"""Additions to a model: low-rank adapters (`--lora`) and control vectors, with their files, checks and weights.

An adapter adds scale * alpha / rank * b @ a to a matrix. The base matrix stays unchanged: `Graph.mul_mat` records the
three products beside that of the base. The factor is a separate diagonal matrix, so it can change while the model runs
(`Adapters.apply`). Ranks are padded with zeros to sizes that suit the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.control_vectors import ControlVectors, VectorUse, in_use
from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.graph import Graph, LowRank, Weight
from ikcli.models import HParams
from ikcli.models.tensors import TensorLike
from ikcli.quant.decode import dequantize
from ikcli.quant.encode import quantize
from ikcli.settings.adapters import AdapterConfig

F32 = npt.NDArray[np.float32]
RANK_STEP = 32
_KEPT = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Spec:
    """Type and shape of a weight."""

    type: GGMLType
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter file: its targets (names of matrices) with their ranks."""

    path: Path
    file: GGUFFile
    alpha: float
    ranks: Mapping[str, int]

    @classmethod
    def open(cls, path: Path, tensors: Mapping[str, TensorLike], hp: HParams) -> Adapter:
        """Read the header and check it against the model; raise FormatError for what does not fit."""
        file = open_gguf(path)
        for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
            if file.metadata.get(key) != wanted:
                raise FormatError(f"{path}: {key} is {file.metadata.get(key)}, not {wanted}; this is no LoRA adapter")
        if file.arch != hp.arch:
            raise FormatError(f"{path}: the adapter is for {file.arch}, the model is {hp.arch}; use one made for it")
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise FormatError(f"{path}: adapter.lora.alpha is {alpha}; it should be a number")
        targets: dict[str, int] = {}
        for name in file.tensors:
            target, _, part = name.rpartition(".")
            if part not in ("lora_a", "lora_b"):
                raise FormatError(f"{path}: tensor '{name}' is neither a .lora_a nor a .lora_b")
            if target not in targets:
                targets[target] = _rank(path, target, file.tensors, tensors)
        if not targets:
            raise FormatError(f"{path}: the adapter has no tensors")
        return cls(path, file, float(alpha), targets)

    def values(self, target: str, part: str) -> F32:
        """Return the values of a or b: (matrices,) rows, columns, with padded rank.

        Raise FormatError if any is not finite.
        """
        name = f"{target}.{part}"
        t = self.file.tensors[name]
        values = dequantize(self.file.data(name), t.type, tuple(t.shape))
        if not np.isfinite(values).all():
            raise FormatError(f"{self.path}: tensor '{name}' holds NaN or Inf")
        more = -self.ranks[target] % RANK_STEP
        rows, columns = (more, 0) if part == "lora_a" else (0, more)
        return np.pad(values, [(0, 0)] * (values.ndim - 2) + [(0, rows), (0, columns)])


def _rank(path: Path, target: str, own: Mapping[str, TensorLike], tensors: Mapping[str, TensorLike]) -> int:
    """Return the rank of a pair of tensors, which must fit the matrix of the model."""
    a, b, w = own.get(f"{target}.lora_a"), own.get(f"{target}.lora_b"), tensors.get(target)
    if a is None or b is None:
        raise FormatError(f"{path}: '{target}' has only one of .lora_a and .lora_b; the adapter is incomplete")
    if w is None:
        raise FormatError(f"{path}: the model has no tensor '{target}'; the adapter is for another model")
    if target == _EMBEDDING:
        raise UnsupportedError(f"{path}: the adapter changes '{target}'; adapters of embeddings are not supported")
    if len(w.shape) < 2 or len(a.shape) != len(w.shape) or len(b.shape) != len(w.shape):
        raise FormatError(f"{path}: '{target}' has {len(w.shape)} dimensions, its adapter {len(a.shape)}")
    rank = a.shape[1]
    fits = a.shape == (w.shape[0], rank, *w.shape[2:]) and b.shape == (rank, *w.shape[1:])
    if not fits:
        raise FormatError(
            f"{path}: '{target}' of the model is {_dims(w.shape)}, which an adapter of {_dims(a.shape)} and "
            f"{_dims(b.shape)} does not fit; use one made for this model"
        )
    return rank


def _dims(shape: Sequence[int]) -> str:
    return " x ".join(str(n) for n in shape)


@dataclass(frozen=True, slots=True)
class Added:
    """The additions in use: the scale of each adapter, and the control vectors.

    Cached positions are valid for these only.
    """

    scales: tuple[float, ...] = ()
    vectors: tuple[VectorUse, ...] = ()

    def of_request(self, scales: tuple[float, ...] | None) -> Added:
        """Return the same additions with the scales of adapters that a request names, if it names any."""
        return self if scales is None else replace(self, scales=scales)


NOTHING = Added()


@dataclass(slots=True)
class Adapters:
    """Everything that can be added to a model, and what is `added` now."""

    adapters: tuple[Adapter, ...] = ()
    vectors: ControlVectors = field(default_factory=ControlVectors)
    added: Added = NOTHING

    @classmethod
    def open(cls, config: AdapterConfig, tensors: Mapping[str, TensorLike], hp: HParams) -> Adapters:
        """Open the files of the command line and check them against the model."""
        given = [(path, 1.0) for path in config.lora] + [(s.path, s.scale) for s in config.lora_scaled]
        adapters = tuple(Adapter.open(path, tensors, hp) for path, _ in given)
        scales = tuple(0.0 if config.lora_init_without_apply else scale for _, scale in given)
        vectors = ControlVectors.open(config, hp)
        return cls(adapters, vectors, Added(scales, in_use(use for _, use in vectors.given)))

    def __bool__(self) -> bool:
        return bool(self.adapters or self.vectors.layers)

    def specs(self) -> dict[str, Spec]:
        """Return the weights that graphs use besides those of the model."""
        cols = self.vectors.n_stream * self.vectors.n_embd
        found = {_direction(il): Spec(GGMLType.F32, (cols,)) for il in self.vectors.layers}
        for i, adapter in enumerate(self.adapters):
            for target, rank in adapter.ranks.items():
                padded = rank + -rank % RANK_STEP
                a, b = (adapter.file.tensors[f"{target}.{part}"] for part in ("lora_a", "lora_b"))
                found[_part(target, "a", i)] = Spec(_used(a.type), (a.shape[0], padded, *a.shape[2:]))
                found[_part(target, "b", i)] = Spec(_used(b.type), (padded, *b.shape[1:]))
                found[_part(target, "scale", i)] = Spec(GGMLType.F32, (padded, padded))
        return found

    def sources(self) -> dict[str, str]:
        """Return the model tensor with which each adapter weight is placed; directions are placed with their block."""
        pairs = ((t, p, i) for i, a in enumerate(self.adapters) for t in a.ranks for p in ("a", "b", "scale"))
        return {_part(target, part, i): target for target, part, i in pairs}

    def make(self, name: str) -> npt.NDArray[np.generic]:
        """Make a weight of `specs` with its present values."""
        if name.endswith(".direction"):
            return self.vectors.direction(int(name.split(".")[1]), self.added.vectors)
        target, part, number = name.rsplit(".", 2)
        adapter, scale = self.adapters[int(number)], self.added.scales[int(number)]
        rank = adapter.ranks[target]
        if part == "lora_scale":
            diagonal = np.zeros(rank + -rank % RANK_STEP, np.float32)
            diagonal[:rank] = scale * (adapter.alpha / rank if adapter.alpha else 1.0)
            return np.diag(diagonal)
        type_ = _used(adapter.file.tensors[f"{target}.{part}"].type)
        return np.ascontiguousarray(quantize(np.ascontiguousarray(adapter.values(target, part)), type_))

    def graph(self) -> Graph:
        """Return an empty graph whose products and layers get these additions."""
        specs = self.specs()

        def weight(name: str) -> Weight:
            return Weight(name, specs[name].type, specs[name].shape)

        low_rank: dict[str, list[LowRank]] = {}
        for i, adapter in enumerate(self.adapters):
            for target in adapter.ranks:
                parts = (weight(_part(target, part, i)) for part in ("a", "scale", "b"))
                low_rank.setdefault(target, []).append(LowRank(*parts))
        return Graph(low_rank=low_rank, directions={il: weight(_direction(il)) for il in self.vectors.layers})

    def check_used(self, graphs: Iterable[Graph]) -> None:
        """Raise UnsupportedError if a graph has no place for an adapter or a direction."""
        for graph in graphs:
            for i, adapter in enumerate(self.adapters):
                missing = [t for t in adapter.ranks if _part(t, "a", i) not in graph.weights]
                if missing:
                    mla = "; use -mla 0" if ".attn_k" in missing[0] or ".attn_v" in missing[0] else ""
                    raise UnsupportedError(
                        f"{adapter.path}: the adapter changes '{missing[0]}', which this run does not multiply with as "
                        f"it is{mla}"
                    )
            lost = [il for il in self.vectors.layers if _direction(il) not in graph.weights]
            if lost:
                raise UnsupportedError("control vectors are not supported for this architecture")

    def apply(self, added: Added) -> list[str]:
        """Change the additions; return the names of the weights whose holders have to make them again."""
        if len(added.scales) != len(self.adapters):
            raise UsageError(f"{len(added.scales)} scales for {len(self.adapters)} adapters")
        changed: list[str] = []
        if added.scales != self.added.scales:
            changed += [_part(target, "scale", i) for i, a in enumerate(self.adapters) for target in a.ranks]
        if added.vectors != self.added.vectors:
            changed += [_direction(il) for il in self.vectors.layers]
        self.added = added
        return changed


def _part(target: str, part: str, i: int) -> str:
    return f"{target}.lora_{part}.{i}"


def _direction(il: int) -> str:
    return f"blk.{il}.direction"


def _used(type_: GGMLType) -> GGMLType:
    """Return the type in use: quantized adapters are used as float32."""
    return type_ if type_ in _KEPT else GGMLType.F32
