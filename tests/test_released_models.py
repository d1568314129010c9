"""Plans for headers of released models: parameters, cache and states by hand, weights and work memory on two GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from header_models import write_header
from real_models import REAL

from ikcli.engine.plan.devices import described_machine
from ikcli.engine.plan.planner import Planner
from ikcli.engine.run.log_lines import TensorRow
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import open_gguf
from ikcli.gguf.types import TYPES, tensor_n_bytes
from ikcli.models import HParams
from ikcli.settings.run import RunConfig
from ikcli.settings.values import parse_device_spec

N_CTX, N_UBATCH, MIB = 32768, 64, 2**20
CONFIG = replace(
    RunConfig(command="plan"), n_threads=1, n_threads_batch=1, n_ctx=N_CTX, n_ubatch=N_UBATCH, n_gpu_layers=99,
    cpu_moe=True,
)  # fmt: skip
DELTA, KDA = 128 * 128 * 64 + 3 * (2 * 16 + 64) * 128, 128 * 128 * 32 + 3 * 3 * 32 * 128
STATES = 36 * (128 * 128 * 48 + 3 * (2 * 16 + 48) * 128) + 12 * 3 * 128 + 9 * 4 * 2560 + 2  # of Qwen3.8-Flash-Next
# Billions of weights; blocks with a full cache times the width of their rows (keys and values); the same of blocks with
# windows, and their window; blocks with states times the numbers of a state.
MODELS: dict[str, tuple[float, int, int, int, int]] = {
    "cohere2-7b": (8.0, 8 * 8 * 256, 24 * 8 * 256, 4096, 0),
    "deepseek2-v3": (671.0, 61 * 576, 0, 0, 0),
    "gemma3-27b": (27.0, 10 * 16 * 256, 52 * 16 * 256, 1024, 0),
    "gemma4-26b": (25.2, 5 * 2 * 1024, 25 * 8 * 512, 1024, 0),
    "gemma4-e4b": (7.5, 4 * 2 * 1024, 20 * 2 * 512, 512, 0),
    "glm-dsa": (753.9, 78 * (576 + 128), 0, 0, 0),
    "glm4moe-355b": (356.8, 92 * 8 * 256, 0, 0, 0),
    "gpt-oss-120b": (116.8, 18 * 8 * 128, 18 * 8 * 128, 128, 0),
    "grok-1": (315.7, 64 * 8 * 256, 0, 0, 0),
    "kimi-k3": (2779.5, 24 * 576, 0, 0, 69 * 3 * KDA),
    "kimi-linear-48b": (49.1, 7 * 576, 0, 0, 20 * KDA),
    "llama-70b": (70.6, 80 * 8 * 256, 0, 0, 0),
    "llama4-maverick": (400.7, 48 * 8 * 256, 0, 0, 0),
    "mimo2-flash": (308.8, 9 * 4 * 320, 39 * 8 * 320, 128, 0),
    "minicpm3-4b": (4.1, 62 * 288, 0, 0, 0),
    "minimax-m2": (228.7, 62 * 8 * 256, 0, 0, 0),
    "minimax-m3": (426.0, 60 * 4 * 256, 0, 0, 0),
    "phimoe-42b": (41.9, 32 * 8 * 256, 0, 0, 0),
    "qwen3moe-235b": (235.1, 94 * 4 * 256, 0, 0, 0),
    "qwen35moe-397b": (396.3, 15 * 2 * 512, 0, 0, 45 * DELTA),
    "qwen4exp-flash": (176.9, 12 * (2 * 512 + 128), 0, 0, STATES),
    "step35-flash": (210.9, 12 * 8 * 256, 33 * 8 * 256, 512, 0),
}


def planner_for(key: str, path: Path, spec: str) -> Planner:
    real = REAL[key]
    rows, matrices = [], real.matrices
    for name, shape in real.shapes.items():
        type_ = GGMLType.Q4_0 if name in matrices and shape[0] % 32 == 0 else GGMLType.F32
        rows.append(TensorRow(name, shape, TYPES[type_].name, tensor_n_bytes(type_, shape)))
    file = open_gguf(write_header(path, real.metadata, rows), header_only=True)
    return Planner(file, HParams.from_gguf(file.metadata, file.tensors, key), described_machine(
        parse_device_spec(spec), None))  # fmt: skip


@pytest.mark.parametrize("key", MODELS)
def test_cache_of_a_released_model(key: str, tmp_path: Path) -> None:
    billions, full, windowed, window, states = MODELS[key]
    assert sum(int(np.prod(s)) for s in REAL[key].shapes.values()) / 1e9 == pytest.approx(billions, abs=0.06)
    planner = planner_for(key, tmp_path / "m.gguf", "2*cuda:80GiB,cpu:1024GiB")
    cells = min(N_CTX, -(-(window + N_UBATCH + 256) // 256) * 256)
    found = planner.gpu_cache(CONFIG)
    assert sum(found.values()) == 2 * (full * N_CTX + windowed * cells) + 4 * states
    placed = planner.place(CONFIG)
    assert {placed.cache[il] for il in found} == {"CUDA0", "CUDA1"}


@pytest.mark.parametrize(("key", "on_gpus"), [("kimi-linear-48b", 25.5), ("gemma4-26b", 13.2), ("gpt-oss-120b", 61.1)])
def test_memory_of_a_released_model(key: str, on_gpus: float, tmp_path: Path) -> None:
    """GiB of weights on GPUs in 4 bits, whose output matrix is there once more where it is the embeddings'."""
    planner = planner_for(key, tmp_path / "m.gguf", "2*cuda:80GiB,cpu:1024GiB")
    parts = planner.plan(replace(CONFIG, cpu_moe=False)).memory.parts
    gpus = [parts[name] for name in ("CUDA0", "CUDA1")]
    assert sum(p["KV"] for p in gpus) == sum(planner.gpu_cache(CONFIG).values())
    assert sum(p["weights"] for p in gpus) / 2**30 == pytest.approx(on_gpus, rel=0.01)
    assert all(4 * MIB < p["compute"] < 1024 * MIB for p in gpus)
    assert MIB < parts["CPU"]["compute"] < 64 * MIB
