"""What the models of `vision_answers` share: weights by name, and processors that resize as Pillow does."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from vision_models import weights

TEXT = {"hidden_size": 40, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 64, "head_dim": 20, "pad_token_id": 0}  # fmt: skip
Found = tuple[list[np.ndarray], list[np.ndarray], list[Any]]
"""Pixels of the tiles, their embeddings, and what says how they are arranged."""


def resize(pixels: torch.Tensor, size: list[int], interpolation: Any = None, **more: Any) -> torch.Tensor:
    """Resize as Pillow does; torchvision rounds differently by at most one level."""
    modes = {"bilinear": 2, "bicubic": 3, "lanczos": 1, "nearest": 0, "nearest-exact": 0}
    out = []
    for one in pixels.reshape(-1, *pixels.shape[-3:]):
        rgb = Image.fromarray(one.permute(1, 2, 0).numpy())
        made = rgb.resize((size[1], size[0]), Image.Resampling(modes[interpolation.value]))
        out.append(torch.from_numpy(np.array(made)).permute(2, 0, 1))
    return torch.stack(out).reshape(*pixels.shape[:-2], *size)


class Model:
    """A random model of transformers, with the processor of its images."""

    def __init__(self, config: dict[str, Any], processor: Any, kind: str, vision: str) -> None:
        """`kind`: the class; `vision`: a pattern of the names of its vision tensors."""
        made = getattr(tf, kind)
        self.model = made._from_config(made.config_class(**config)).float().eval()
        self.processor, self.shapes = processor, {}
        state = self.model.state_dict()
        for name, x in state.items():
            if any(part in name for part in vision.split()):
                self.shapes[name] = list(x.shape)
                x.copy_(torch.from_numpy(weights(name, tuple(x.shape))))
        self.config = {"architectures": [kind], **config}


class Weights:
    """Weights of a model that transformers does not have, by name, and functions with them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], processor: dict[str, Any]) -> None:
        self.shapes = {name: list(shape) for name, shape in shapes.items()}
        self.config, self.processor = config, processor
        self.w = {name: torch.from_numpy(weights(name, shape)) for name, shape in shapes.items()}

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)


def biased(layers: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights and biases of layers."""
    found = {f"{name}.weight": shape for name, shape in layers.items()}
    return found | {f"{name}.bias": shape[:1] for name, shape in layers.items()}


def sample(x: np.ndarray, n: int) -> str:
    """Return about n of the values, spread over all, in base64."""
    flat = x.astype(np.float32).reshape(-1)
    return base64.b64encode(flat[:: max(len(flat) // n, 1)].tobytes()).decode()
