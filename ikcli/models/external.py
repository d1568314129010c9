"""Heads in a file of another architecture than the model whose states they read.

The file is joined to the model's: its tensors become those of one more block, `blk.N.draft.<name in the file>`, and its
keys, which begin with the name of its architecture, are added. A module of this package knows each architecture.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node
from ikcli.models.config import GraphConfig
from ikcli.models.hparams import HParams
from ikcli.models.keys import HasShape
from ikcli.models.tensors import TensorSpecs, Weights

MODULES = {
    "gemma4-assistant": "ikcli.models.assistant",
    "gemma4_mtp": "ikcli.models.assistant",
}
"""By architecture of the file: those of llama.cpp and of ik_llama.cpp."""


class HeadModule(Protocol):
    """The module of an architecture of heads."""

    CONSTANT: bool
    """Whether all tokens of a draft have the position of the first, and the head reads the model's cache alone."""

    def read(self, metadata: Mapping[str, Any], arch: str, hp: HParams, names: Collection[str], source: str) -> HParams:
        """Return the head's own hyper-parameters; raise FormatError or UnsupportedError if it is of another model."""

    def tensor_shapes(self, own: HParams, hp: HParams, names: Collection[str], prefix: str) -> TensorSpecs:
        """Return the expected tensors of a joined file, of which `names` are there."""

    def take_states(self, g: Graph, own: HParams, hp: HParams, w: Weights, prefix: str) -> None:
        """Add what the head reads to a graph of the model that was recorded with `prepare`."""

    def build(self, g: Graph, own: HParams, hp: HParams, w: Weights, cfg: GraphConfig, prefix: str) -> Node:
        """Record the head and return its logits; `g.states` are those that it reads for the token after."""


@dataclass(frozen=True, slots=True)
class External:
    """A head of a joined file, and its hyper-parameters."""

    module: HeadModule
    own: HParams

    @property
    def constant(self) -> bool:
        """See `HeadModule.CONSTANT`."""
        return self.module.CONSTANT


def arch_of(metadata: Mapping[str, Any]) -> str:
    """Return the architecture of a joined head; empty without one."""
    return next((arch for arch in MODULES if f"{arch}.block_count" in metadata), "")


def prefix_of(n_layer: int) -> str:
    """Return what precedes the names of a head's tensors in a joined file; `n_layer` are the layers of the model."""
    return f"blk.{n_layer}.draft."


def module_of(arch: str) -> HeadModule:
    """Return the module of an architecture of heads."""
    return cast(HeadModule, importlib.import_module(MODULES[arch]))


def find(metadata: Mapping[str, Any], tensors: Mapping[str, HasShape], hp: HParams) -> External | None:
    """Return the head of a joined file, or None; raise FormatError or UnsupportedError if it does not fit the model."""
    arch = arch_of(metadata)
    if not arch:
        return None
    module = module_of(arch)
    return External(module, module.read(metadata, arch, hp, tensors, hp.source))


def check_is_model(arch: str, source: str) -> None:
    """Raise UnsupportedError for a file that holds a head in place of a model."""
    if arch in MODULES:
        raise UnsupportedError(
            f"{source} holds a head that reads the states of another model ({arch}): name that model with -m, and this "
            "file with --spec-type mtp -md"
        )
