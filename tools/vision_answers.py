"""Write tests/data/vision_answers.json: what torch and the processors of transformers make of small random models.

Needs torch, torchvision and transformers, which `ik` itself does not: run it in an environment of its own, with
PYTHONPATH=tests. `--full DIR` also writes all pixels and embeddings; names restrict the run to some models.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms.v2.functional as tv
import transformers as tf
from PIL import Image
from vision_models import ANSWERS, image, weights

SIZES = ((61, 47), (150, 90), (40, 130))
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


def idefics3() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 64, "patch_size": 8}  # fmt: skip
    config = {"vision_config": vision, "text_config": TEXT, "scale_factor": 2, "image_token_id": 5, "pad_token_id": 0}
    processor = tf.Idefics3ImageProcessor(size={"longest_edge": 160}, max_image_size={"longest_edge": 64})
    m = Model(config, processor, "Idefics3ForConditionalGeneration", "vision_model connector")

    def run(rgb: np.ndarray) -> Found:
        made = processor([[Image.fromarray(rgb)]], return_tensors="pt", return_row_col_info=True)
        found = m.model.model.get_image_features(made["pixel_values"], made["pixel_attention_mask"])
        arranged = [made["rows"][0][0], made["cols"][0][0]]
        return list(made["pixel_values"][0].numpy()), [x.numpy() for x in found.pooler_output], arranged

    return m, run


def llama4() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 64, "patch_size": 8, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 24,
              "projector_output_dim": 24, "vision_output_dim": 24, "norm_eps": 1e-5, "hidden_act": "gelu",
              "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    text = TEXT | {"intermediate_size_mlp": 32, "num_local_experts": 1, "moe_layers": []}
    config = {"vision_config": vision, "text_config": text}
    processor = tf.Llama4ImageProcessor(size={"height": 64, "width": 64})
    m = Model(config, processor, "Llama4ForConditionalGeneration", "vision_model multi_modal_projector")

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        pixels = made["pixel_values"].float()
        rows = m.model.multi_modal_projector(m.model.vision_model(pixels).last_hidden_state)
        return list(pixels.numpy()), [x.numpy() for x in rows], made["aspect_ratios"][0].tolist()

    return m, run


MODELS = {"idefics3": idefics3, "llama4": llama4}


def sample(x: np.ndarray, n: int) -> str:
    """Return about n of the values, spread over all, in base64."""
    flat = x.astype(np.float32).reshape(-1)
    return base64.b64encode(flat[:: max(len(flat) // n, 1)].tobytes()).decode()


def main() -> None:
    """Run the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--full", type=Path)
    given = parser.parse_args()
    tv.resize = resize
    found = json.loads(ANSWERS.read_text()) if ANSWERS.is_file() else {}
    for name in given.names or MODELS:
        with torch.no_grad():
            m, run = MODELS[name]()
            processor = {key: value for key, value in m.processor.to_dict().items() if value is not None}
            images = {}
            for width, height in SIZES:
                pixels, rows, arranged = run(image(width, height))
                if given.full:
                    given.full.mkdir(exist_ok=True)
                    tiles = {f"pixels{i}": x for i, x in enumerate(pixels)}
                    tiles |= {f"rows{i}": x for i, x in enumerate(rows)}
                    np.savez(given.full / f"{name}-{width}x{height}.npz", **tiles)
                images[f"{width}x{height}"] = {
                    "tiles": [list(x.shape) for x in pixels], "rows": [len(x) for x in rows], "arranged": arranged,
                    "pixels": sample(np.concatenate([x.reshape(-1) for x in pixels]), 64),
                    "embeddings": sample(np.concatenate([x.reshape(-1) for x in rows]), 96),
                }  # fmt: skip
        found[name] = {"config": m.config, "processor": processor, "shapes": m.shapes, "images": images}
    ANSWERS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
