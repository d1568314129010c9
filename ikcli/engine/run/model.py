"""A model in host memory: the opened file, its hyper-parameters, and the address of every weight.

With mmap, weights are used where the file is mapped; without it, they are copied into RAM. Small tensors that kernels
want in float32 (norms, biases) are converted, and tensors that the attention mode needs but the file lacks are derived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli import models
from ikcli.engine.run.adapters import Adapters, Added
from ikcli.engine.run.repacking import Repacked, repack_tensors, repacked_specs
from ikcli.engine.run.weight_memory import TRANSPARENT, Pages, read_tensors
from ikcli.errors import FormatError, IkError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile
from ikcli.gguf.types import tensor_n_bytes
from ikcli.graph import Graph
from ikcli.log import progress
from ikcli.models import GraphConfig, HParams, ModelModule, Weights, check_tensors
from ikcli.models.heads import external, mtp
from ikcli.models.heads.external import External
from ikcli.models.mla import DerivedSpec, derive_one, derived_specs, source_of
from ikcli.models.tensors import TensorLike
from ikcli.quant.decode import dequantize
from ikcli.quant.repack import iq2_bn_of_i2_s
from ikcli.settings.adapters import RopeConfig

Bytes = npt.NDArray[np.uint8]
_ID_TYPES = {GGMLType.I64: np.int64, GGMLType.I32: np.int32}


@dataclass(slots=True)
class Model:
    """An opened model; `load` makes its weights addressable."""

    file: GGUFFile
    hp: HParams
    module: ModelModule
    specs: dict[str, TensorLike]  # tensors for graphs: those of the file, as used, and derived ones
    derived: dict[str, DerivedSpec]
    repacked: dict[str, Repacked] = field(default_factory=dict)  # -rtr: regrouped by `load`
    n_threads: int = 1  # of repacking and reading
    adapters: Adapters = field(default_factory=Adapters)
    further: HParams | None = None  # with the heads counted as layers, where the session runs them
    external: External | None = None  # a head of another architecture, where the session runs it
    pages: Pages = TRANSPARENT  # of weights that are read
    cpus: Sequence[frozenset[int]] | None = None  # of the threads over whose nodes such weights are spread
    experts: Mapping[str, int] = field(default_factory=dict)  # of weights whose experts are spread by node
    _held: dict[str, npt.NDArray[np.generic]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return str(self.file.paths[0])

    @property
    def n_state(self) -> int:
        """Return the columns of the states that heads read."""
        return (
            self.external.head.own.n_embd if self.external is not None and self.external.head.layers else self.hp.n_embd
        )

    @property
    def is_exact(self) -> bool:
        """Return whether nothing is rounded before the first choice of experts (`Graph.exact`), as in f16 files.

        With other matrices in the first block, the rounding of activations dominates every other error.
        """
        first = (t for name, t in self.specs.items() if name.startswith("blk.0."))
        return self.hp.n_expert > 0 and any(t.type is GGMLType.F16 and len(t.shape) > 1 for t in first)

    @classmethod
    def from_file(
        cls,
        file: GGUFFile,
        graph_config: GraphConfig,
        *,
        hp: HParams | None = None,
        adapters: Adapters | None = None,
        rope: RopeConfig | None = None,
        repack: bool = False,
        n_threads: int = 1,
        pages: Pages = TRANSPARENT,
    ) -> Model:
        """Check the tensors of an opened file and create the model; no weight is touched.

        `hp` replaces the hyper-parameters of the file, read with `rope`. `adapters`: what is added.
        """
        source = str(file.paths[0])
        if "general.architecture" not in file.metadata:
            raise FormatError(f"{source}: no general.architecture; this is not a model file")
        module = models.find(file.arch, source)
        hp = hp or HParams.from_gguf(file.metadata, file.tensors, source)
        check_tensors(module.tensor_shapes(hp), file.tensors, source)
        further = None
        head = external.find(file.metadata, hp) if graph_config.n_heads else None
        if head is not None:
            check_tensors(
                head.module.tensor_shapes(head.head, hp, file.tensors, head.prefix), file.tensors, head.head.own.source
            )
        elif graph_config.n_heads:
            mtp.check_heads(module, hp, file.tensors)
            assert isinstance(module, mtp.HasLayers)
            further = mtp.read_further(file.metadata, file.tensors, source, rope)
            check_tensors(mtp.tensor_shapes(module, further, file.tensors), file.tensors, source)
        derived = derived_specs(file.tensors, further or hp, graph_config)
        specs: dict[str, TensorLike] = {name: _as_used(t) for name, t in file.tensors.items()}
        repacked = repacked_specs(file.tensors, hp) if repack else {}
        adapters = adapters or Adapters()
        specs = specs | repacked | derived | adapters.specs()
        return cls(file, hp, module, specs, derived, repacked, n_threads, adapters, further, head, pages)

    def keep_plain(self, names: Iterable[str]) -> None:
        """Exclude these tensors from `-rtr`; call it before graphs are recorded."""
        for name in self.repacked.keys() & set(names):
            del self.repacked[name]
            self.specs[name] = _as_used(self.file.tensors[name])

    def derived_from(self) -> dict[str, str]:
        """Return the source of each derived tensor: made of it (`mla.source_of`) or added to it."""
        return self.adapters.sources() | {name: source_of(name) for name in self.derived}

    def bytes_of(self, name: str) -> Bytes:
        """Return the bytes of a tensor as used: mapped from the file where the file has them, else made."""
        if name in self._held:
            return self._held[name].reshape(-1).view(np.uint8)
        return self.file.data(name) if self.as_in_file(name) else self._make(name).reshape(-1).view(np.uint8)

    def ids_of_head(self) -> npt.NDArray[np.int64] | None:
        """Return the tokens of the logits of a head that has a part of the vocabulary; None if it has all of it."""
        name = "" if self.external is None else self.external.prefix + external.IDS
        if name not in self.file.tensors:
            return None
        type_ = self.file.tensors[name].type
        if type_ not in _ID_TYPES:
            raise FormatError(f"{self.source}: tensor '{name}' is of type {type_.name}; it must be I64 or I32")
        ids = self.file.data(name).view(_ID_TYPES[type_]).astype(np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.hp.n_vocab:
            raise FormatError(f"{self.source}: tensor '{name}' has ids outside the vocabulary of {self.hp.n_vocab}")
        return ids

    def graph(self, weights: Weights) -> Graph:
        """Return an empty graph whose products get the factors beside weights and what adapters add."""
        graph = self.adapters.graph()
        if any(name.endswith(".scale") for name in self.specs):
            graph.factors = weights.factors(self.module.tensor_shapes(self.hp))
        return graph

    def weights(self) -> Weights:
        """Return the weights for recording graphs."""
        return Weights(self.specs, self.source, self.values)

    def values(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor of the file as float32."""
        t = self.file.tensors[name]
        return dequantize(self.file.data(name), t.type, tuple(t.shape))

    def n_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of these tensors, as used."""
        return sum(tensor_n_bytes(self.specs[n].type, self.specs[n].shape) for n in names)

    def load(self, names: Iterable[str], *, mmap: bool) -> dict[str, int]:
        """Return the addresses of the named weights; copy and derive them where necessary."""
        wanted = list(names)
        copied = [n for n in wanted if not (mmap and self.as_in_file(n))]
        with progress("loading", self.n_bytes(copied)) as advance:
            self._held |= self._repack([n for n in copied if n in self.repacked and n not in self._held], advance)
            self._held |= self._read([n for n in copied if self.as_in_file(n) and n not in self._held], advance)
            for name in copied:
                if name not in self._held:
                    self._held[name] = self._make(name)
                    advance(self._held[name].nbytes)
        return {n: self._address(n) for n in wanted}

    def apply(self, added: Added) -> list[str]:
        """Change adapters and control vectors, also in memory; return the names of the changed weights."""
        names = self.adapters.apply(added)
        for name in names:
            if name in self._held:
                self._held[name][...] = self.adapters.make(name)
        return names

    def mapped(self, names: Iterable[str]) -> list[str]:
        """Return those of the loaded weights that are used where the file is mapped."""
        return [n for n in names if n not in self._held]

    def adopt(self, copies: Mapping[str, Bytes]) -> dict[str, int]:
        """Use copies of mapped weights from now on; return their addresses and release the mapped pages."""
        self._held |= copies
        for name in copies:
            self.file.release(name)
        return {name: self._address(name) for name in copies}

    def memory(self, addresses: Mapping[str, int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (address, bytes) of loaded weights: those in our own memory, and those mapped from the file."""
        held: list[tuple[int, int]] = []
        mapped: list[tuple[int, int]] = []
        for name, address in addresses.items():
            (held if name in self._held else mapped).append((address, self.n_bytes([name])))
        return held, mapped

    def as_in_file(self, name: str) -> bool:
        """Return whether a weight is used as the file has it, so that it can be mapped."""
        return (
            name in self.file.tensors
            and name not in self.derived
            and self.specs[name].type == self.file.tensors[name].type
        )

    def _repack(self, names: list[str], advance: Callable[[float], None]) -> dict[str, Bytes]:
        if not names:
            return {}
        try:
            return repack_tensors(self.file, {n: self.repacked[n] for n in names}, self.pages, self.n_threads,
                                  advance, self.cpus, self.experts)  # fmt: skip
        except MemoryError:
            size = self.n_bytes(names) / 2**20
            raise IkError(f"out of memory: {size:.0f} MiB wanted for repacked weights; run without -rtr") from None

    def _read(self, names: list[str], advance: Callable[[float], None]) -> dict[str, Bytes]:
        """Read tensors that are used as the file has them."""
        try:
            if not names:
                return {}
            return read_tensors(self.file, names, self.pages, self.n_threads, advance, self.cpus, self.experts)
        except MemoryError:
            size = self.n_bytes(names) / 2**20
            raise IkError(
                f"out of memory: {size:.0f} MiB wanted for weights; without --no-mmap the file is mapped"
            ) from None

    def _make(self, name: str) -> npt.NDArray[np.generic]:
        try:
            if name in self.derived:
                return np.ascontiguousarray(derive_one(self.file, self.further or self.hp, name, self.derived[name]))
            if name not in self.file.tensors:
                return self.adapters.make(name)
            if self.file.tensors[name].type == GGMLType.I2_S and self.specs[name].type == GGMLType.IQ2_BN:
                return iq2_bn_of_i2_s(self.file.data(name), self.specs[name].shape[0])
            return np.ascontiguousarray(self.values(name))
        except MemoryError:
            raise IkError(f"out of memory: {self.n_bytes([name]) / 2**20:.0f} MiB wanted for {name}") from None

    def _address(self, name: str) -> int:
        array = self._held[name] if name in self._held else self.file.data(name)
        return int(array.ctypes.data)


@dataclass(frozen=True, slots=True)
class _Used:
    """Type and shape of a tensor as the graph uses it."""

    type: GGMLType
    shape: tuple[int, ...]


def _as_used(t: TensorLike) -> TensorLike:
    """Return how a tensor is used: vectors (norms, biases) as float32, I2_S as the type of rows with its values."""
    if len(t.shape) == 1 and t.type != GGMLType.F32:
        return _Used(GGMLType.F32, t.shape)
    if t.type == GGMLType.I2_S:
        return _Used(GGMLType.IQ2_BN, t.shape)
    return t
