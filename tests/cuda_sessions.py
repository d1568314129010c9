"""Sessions on emulated GPUs: tiny models, settings, transcripts to compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cuda_emulation import EmulatedDevice
from factories import MemoryModel, tiny_deepseek2, tiny_model
from gguf_files import write_model

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.session import Session
from ikcli.gguf.constants import GGMLType
from ikcli.settings.run import RunConfig

EXPERTS = {"expert_count": 8, "expert_used_count": 3}
MODELS: dict[str, Callable[[], MemoryModel]] = {
    "llama": lambda: tiny_model("llama", optional=(".bias", "rope_freqs.weight")),
    "llama-tied": lambda: tiny_model("llama", tied=True, type_=GGMLType.F16),
    "qwen2": lambda: tiny_model("qwen2", type_=GGMLType.F16),
    "qwen3moe": lambda: tiny_model("qwen3moe", expert_feed_forward_length=64, **EXPERTS),
    "qwen3moe-q8_0": lambda: tiny_model("qwen3moe", type_=GGMLType.Q8_0, expert_feed_forward_length=64, **EXPERTS),
    "deepseek2": lambda: tiny_deepseek2(),
    "deepseek3": lambda: tiny_deepseek2(
        expert_gating_func=2, expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2
    ),
}


def written(folder: Path, name: str) -> Path:
    """A model of MODELS, written once."""
    path = folder / f"{name}.gguf"
    return path if path.exists() else write_model(MODELS[name](), path)


class Opener:
    """Takes the place of `gpus.open_devices`; `devices` are those of the last session, `free` their memory."""

    def __init__(self) -> None:
        self.devices: dict[str, EmulatedDevice] = {}

    def __call__(self, config: RunConfig) -> dict[str, EmulatedDevice]:
        n = len(config.tensor_split) or 1
        self.devices = {f"CUDA{i}": EmulatedDevice(seed=1 + i) for i in range(n)}
        return dict(self.devices)


def config(path: Path, **changes: Any) -> RunConfig:
    settings = {"command": "bench", "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "warmup": False,
                "n_gpu_layers": 99}  # fmt: skip
    return RunConfig(model=path, **(settings | changes))


def tokens(n: int, seed: int = 7) -> Any:
    return np.random.default_rng(seed).integers(0, 96, n).astype(np.int32)


def transcript(session: Session, n: int = 9, steps: int = 3) -> Any:
    """Logits of a prompt of n tokens, all of them, then of single tokens."""
    session.clear()
    ids = tokens(n + steps, n)
    rows = [np.array(session.decode(Batch.single(ids[:n], logits="all")))]
    rows += [np.array(session.decode(Batch.single(ids[i : i + 1], i))) for i in range(n, n + steps)]
    return np.concatenate(rows)


def assert_close(found: Any, wanted: Any, tolerance: float) -> None:
    """Rows are within `tolerance` standard deviations, the median row within a fifth of it; a few may be further off,
    where a near tie between experts falls the other way."""
    assert found.shape == wanted.shape and np.isfinite(found).all()
    error = np.abs(found - wanted).max(axis=1) / wanted.std()
    assert np.median(error) <= tolerance / 5, f"errors {np.sort(error)}"
    assert (error > tolerance).mean() <= 0.1, f"largest errors {np.sort(error)[-5:]}"
