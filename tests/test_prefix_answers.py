"""Answers with the prompt cache are those without it, whatever else the server did before: see `answers_machine`.

IK_TEST_STEPS sets the number of steps of the longest test.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers_machine import mixed
from factories import tiny_deepseek2, tiny_model
from gguf_files import write_model

STEPS = int(os.environ.get("IK_TEST_STEPS", "400"))
CACHES = {"q8_0": {"type_k": "q8_0", "type_v": "q8_0"}, "f16": {}}
TINY: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_model("llama", context_length=1024),
    "gemma2": lambda: tiny_model("gemma2", context_length=1024, **{"attention.sliding_window": 24}),
    "deepseek2": lambda: tiny_deepseek2(context_length=1024),
}
GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "arch"


def tiny(name: str, folder: Path) -> Path:
    model = TINY[name]()
    metadata: Any = model.metadata | {"tokenizer.ggml.model": "none"}
    return write_model(model, folder / "model.gguf", metadata)


@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, n_slots: int, tmp_path: Path) -> None:
    found = mixed(tiny(name, tmp_path), n_slots, 12)
    assert found.steps and found.slots > 0


@pytest.mark.slow("hundreds of random steps")
@pytest.mark.parametrize("n_slots", [1, 4])
def test_a_long_mix(n_slots: int, tmp_path: Path) -> None:
    found = mixed(tiny("gemma2", tmp_path), n_slots, STEPS)
    print(f"{n_slots} slots: {found.steps} steps, tokens from slots {found.slots}, RAM {found.ram}, disk {found.disk}; "
          f"{found.shifted} answers with a shifted context")  # fmt: skip
    assert min(found.slots, found.ram, found.disk, found.shifted) > 0


@pytest.mark.slow("golden architectures with two types of caches")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("n_slots", [1, 4])
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.gguf")), ids=lambda path: path.stem)
def test_golden_architectures(path: Path, n_slots: int, cache: str) -> None:
    assert mixed(path, n_slots, 30, **CACHES[cache]).slots > 0
