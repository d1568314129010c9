"""Write tests/data/vision_answers.json: what torch and the processors of transformers make of small random models.

Needs torch, torchvision and transformers, which `ik` itself does not: run it in an environment of its own, with
PYTHONPATH=tests. `--full DIR` also writes all pixels and embeddings; names restrict the run to some models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision.transforms.v2.functional as tv
import transformers as tf
from PIL import Image
from vision_answers_shared import TEXT, Found, Model, resize, sample
from vision_answers_written import cogvlm, dots_ocr, glm_edge, janus, minicpmv, mobilevlm
from vision_models import ANSWERS, image, weights

SIZES = ((61, 47), (150, 90), (40, 130))


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


def glm4v() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 32, "intermediate_size": 44, "depth": 2, "num_heads": 2, "image_size": 70,
              "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 40,
              "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 2], "partial_rotary_factor": 0.5}
    text = TEXT | {"num_hidden_layers": 2, "rms_norm_eps": 1e-5, "rope_parameters": rope, "attention_bias": True}
    config = {"vision_config": vision, "text_config": text, "image_token_id": 5, "image_start_token_id": 6,
              "image_end_token_id": 7}  # fmt: skip
    processor = tf.Glm4vImageProcessor(size={"shortest_edge": 12544, "longest_edge": 9633792})
    m = Model(config, processor, "Glm4vForConditionalGeneration", "visual language_model lm_head")
    made = processor([Image.fromarray(image(61, 47))], return_tensors="pt")
    n = int(made["image_grid_thw"].prod()) // 4
    ids = [10, 11, 12, 6, *[5] * n, 7, 20, 21, 22, 23, 24]
    tensors = torch.tensor([ids])
    logits = m.model(input_ids=tensors, mm_token_type_ids=(tensors == 5).int(), **made).logits[0, -6:]
    m.text = {"ids": ids, "image": "61x47", "log_probabilities": sample(logits.log_softmax(-1).numpy(), 384)}

    return m, lambda rgb: glm_run(m, rgb)


def glm_run(m: Model, rgb: np.ndarray) -> Found:
    """Return what a model of the GLM-4V kind makes of an image."""
    made = m.processor([Image.fromarray(rgb)], return_tensors="pt")
    rows = m.model.model.visual(made["pixel_values"], made["image_grid_thw"]).pooler_output
    _, h, w = made["image_grid_thw"][0].tolist()
    x = made["pixel_values"].numpy().reshape(h // 2, w // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
    return [x.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, h * 14, w * 14)], [rows.numpy()], [h, w]


def glm_ocr() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 32, "intermediate_size": 44, "depth": 2, "num_heads": 2, "image_size": 70,
              "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 40,
              "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": True}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 2], "partial_rotary_factor": 0.5}
    config = {"vision_config": vision, "text_config": TEXT | {"rope_parameters": rope}}
    m = Model(config, tf.Glm4vImageProcessor(), "GlmOcrForConditionalGeneration", "visual")
    return m, lambda rgb: glm_run(m, rgb)


def moonvit(kind: str) -> tuple[Any, Callable[[np.ndarray], Found]]:
    """Compute MoonViT as the code beside the checkpoints of Kimi-VL does; Kimi K2.5 has the same layers."""
    n, n_head, ff, patch, table = 32, 2, 44, 14, 6
    block = {"norm0": (n,), "norm1": (n,), "wqkv": (3 * n, n), "wo": (n, n), "mlp.fc0": (ff, n), "mlp.fc1": (n, ff)}
    tower, top = "vision_tower.", {"kimivl": "multi_modal_projector.", "kimik25": "mm_projector."}[kind]
    first, second = ("linear_1", "linear_2") if kind == "kimivl" else ("proj.0", "proj.2")
    layers = {f"{tower}patch_embed.proj": (n, 3, patch, patch), f"{tower}encoder.final_layernorm": (n,),
              f"{top}pre_norm": (n,), f"{top}{first}": (4 * n, 4 * n), f"{top}{second}": (40, 4 * n)}  # fmt: skip
    layers |= {f"{tower}encoder.blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    shapes = {f"{name}.weight": shape for name, shape in layers.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    shapes[f"{tower}patch_embed.pos_emb.weight"] = (table, table, n)
    w = {name: torch.from_numpy(weights(name, shape)) for name, shape in shapes.items()}
    old = kind == "kimivl"
    sizes = {"hidden_size": n, "num_attention_heads": n_head, "num_hidden_layers": 2, "intermediate_size": ff}
    vision = {("" if old else "vt_") + key: value for key, value in sizes.items()}
    vision |= {"patch_size": patch, "init_pos_emb_height": table, "init_pos_emb_width": table}
    config = {"architectures": ["KimiVLForConditionalGeneration" if old else "KimiK25ForConditionalGeneration"],
              "vision_config": vision, "text_config": TEXT}  # fmt: skip
    processor = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "in_token_limit" if old else "in_patch_limit": 64}
    limit = 4096 if old else 64  # files of Kimi-VL do not have it

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, (n,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def rotated(x: torch.Tensor, cis: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * cis[:, None]).flatten(2)

    def run(rgb: np.ndarray) -> Found:
        picture = Image.fromarray(rgb)
        pw, ph = picture.size
        count = (pw // patch) * (ph // patch)
        if count > limit:
            scale = (limit / count) ** 0.5
            picture = picture.resize((int(pw * scale), int(ph * scale)), Image.Resampling.BICUBIC)
        pw, ph = (-(-x // (2 * patch)) * 2 * patch for x in picture.size)
        whole = Image.new("RGB", (pw, ph))
        whole.paste(picture)
        pixels = (torch.from_numpy(np.array(whole)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
        h, wd = ph // patch, pw // patch
        conv = torch.nn.functional.conv2d(pixels[None], w[f"{tower}patch_embed.proj.weight"],
                                          w[f"{tower}patch_embed.proj.bias"], stride=patch)  # fmt: skip
        pos = w[f"{tower}patch_embed.pos_emb.weight"].permute(2, 0, 1)[None]
        pos = torch.nn.functional.interpolate(pos, size=(h, wd), mode="bicubic")
        x = (conv + pos)[0].flatten(1).T
        d = n // n_head
        freqs = 1.0 / (10000 ** (torch.arange(0, d, 4).float() / d))
        flat = torch.arange(h * wd)
        parts = [torch.outer(p.float(), freqs) for p in (flat % wd, flat // wd)]
        cis = torch.stack([torch.polar(torch.ones_like(p), p) for p in parts], dim=-1).flatten(1)
        for i in range(2):
            b = f"{tower}encoder.blocks.{i}."
            q, k, v = linear(norm(x, f"{b}norm0"), f"{b}wqkv").reshape(h * wd, 3, n_head, d).unbind(1)
            q, k, v = (y.transpose(0, 1) for y in (rotated(q, cis), rotated(k, cis), v))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).reshape(h * wd, n)
            x = x + linear(y, f"{b}wo")
            y = torch.nn.functional.gelu(linear(norm(x, f"{b}norm1"), f"{b}mlp.fc0"), approximate="tanh")
            x = x + linear(y, f"{b}mlp.fc1")
        x = norm(x, f"{tower}encoder.final_layernorm").reshape(h // 2, 2, wd // 2, 2, n).transpose(1, 2)
        x = norm(x.reshape(-1, n), f"{top}pre_norm").reshape(-1, 4 * n)
        rows = linear(torch.nn.functional.gelu(linear(x, top + first)), top + second)
        return [pixels.numpy()], [rows.numpy()], [h, wd]

    class Made:
        pass

    m: Any = Made()
    m.config, m.processor, m.shapes = config, processor, {name: list(shape) for name, shape in shapes.items()}
    return m, run


def lfm2() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
              "num_attention_heads": 2, "num_patches": 36, "patch_size": 16, "layer_norm_eps": 1e-6,
              "vision_use_head": False}  # fmt: skip
    text = {"model_type": "lfm2", **TEXT, "layer_types": ["conv"], "block_ff_dim": 32}
    config = {"vision_config": vision, "text_config": text, "downsample_factor": 2, "projector_hidden_size": 36}
    processor = tf.Lfm2VlImageProcessor()
    m = Model(config, processor, "Lfm2VlForConditionalGeneration", "vision_tower multi_modal_projector")

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt", return_row_col_info=True)
        keys = ("pixel_values", "spatial_shapes", "pixel_attention_mask")
        rows = m.model.model.get_image_features(*(made[key] for key in keys)).pooler_output
        pixels = []
        for x, (h, w) in zip(made["pixel_values"].numpy(), made["spatial_shapes"].tolist(), strict=True):
            cut = x[: h * w].reshape(h, w, 16, 16, 3)
            pixels.append(cut.transpose(4, 0, 2, 1, 3).reshape(3, h * 16, w * 16))
        return pixels, [x.numpy() for x in rows], [made["image_rows"][0].item(), made["image_cols"][0].item()]

    return m, run


def internvl() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4, "num_attention_heads": 2,
              "image_size": [56, 56], "patch_size": [14, 14], "hidden_act": "gelu", "layer_norm_eps": 1e-6,
              "attention_bias": True, "use_qk_norm": False, "norm_type": "layer_norm"}  # fmt: skip
    config = {"vision_config": vision, "text_config": {"model_type": "qwen2", **TEXT}, "downsample_ratio": 0.5}
    processor = tf.GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=6)
    m = Model(config, processor, "InternVLForConditionalGeneration", "vision_tower multi_modal_projector")
    m.config |= {"min_dynamic_patch": 1, "max_dynamic_patch": 6}

    def run(rgb: np.ndarray) -> Found:
        pixels = processor([Image.fromarray(rgb)], return_tensors="pt")["pixel_values"]
        rows = m.model.model.get_image_features(pixels).pooler_output
        return list(pixels.numpy()), [x.numpy() for x in rows], []

    return m, run


def llava() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3,
              "num_attention_heads": 2, "image_size": 56, "patch_size": 14, "hidden_act": "quick_gelu"}  # fmt: skip
    config = {"vision_config": vision, "text_config": {"model_type": "llama", **TEXT}, "vision_feature_layer": -2,
              "image_token_index": 5}  # fmt: skip
    processor = tf.LlavaImageProcessor(do_pad=True, size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    m = Model(config, processor, "LlavaForConditionalGeneration", "vision_tower multi_modal_projector")

    def run(rgb: np.ndarray) -> Found:
        pixels = processor([Image.fromarray(rgb)], return_tensors="pt")["pixel_values"]
        found = m.model.get_image_features(pixels, vision_feature_layer=-2, vision_feature_select_strategy="default",
                                           output_hidden_states=True)  # fmt: skip
        return list(pixels.numpy()), [x.numpy() for x in found.pooler_output], []

    return m, run


def llava_next() -> tuple[Model, Callable[[np.ndarray], Found]]:
    from transformers.image_processing_utils import select_best_resolution

    size, grid = 56, [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3,
              "num_attention_heads": 2, "image_size": size, "patch_size": 14, "hidden_act": "quick_gelu"}  # fmt: skip
    config = {"vision_config": vision, "text_config": {"model_type": "llama", **TEXT}, "vision_feature_layer": -2,
              "image_grid_pinpoints": grid, "image_token_index": 5}  # fmt: skip
    square = {"height": size, "width": size}
    processor = tf.LlavaNextImageProcessor(size={"shortest_edge": size}, crop_size=square, image_grid_pinpoints=grid)
    m = Model(config, processor, "LlavaNextForConditionalGeneration", "vision_tower multi_modal_projector newline")

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        found = m.model.get_image_features(made["pixel_values"], made["image_sizes"], vision_feature_layer=-2,
                                           vision_feature_select_strategy="default",
                                           output_hidden_states=True).pooler_output[0].numpy()  # fmt: skip
        height, width = select_best_resolution(rgb.shape[:2], grid)
        first, *tiles = made["pixel_values"][0].numpy()
        canvas = np.stack(tiles).reshape(height // size, width // size, 3, size, size).transpose(2, 0, 3, 1, 4)
        return [first, canvas.reshape(3, height, width)], [found[:16], found[16:]], [height, width]

    return m, run


def lightonocr() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4,
              "num_attention_heads": 2, "image_size": 112, "patch_size": 14, "hidden_act": "silu", "head_dim": 16,
              "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}  # fmt: skip
    config = {"vision_config": vision, "text_config": {"model_type": "qwen3", **TEXT, "rms_norm_eps": 1e-6},
              "spatial_merge_size": 2}  # fmt: skip
    processor = tf.PixtralImageProcessor(size={"longest_edge": 112}, patch_size={"height": 28, "width": 28})
    m = Model(config, processor, "LightOnOcrForConditionalGeneration", "vision_encoder vision_projection")
    m.config["architectures"] = ["LightOnOCRForConditionalGeneration"]

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        found = m.model.model.get_image_features(made["pixel_values"], made["image_sizes"])
        return list(made["pixel_values"].numpy()), [x.numpy() for x in found.pooler_output], []

    return m, run


def paddleocr() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 84, "patch_size": 14, "hidden_act": "gelu_pytorch_tanh"}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 4, 4]}
    config = {"vision_config": vision, "text_config": TEXT | {"rope_parameters": rope}}
    processor = tf.PaddleOCRVLImageProcessor(size={"shortest_edge": 6000, "longest_edge": 20000})
    m = Model(config, processor, "PaddleOCRVLForConditionalGeneration", "visual projector")

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        rows = m.model.get_image_features(made["pixel_values"], made["image_grid_thw"]).pooler_output
        _, h, w = made["image_grid_thw"][0].tolist()
        pixels = made["pixel_values"].numpy().reshape(h, w, 3, 14, 14).transpose(2, 0, 3, 1, 4)
        return [pixels.reshape(3, h * 14, w * 14)], [np.concatenate([x.numpy() for x in rows])], [h, w]

    return m, run


def minicpmv46() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 2,
              "image_size": 140, "patch_size": 14}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
            "mrope_interleaved": True}  # fmt: skip
    text = {"model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "pad_token_id": 0,
            "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "bos_token_id": 0,
            "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "eos_token_id": 1,
            "linear_conv_kernel_dim": 4, "tie_word_embeddings": False, "rope_parameters": rope}  # fmt: skip
    config = {"vision_config": vision, "text_config": text, "insert_layer_id": 1, "image_token_id": 5}
    processor = tf.MiniCPMV4_6ImageProcessor(scale_resolution=112, patch_size=14)
    m = Model(config, processor, "MiniCPMV4_6ForConditionalGeneration", ".")
    processor.find_best_resize.__func__.__globals__["ensure_divide"] = lambda x, y: max(round(x / y) * y, y)

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        found = m.model.model.get_image_features(made["pixel_values"], made["target_sizes"]).pooler_output
        pixels, at = [], 0
        for h, w in made["target_sizes"].tolist():
            cut = made["pixel_values"][0][:, :, at * 14 : (at + h * w) * 14].reshape(3, 14, h, w, 14)
            pixels.append(cut.permute(0, 2, 1, 3, 4).reshape(3, h * 14, w * 14).numpy())
            at += h * w
        return pixels, [x.numpy() for x in found], list(made["grids"][0])

    made = processor([Image.fromarray(image(61, 47))], return_tensors="pt")
    n = int(made["target_sizes"].prod()) // 16
    ids = [10, 11, 12, *[5] * n, 20, 21, 22, 23, 24, 25]
    inputs = {key: made[key] for key in ("pixel_values", "target_sizes")}
    found = m.model(input_ids=torch.tensor([ids]), **inputs).logits[0, -6:].log_softmax(-1)
    ids = [-1 if token == 5 else token for token in ids]
    m.text = {"ids": ids, "images": ["61x47"], "log_probabilities": sample(found.numpy(), found.numel())}
    return m, run


def minimax() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 84, "patch_size": 14}  # fmt: skip
    text = TEXT | {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = {"vision_config": vision, "text_config": text, "projector_hidden_size": 48, "image_token_index": 5,
              "video_token_index": 6}  # fmt: skip
    m = Model(config, tf.MiniMaxM3VLImageProcessor(), "MiniMaxM3SparseForConditionalGeneration", "none")
    names = {"model.vision_tower.embeddings.proj": "vision_tower.vision_model.embeddings.patch_embedding",
             "model.vision_tower.layers.": "vision_tower.vision_model.encoder.layers.",
             "model.vision_tower.": "vision_tower.vision_model.",
             "model.multi_modal_projector.merge_": "patch_merge_mlp.",
             "model.multi_modal_projector.": "multi_modal_projector."}  # fmt: skip
    for name, x in m.model.state_dict().items():  # under the names that the checkpoint has
        for ours, theirs in names.items():
            if name.startswith(ours):
                name = name.replace(ours, theirs)
                m.shapes[name] = list(x.shape)
                x.copy_(torch.from_numpy(weights(name, tuple(x.shape))))
    m.config["vision_config"] = vision | {"img_token_compression_config": {"spatial_merge_size": 2}}

    def run(rgb: np.ndarray) -> Found:
        made = m.processor([Image.fromarray(rgb)], return_tensors="pt")
        rows = m.model.model.get_image_features(made["pixel_values"], made["image_grid_thw"]).pooler_output
        _, h, w = made["image_grid_thw"][0].tolist()
        x = made["pixel_values"].numpy().reshape(h // 2, w // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
        return [x.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, h * 14, w * 14)], [x.numpy() for x in rows], [h, w]

    return m, run


def exaone45() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 64, "intermediate_size": 44, "depth": 2, "num_heads": 4, "num_key_value_heads": 2,
              "patch_size": 14, "out_hidden_size": 40, "fullatt_block_indexes": [1], "window_size": 56}  # fmt: skip
    config = {"vision_config": vision, "text_config": {"model_type": "exaone4", **TEXT}}
    processor = tf.Qwen2VLImageProcessor(min_pixels=6000, max_pixels=20000)
    m = Model(config, processor, "Exaone4_5_ForConditionalGeneration", "visual")

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        rows = m.model.model.visual(made["pixel_values"], made["image_grid_thw"]).pooler_output
        _, h, w = made["image_grid_thw"][0].tolist()
        x = made["pixel_values"].numpy().reshape(h // 2, w // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
        return [x.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, h * 14, w * 14)], [rows.numpy()], [h, w]

    return m, run


def muse() -> tuple[Model, Callable[[np.ndarray], Found]]:
    vision = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
              "patch_size": 14, "pos_emb_height": 4, "pos_emb_width": 4, "merge_size": 2}  # fmt: skip
    config = {"vision_config": vision, "text_config": TEXT, "out_hidden_size": 384, "projector_hidden_size": 48}
    processor = tf.MuseGlimmerImageProcessor(max_image_tokens=4096)
    m = Model(config, processor, "MuseGlimmerForConditionalGeneration", "vision_")

    def run(rgb: np.ndarray) -> Found:
        made = processor([Image.fromarray(rgb)], return_tensors="pt")
        inner, (_, h, w) = m.model.model, made["image_grid_thw"][0].tolist()
        found = inner.vision_tower(pixel_values=made["pixel_values"], grid_thw=made["image_grid_thw"])
        rows = inner.vision_projection(inner.vision_adapter(found.last_hidden_state))  # the text model norms them
        x = made["pixel_values"].numpy().reshape(h, w, 2, 3, 14, 14)[:, :, 0]
        return [x.transpose(2, 0, 3, 1, 4).reshape(3, h * 14, w * 14)], [rows.numpy()], [h, w]

    return m, run


MODELS = {
    "internvl": internvl,
    "idefics3": idefics3,
    "llama4": llama4,
    "glm4v": glm4v,
    "glm_ocr": glm_ocr,
    "kimivl": lambda: moonvit("kimivl"),
    "kimik25": lambda: moonvit("kimik25"),
    "lfm2": lfm2,
    "minicpmv": minicpmv,
    "llava": llava,
    "llava_next": llava_next,
    "mlp_norm": lambda: mobilevlm("mlp_norm"),
    "ldp": lambda: mobilevlm("ldp"),
    "ldpv2": lambda: mobilevlm("ldpv2"),
    "janus": janus,
    "lightonocr": lightonocr,
    "dots_ocr": dots_ocr,
    "paddleocr": paddleocr,
    "cogvlm": cogvlm,
    "minicpmv46": minicpmv46,
    "minimax": minimax,
    "exaone45": exaone45,
    "glm_edge": glm_edge,
    "muse": muse,
}
MORE_SIZES = {"lfm2": ((1024, 600),)}


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
            about = m.processor if isinstance(m.processor, dict) else m.processor.to_dict()
            processor = {key: value for key, value in about.items() if value is not None}
            images = {}
            for width, height in (*SIZES, *MORE_SIZES.get(name, ())):
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
        more = {"metadata": m.metadata} if hasattr(m, "metadata") else {}
        more |= {"text": m.text} if hasattr(m, "text") else {}
        found[name] = more | {"config": m.config, "processor": processor, "shapes": m.shapes, "images": images}
    ANSWERS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
