"""Writes low-rank adapters and control vectors for models of `factories`, and the models that merging them gives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from factories import MemoryModel, MemoryTensor

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.encode import quantize

ALPHA = 12.0


def low_rank(
    model: MemoryModel, targets: Sequence[str], rank: int = 5, seed: int = 3, strength: float = 0.3
) -> dict[str, Any]:
    """a (matrices, rank, columns) and b (matrices, rows, rank) of every target, by the names of their tensors."""
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for target in targets:
        n_cols, n_rows, *more = model.tensors[target].shape
        size = strength / np.sqrt(rank * n_cols)
        found[f"{target}.lora_a"] = rng.normal(0, 1, (*more, rank, n_cols)).astype(np.float32)
        found[f"{target}.lora_b"] = rng.normal(0, size, (*more, n_rows, rank)).astype(np.float32)
    return found


def write_adapter(
    path: Path,
    arch: str,
    tensors: dict[str, Any],
    *,
    type_: GGMLType = GGMLType.F32,
    **metadata: Any,
) -> Path:
    """An adapter file; `metadata` (with _ for .) replaces its keys."""
    keys = {"general_type": "adapter", "general_architecture": arch, "adapter_type": "lora",
            "adapter_lora_alpha": ALPHA} | metadata  # fmt: skip
    specs = [NewTensor(name, values.shape[::-1], type_) for name, values in tensors.items()]
    with GGUFWriter(path, {k.replace("_", "."): v for k, v in keys.items() if v is not None}, specs) as writer:
        for name, values in tensors.items():
            writer.write_tensor(name, quantize(np.ascontiguousarray(values), type_))
    return path


def merged(model: MemoryModel, tensors: dict[str, Any], scale: float = 1.0, alpha: float = ALPHA) -> MemoryModel:
    """The model with scale * alpha / rank * b @ a added to float32 copies of the targets.

    Factors beside a matrix, or each of its experts, multiply the matrix alone, not what is added.
    """
    found = dict(model.tensors)
    for name, a in tensors.items():
        if name.endswith(".lora_a"):
            target = name.removesuffix(".lora_a")
            factor = scale * (alpha / a.shape[-2] if alpha else 1.0)
            added = factor * tensors[f"{target}.lora_b"] @ a
            beside = target.replace(".weight", ".scale")
            if beside in model.tensors and model.values(beside).size == (len(added) if added.ndim == 3 else 1):
                added = added / model.values(beside).reshape(-1, *[1] * (added.ndim - 1))
            values = (model.values(target) + added).astype(np.float32)
            found[target] = MemoryTensor(GGMLType.F32, model.tensors[target].shape, quantize(values, GGMLType.F32))
    return MemoryModel(model.metadata, found, model.paths)


def write_control_vector(path: Path, directions: dict[str, Any], type_: GGMLType = GGMLType.F32) -> Path:
    """A control vector file with these tensors."""
    specs = [NewTensor(name, values.shape[::-1], type_) for name, values in directions.items()]
    metadata = {"general.architecture": "controlvector", "controlvector.layer_count": len(directions)}
    with GGUFWriter(path, metadata, specs) as writer:
        for name, values in directions.items():
            writer.write_tensor(name, quantize(np.ascontiguousarray(values, np.float32), type_))
    return path
