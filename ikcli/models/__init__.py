"""Model architectures: one module each, found by the architecture name of the file and imported on first use.

Contract of a module: `tensor_shapes(hp) -> TensorSpecs` and `build(g, hp, w, cfg) -> Node` (the logits).
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from ikcli.errors import UnsupportedError
from ikcli.graph import Graph, Node
from ikcli.models.config import EXPAND_MIN_TOKENS, GraphConfig
from ikcli.models.hparams import HParams, RopeParams
from ikcli.models.tensors import TensorSpec, TensorSpecs, Weights, check_tensors

ARCHITECTURES: dict[str, str] = {
    "deepseek2": "ikcli.models.deepseek2",
    "llama": "ikcli.models.llama",
    "qwen2": "ikcli.models.qwen2",
    "qwen3": "ikcli.models.qwen3",
    "qwen3moe": "ikcli.models.qwen3moe",
}

__all__ = [
    "ARCHITECTURES",
    "EXPAND_MIN_TOKENS",
    "GraphConfig",
    "HParams",
    "ModelModule",
    "RopeParams",
    "TensorSpec",
    "TensorSpecs",
    "Weights",
    "check_tensors",
    "find",
]


class ModelModule(Protocol):
    """What an architecture's module offers."""

    def tensor_shapes(self, hp: HParams) -> TensorSpecs:
        """Expected tensors of the file."""

    def build(self, g: Graph, hp: HParams, w: Weights, cfg: GraphConfig) -> Node:
        """Record the graph; returns the logits of the output rows."""


def find(arch: str, source: str = "the model") -> ModelModule:
    """The module of an architecture; UnsupportedError lists the known ones."""
    if arch not in ARCHITECTURES:
        raise UnsupportedError(f"{source}: architecture '{arch}' is not supported; known: {', '.join(ARCHITECTURES)}")
    return cast(ModelModule, importlib.import_module(ARCHITECTURES[arch]))
