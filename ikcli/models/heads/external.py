"""Heads in a file of another architecture than the model whose states they read.

The file is joined to the model's: its tensors become those of one more block, `blk.N.draft.<name in the file>`, and its
keys, which begin with the name of its architecture, are added. A module of this package knows each architecture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node
from ikcli.models.config import GraphConfig
from ikcli.models.heads.head import MARKOV, Head
from ikcli.models.hparams import HParams
from ikcli.models.keys import HasShape
from ikcli.models.tensors import TensorSpecs, Weights

MODULES = {
    "dflash-draft": "ikcli.models.heads.dflash",
    "eagle3": "ikcli.models.heads.eagle3",
    "gemma4-assistant": "ikcli.models.heads.assistant",
    "gemma4_mtp": "ikcli.models.heads.assistant",
}
"""By architecture of the file: those of llama.cpp, and ik_llama.cpp's `gemma4_mtp` and `dflash-draft`."""
IDS = "d2t"
"""The tensor with the ids of a head's logits, where it has a part of the vocabulary."""


class HeadModule(Protocol):
    """The module of an architecture of heads."""

    CONSTANT: bool
    """Whether all tokens of a draft have the position of the first, and the head reads the model's cache alone."""

    BLOCK: bool
    """Whether it drafts the tokens of a block at once (`BlockModule`); its layers then have a cache each."""

    def read(self, metadata: Mapping[str, Any], arch: str, hp: HParams, source: str) -> Head:
        """Return what the file says; raise FormatError or UnsupportedError if the head does not fit the model `hp`."""

    def tensor_shapes(self, head: Head, hp: HParams, tensors: Mapping[str, HasShape], prefix: str) -> TensorSpecs:
        """Return the expected tensors of a joined file, of which `tensors` are there."""

    def take_states(self, g: Graph, head: Head, w: Weights, prefix: str, outputs: Mapping[int, Node]) -> None:
        """Make `g.states` of the outputs of layers that the head reads, if it reads any."""

    def build(self, g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
        """Record the head and return its logits; `g.states` are those that it reads for the token after."""


@runtime_checkable
class BlockModule(Protocol):
    """The module of an architecture of heads that draft blocks; `HeadModule.build` stores what its rows see."""

    def build_block(self, g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
        """Record the rows of a block and return their logits."""

    def build_markov(self, g: Graph, head: Head, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
        """Record what a token adds to the logits of the next one, where the file has `MARKOV`."""


@dataclass(frozen=True, slots=True)
class External:
    """A head of a joined file, and the module of its architecture."""

    arch: str
    module: HeadModule
    head: Head
    prefix: str

    @property
    def constant(self) -> bool:
        """See `HeadModule.CONSTANT`."""
        return self.module.CONSTANT

    @property
    def n_blocks(self) -> int:
        """Return the blocks after the model's that have caches."""
        return self.head.own.n_layer if self.module.BLOCK else 1

    def record(self, g: Graph, hp: HParams, w: Weights, build: Callable[[], Node]) -> Node:
        """Record a graph of the model with `build`, and what the head reads beside it."""
        if not self.head.layers:
            return build()
        g.wants_states, g.outputs_of = None, dict.fromkeys(self.head.layers)
        result = build()
        found = {il: node for il, node in g.outputs_of.items() if node is not None}
        if len(found) < len(g.outputs_of):
            raise UnsupportedError(f"{hp.source}: drafts of {self.arch} heads for {hp.arch} models are not supported")
        self.module.take_states(g, self.head, w, self.prefix, found)
        return result


def arch_of(metadata: Mapping[str, Any]) -> str:
    """Return the architecture of a joined head; empty without one."""
    return next((arch for arch in MODULES if f"{arch}.block_count" in metadata), "")


def prefix_of(n_layer: int) -> str:
    """Return what precedes the names of a head's tensors in a joined file; `n_layer` are the layers of the model."""
    return f"blk.{n_layer}.draft."


def spec_type(arch: str, names: Container[str] = ()) -> str:
    """Return the `--spec-type` that drafts with a head of this architecture, whose file has tensors of these names."""
    if arch == "dflash-draft" and MARKOV in names:
        return "dspark"
    return {"eagle3": "eagle3", "dflash-draft": "dflash"}.get(arch, "mtp")


def module_of(arch: str) -> HeadModule:
    """Return the module of an architecture of heads."""
    return cast(HeadModule, importlib.import_module(MODULES[arch]))


def find(metadata: Mapping[str, Any], hp: HParams) -> External | None:
    """Return the head of a joined file, or None; raise FormatError or UnsupportedError if it does not fit the model."""
    arch = arch_of(metadata)
    if not arch:
        return None
    module = module_of(arch)
    return External(arch, module, module.read(metadata, arch, hp, hp.source), prefix_of(hp.n_layer))


def check_is_model(arch: str, source: str) -> None:
    """Raise UnsupportedError for a file that holds a head in place of a model."""
    if arch in MODULES:
        raise UnsupportedError(
            f"{source} holds a head that reads the states of another model ({arch}): name that model with -m, and this "
            f"file with --spec-type {spec_type(arch)} -md"
        )
