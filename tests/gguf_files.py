"""Writes models of `factories` to disk, so that a session can open them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from factories import MemoryModel

from ikcli.gguf.writer import GGUFWriter, NewTensor


def write_model(model: MemoryModel, path: Path, metadata: Mapping[str, Any] | None = None) -> Path:
    """The model as a GGUF file; `metadata` replaces its keys."""
    specs = [NewTensor(name, t.shape, t.type) for name, t in model.tensors.items()]
    with GGUFWriter(path, model.metadata if metadata is None else metadata, specs) as writer:
        for name, t in model.tensors.items():
            writer.write_tensor(name, t.bytes)
    return path
