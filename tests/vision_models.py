"""Small random checkpoints and images that are the same everywhere, for tests of projectors against torch.

`tests/data/vision_answers.json` holds configurations, the shapes of tensors, and what torch computes
(`tools/vision_answers.py` writes it); weights and pixels follow from names.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ANSWERS = Path(__file__).parent / "data" / "vision_answers.json"
Floats = npt.NDArray[np.float32]


def numbers(name: str, n: int) -> npt.NDArray[np.float64]:
    """Return n numbers from -1 to 1 that follow from a name."""
    with np.errstate(over="ignore"):
        x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(zlib.crc32(name.encode()))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    found: npt.NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) / 2**52 - 1
    return found


def weights(name: str, shape: tuple[int, ...]) -> Floats:
    """Return a tensor of a checkpoint: norms near 1, matrices that keep the size of what they multiply."""
    x = numbers(name, int(np.prod(shape)))
    if len(shape) > 1:
        x *= 3 / np.sqrt(np.prod(shape[1:]))
        if "position" in name or "pos_emb" in name:
            x = numbers(name, int(np.prod(shape)))
    elif name.endswith(".weight"):
        x = 1 + 0.3 * x
    else:
        x *= 0.3
    return x.astype(np.float16).astype(np.float32).reshape(shape)


def image(width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return an image with detail of all sizes."""
    x = numbers(f"{width}x{height}", width * height * 3).reshape(height, width, 3) * 40
    rows, cols = np.mgrid[0:height, 0:width]
    for channel, (a, b) in enumerate(((0.11, 0.02), (0.031, 0.17), (0.007, -0.05))):
        x[:, :, channel] += 127 + 85 * np.sin(a * cols + b * rows + channel)
    return x.clip(0, 255).astype(np.uint8)


def answers() -> dict[str, Any]:
    """Return what torch computes, by model."""
    found: dict[str, Any] = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return found


def write_projector(path: Path, model: dict[str, Any]) -> None:
    """Write the projector of a model that has its tensors under the names of such files, as float32 and float16."""
    from ikcli.gguf.constants import GGMLType
    from ikcli.gguf.writer import GGUFWriter, NewTensor

    specs = []
    for name, shape in sorted(model["shapes"].items()):
        half = name.endswith(".weight") and len(shape) > 1 and "position" not in name
        specs.append(NewTensor(name, tuple(reversed(shape)), GGMLType.F16 if half else GGMLType.F32))
    with GGUFWriter(path, model["metadata"], specs) as writer:
        for spec in specs:
            values = weights(spec.name, tuple(reversed(spec.shape)))
            kind = np.float16 if spec.type == GGMLType.F16 else np.float32
            writer.write_tensor(spec.name, values.astype(kind).reshape(-1).view(np.uint8))


def write_checkpoint(folder: Path, model: dict[str, Any]) -> None:
    """Write the checkpoint of a model."""
    from checkpoints import write_safetensors

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: weights(name, tuple(shape)).astype(np.float16) for name, shape in sorted(model["shapes"].items())}
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(model["config"]))
    (folder / "preprocessor_config.json").write_text(json.dumps(model["processor"]))
