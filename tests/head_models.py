"""A small model with heads that predict further tokens for each architecture that runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from factories import MemoryModel, add_heads, tiny_deepseek2
from tiny_architectures import tiny

V3 = {"expert_gating_func": 2, "expert_weights_norm": True}
WINDOWS = {"attention.sliding_window_pattern": np.arange(7) % 2 == 0}  # of heads too


def tiny_glm_dsa(**keys: Any) -> MemoryModel:
    """A DeepSeek-V3-like model under the name of GLM-5."""
    model = tiny_deepseek2(**V3, **keys)
    model.metadata = {k.replace("deepseek2.", "glm-dsa."): v for k, v in model.metadata.items()}
    model.metadata["general.architecture"] = "glm-dsa"
    return model


HEAD_MODELS: dict[str, Callable[..., MemoryModel]] = {
    "glm4moe": lambda **keys: add_heads(tiny("glm4moe", **keys), own=True),
    "glm-dsa": lambda **keys: add_heads(tiny_glm_dsa(**keys)),
    "deepseek32": lambda **keys: add_heads(tiny("deepseek32", **keys)),
    "deepseek2": lambda **keys: add_heads(tiny_deepseek2(**V3, **keys), own=True),
    "qwen35": lambda **keys: add_heads(tiny("qwen35", **keys)),
    "qwen35moe": lambda **keys: add_heads(tiny("qwen35moe", **keys)),
    "qwen3next": lambda **keys: add_heads(tiny("qwen3next", **keys)),
    "step35": lambda **keys: add_heads(
        tiny("step35", expert_shared_feed_forward_length=48, **WINDOWS, **keys), 3, dense=True
    ),
    "mimo2": lambda **keys: add_heads(tiny("mimo2", **WINDOWS, **keys), 3, dense=True),
    "bailingmoe2": lambda **keys: add_heads(tiny("bailingmoe2", **keys)),
    "bailingmoe3": lambda **keys: add_heads(tiny("bailingmoe3", **keys)),
}
"""By architecture; keys replace those of the model."""
