"""The kinds of projectors with one tower and their checkpoints: Qwen, Gemma, Pixtral, InternVL."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np

from ikcli.convert.projector_kind import (
    BLOCKS,
    Kind,
    Made,
    Settings,
    Values,
    activation,
    frames,
    looked_up,
    same,
    share,
    token_id,
)  # fmt: skip
from ikcli.errors import FormatError, UnsupportedError


# --- Qwen-VL ----------------------------------------------------------------------------------------------------------
def _qwen_prepare(s: Settings) -> None:
    if "embed_dim" in s.vision:  # as programs expect it of Qwen2-VL, whose tower has another width in its middle layers
        s.vision = {**s.vision, "intermediate_size": s.vision.get("hidden_size"), "hidden_size": s.vision["embed_dim"]}
    s.vision = {"image_size": 560, **s.vision}


def _qwen2_keys(s: Settings, out: dict[str, Any]) -> None:
    if s.config.get("model_type") == "qwen2_vl":
        out["clip.projector_type"] = "qwen2vl_merger"
    else:
        out["clip.projector_type"] = "qwen2.5vl_merger"
        out["clip.use_silu"] = True
        full = list(s.vision.get("fullatt_block_indexes") or ())
        period = full[0] + 1 if full else 0
        if not full or any(b - a != period for a, b in pairwise(full)):
            raise UnsupportedError(f"{s.directory}: fullatt_block_indexes {full} are not at equal distances")
        out["clip.vision.n_wa_pattern"] = period
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.config.get("rms_norm_eps", 1e-6))


def _qwen2_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name == "visual.patch_embed.proj.weight":
        return frames(name, shape, s.directory)
    if ".qkv." not in name:
        return None
    return [(looked_up(s, name.replace("qkv", part)), share(i, 3)) for i, part in enumerate("qkv")]


def _exaone_keys(s: Settings, out: dict[str, Any]) -> None:
    _qwen2_keys(s, out)
    out["clip.projector_type"] = "exaone4_5"
    size = s.processor.get("size") or {}
    for end, edge in (("min", "shortest_edge"), ("max", "longest_edge")):
        found = s.processor.get(f"{end}_pixels") or size.get(edge)
        if not isinstance(found, int):
            raise FormatError(f"{s.directory / 'preprocessor_config.json'}: key {end}_pixels is missing")
        out[f"clip.vision.image_{end}_pixels"] = found
    if s.vision.get("num_key_value_heads") is not None:
        out["clip.vision.attention.head_count_kv"] = int(s.vision["num_key_value_heads"])
    eps = s.vision.get("rms_norm_eps", s.config.get("rms_norm_eps", 1e-6))
    out["clip.vision.attention.layer_norm_epsilon"] = float(eps)
    if s.vision.get("window_size") is not None:
        out["clip.vision.window_size"] = int(s.vision["window_size"])


def _exaone_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    return frames(name, shape, s.directory) if name == "visual.patch_embed.proj.weight" else None


def _qwen3_prepare(s: Settings) -> None:
    side = int(int(s.vision.get("num_position_embeddings", 2304)) ** 0.5) * int(s.vision.get("patch_size", 16))
    s.vision = {"image_size": side, **s.vision}


def _qwen3_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "qwen3vl_merger"
    out["clip.use_gelu"] = True
    if s.vision.get("spatial_merge_size") is not None:
        out["clip.vision.spatial_merge_size"] = int(s.vision["spatial_merge_size"])
    inner = s.config.get("text_config") or {}
    out["clip.vision.attention.layer_norm_epsilon"] = float(inner.get("rms_norm_eps", 1e-6))
    deep = s.vision.get("deepstack_visual_indexes") or []
    out["clip.vision.is_deepstack_layers"] = [i in deep for i in range(s.number(*BLOCKS))]


def _qwen3_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name == "visual.patch_embed.proj.weight":
        return frames(name, shape, s.directory)
    if name == "visual.patch_embed.proj.bias":
        return [("v.patch_embd.bias", same)]
    if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
        layer = s.vision["deepstack_visual_indexes"][int(match[1])]
        return [(f"v.deepstack.{layer}.{match[2].removeprefix('linear_')}.{match[3]}", same)]
    if match := re.fullmatch(r"visual\.merger\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
        return [(f"{({'norm': 'v.post_ln', 'linear_fc1': 'mm.0', 'linear_fc2': 'mm.2'})[match[1]]}.{match[2]}", same)]
    return None


# --- others -----------------------------------------------------------------------------------------------------------
def _gemma3_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "gemma3"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-6))
    out["clip.use_gelu"] = True
    side = int(int(s.processor.get("image_seq_length", 256)) ** 0.5)
    scale = s.number("image_size") // s.number("patch_size") // side
    if scale > 0 and scale != 4:
        out["clip.vision.projector.scale_factor"] = scale


def _gemma3_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if "vision_model.head." in name:
        return []
    if "soft_emb_norm" in name:  # stored as the difference from 1
        return [("mm.soft_emb_norm.weight", lambda x: x + np.float32(1))]
    return None


def _gemma4_prepare(s: Settings) -> None:
    s.vision = {**s.vision, "image_size": 224}  # images of any size are read, but programs want the key


def _gemma4_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.vision.projector_type"] = "gemma4v"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-6))


def _gemma4_renamed(name: str) -> str:
    name = name.replace("vision_tower.encoder.", "vision_model.model.").replace(".linear.weight", ".weight")
    if name.endswith(("layer_scalar", "position_embedding_table")):
        name += ".weight"
    return name if name.startswith("vision_model.model.") else f"model.{name}"


def _gemma4_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if not name.endswith("patch_embedder.input_proj.weight"):
        return None

    def patches(x: Values) -> Values:
        side = round((x.shape[1] // 3) ** 0.5)
        return np.ascontiguousarray(x.reshape(x.shape[0], side, side, 3).transpose(0, 3, 1, 2))

    return [("v.patch_embd.weight", patches)]


def _pixtral_keys(s: Settings, out: dict[str, Any]) -> None:
    lighton = "LightOnOCRForConditionalGeneration" in s.config.get("architectures", ())
    out["clip.projector_type"] = "lightonocr" if lighton else "pixtral"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-5))
    out |= activation(s)
    if "spatial_merge_size" in s.config:
        out["clip.vision.spatial_merge_size"] = int(s.config["spatial_merge_size"])


def _pixtral_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return None
    n_head = s.number("num_attention_heads")

    def pairs(x: Values) -> Values:  # rotated pairs become adjacent
        return x.reshape(n_head, 2, x.shape[0] // n_head // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    return [(looked_up(s, name), pairs)]


def _lighton_renamed(name: str) -> str:
    return name.replace("vision_encoder.", "vision_tower.").replace("vision_projection.", "multi_modal_projector.")


def _lighton_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    return _pixtral_place(s, _lighton_renamed(name), shape)


def _row_break(s: Settings, name: str) -> list[Made] | None:
    """Take the embedding of the token that ends a row of an image."""
    if not name.endswith("embed_tokens.weight"):
        return None
    token = token_id(s.directory, "[IMG_BREAK]")
    return [("v.token_embd.img_break", lambda x: x[token])]


def _intern_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "internvl"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.number("layer_norm_eps"))
    out |= activation(s)
    ratio = s.config.get("downsample_ratio")
    if not ratio:
        raise FormatError(f"{s.directory / 'config.json'}: key downsample_ratio is missing")
    out["clip.vision.projector.scale_factor"] = int(1 / ratio)
    for key, name in (("preproc_min_tiles", "min_dynamic_patch"), ("preproc_max_tiles", "max_dynamic_patch")):
        if s.config.get(name):
            out[f"clip.vision.{key}"] = int(s.config[name])


_INTERN_NAMES = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}


def _intern_renamed(name: str) -> str:
    if match := re.fullmatch(r"multi_modal_projector\.(layer_norm|linear_1|linear_2)\.(\w+)", name):
        return f"mlp1.{_INTERN_NAMES[match[1]]}.{match[2]}"
    if name.startswith("vision_model"):
        name = f"vision_tower.{name}"
    elif name.startswith("vision_tower"):
        name = f"model.{name}"
    if re.search(r"\.ls|\.lambda_|position_embedding", name) and not name.endswith(".weight"):
        name += ".weight"
    return name


def _intern_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if ".qkv." not in name:
        return None
    names = [name.replace("attn.qkv", f"self_attn.{part}_proj") for part in "qkv"]
    return [(looked_up(s, _intern_renamed(one)), share(i, 3)) for i, one in enumerate(names)]


KINDS = (
    Kind(("Exaone4_5_ForConditionalGeneration",), _exaone_keys, ("visual.",), _exaone_place, prepare=_qwen_prepare),
    Kind(("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration", "Qwen2VLModel"), _qwen2_keys,
         ("visual.",), _qwen2_place, prepare=_qwen_prepare),
    Kind(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
          "Qwen3_5MoeForConditionalGeneration"), _qwen3_keys, ("visual.",), _qwen3_place, prepare=_qwen3_prepare),
    Kind(("Gemma3ForConditionalGeneration",), _gemma3_keys, ("multi_modal_projector.", "vision_tower.",
         "multimodal_projector.", "vision_model."), _gemma3_place, lambda name: name.replace("_weight", ".weight"),
         f16="input_projection", f32=r"\.embeddings\."),
    Kind(("Gemma4ForConditionalGeneration",), _gemma4_keys, ("vision_tower.", "embed_vision."), _gemma4_place,
         _gemma4_renamed, _gemma4_prepare, f32="position_embedding_table"),
    Kind(("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"), _pixtral_keys,
         ("multi_modal_projector.", "vision_tower."), _pixtral_place, towers=("pixtral",), extra=_row_break),
    Kind(("LightOnOCRForConditionalGeneration",), _pixtral_keys, ("vision_encoder.", "vision_projection."),
         _lighton_place, _lighton_renamed),
    Kind(("InternVLChatModel", "InternVisionModel", "InternVLForConditionalGeneration"), _intern_keys, ("vision_model.",
         "mlp1.", "vision_tower.", "multi_modal_projector."), _intern_place, _intern_renamed),
)  # fmt: skip
