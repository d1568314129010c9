"""Files that store the same matrices together or apart: the numbers are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import MemoryModel, tiny_model
from tiny_architectures import LAYER_NORM, SHARED, WINDOWED

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.reference_session import ReferenceSession
from ikcli.gguf.constants import GGMLType
from ikcli.models import GraphConfig

TOKENS = np.random.default_rng(1).integers(0, 96, 20)
EXACT = GraphConfig(type_k=GGMLType.F32, type_v=GGMLType.F32, n_ctx=256)
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {}, "qwen3": {}, "stablelm": LAYER_NORM, "mimo2": WINDOWED["mimo2"], "glm4moe": SHARED,
    "step35": WINDOWED["step35"],
}  # fmt: skip


def logits(model: MemoryModel) -> np.ndarray:
    return ReferenceSession(model, EXACT, dtype=np.float64).decode(Batch.single(TOKENS, logits="all"))


@pytest.mark.parametrize("arch", MODELS)
def test_one_matrix_for_queries_keys_and_values(arch: str) -> None:
    model = tiny_model(arch, optional=(".attn_q.bias", ".attn_k.bias", ".attn_v.bias"), **MODELS[arch])
    wanted = logits(model)
    for il in range(model.metadata[f"{arch}.block_count"]):
        for kind in ("weight", "bias"):
            names = [f"blk.{il}.attn_{part}.{kind}" for part in "qkv"]
            if names[0] in model.tensors:
                model.set(f"blk.{il}.attn_qkv.{kind}", np.concatenate([model.values(name) for name in names]))
            for name in names:
                model.tensors.pop(name, None)
    assert "blk.0.attn_qkv.weight" in model.tensors and "blk.0.attn_q.weight" not in model.tensors
    np.testing.assert_allclose(logits(model), wanted, rtol=0, atol=1e-9)


def test_one_tensor_for_gates_and_ups_of_the_experts_of_gemma4() -> None:
    model = tiny_model("gemma4", optional=("_exps.scale",), **WINDOWED["gemma4"])
    wanted = logits(model)
    for il in range(6):
        parts = [f"blk.{il}.ffn_{part}_exps.weight" for part in ("gate", "up")]
        model.set(f"blk.{il}.ffn_gate_up_exps.weight", np.concatenate([model.values(name) for name in parts], axis=1))
        for name in parts:
            del model.tensors[name]
    np.testing.assert_allclose(logits(model), wanted, rtol=0, atol=1e-9)
