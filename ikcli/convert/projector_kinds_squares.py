"""The kinds of projectors that read an image as one square: LLaVA-1.5, Janus, CogVLM."""

from __future__ import annotations

from typing import Any

from ikcli.convert.projector_kind import Kind, Made, Settings, same
from ikcli.errors import UnsupportedError


# --- LLaVA ------------------------------------------------------------------------------------------------------------
def _feature_layer(s: Settings) -> int:
    found = s.config.get("vision_feature_layer", -2)
    if not isinstance(found, int):
        raise UnsupportedError(f"{s.directory / 'config.json'}: key vision_feature_layer is {found}, not one layer")
    return found if found >= 0 else int(s.config["vision_config"]["num_hidden_layers"]) + found + 1


def _llava_prepare(s: Settings) -> None:
    if "num_hidden_layers" not in s.vision:
        s.number("num_hidden_layers")
    s.vision = {**s.vision, "num_hidden_layers": _feature_layer(s)}


def _llava_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.has_text_encoder"] = False
    out["clip.has_llava_projector"] = True
    out["clip.projector_type"] = "mlp"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-5))
    out["clip.vision.feature_layer"] = [_feature_layer(s)]
    grid = s.config.get("image_grid_pinpoints")
    out["clip.vision.image_aspect_ratio"] = "anyres" if grid else "pad"
    if grid:
        out["clip.vision.image_grid_pinpoints"] = [int(x) for pair in grid for x in pair]
        out["clip.vision.mm_patch_merge_type"] = "spatial_unpad"
    out["clip.use_gelu"] = str(s.vision.get("hidden_act", "quick_gelu")).startswith("gelu")


def _llava_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    for linear, index in (("linear_1", 0), ("linear_2", 2)):
        if name.startswith(f"multi_modal_projector.{linear}."):
            return [(f"mm.{index}.{name.rpartition('.')[2]}", same)]
    if name == "image_newline":
        return [("model.image_newline", same)]
    if ".post_layernorm." in name or ".head." in name or name.endswith("position_ids"):
        return []
    parts = name.split(".encoder.layers.")
    return [] if len(parts) == 2 and int(parts[1].split(".")[0]) >= s.number("num_hidden_layers") else None


def _llava_renamed(name: str) -> str:
    if name.startswith("vision_tower.") and ".vision_model." not in name:
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name


# --- Janus ------------------------------------------------------------------------------------------------------------
def _janus_prepare(s: Settings) -> None:
    if "intermediate_size" not in s.vision and s.vision.get("mlp_ratio"):
        s.vision = {**s.vision, "intermediate_size": round(s.number("hidden_size") * s.vision["mlp_ratio"])}


def _janus_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "janus_pro"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-6))
    act = str(s.vision.get("hidden_act", "")).lower()
    if act in ("gelu", "silu"):
        out[f"clip.use_{act}"] = True


def _janus_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name.startswith("aligner.fc1."):
        return [(name.replace("aligner.fc1", "mm.0"), same)]
    if name.startswith("aligner.hidden_layers."):
        _, _, index, kind = name.split(".")
        return [(f"mm.{int(index) + 1}.{kind}", same)]
    return None


# --- CogVLM -----------------------------------------------------------------------------------------------------------
def _cogvlm_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "cogvlm"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-6))


def _cogvlm_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name.startswith("vision.conv."):
        raise UnsupportedError(f"{s.directory}: tensor {name} is of CogVLM2, whose projector is not converted")
    return None


_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))

KINDS = (
    Kind(("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration"), _llava_keys,
         ("vision_tower.", "multi_modal_projector.", "image_newline"), _llava_place, _llava_renamed, _llava_prepare,
         towers=("clip_vision_model", "siglip_vision_model")),
    Kind(("JanusForConditionalGeneration",), _janus_keys, ("vision_model.", "aligner."), _janus_place,
         lambda name: f"model.{name}", _janus_prepare),
    Kind(("CogVLMForCausalLM",), _cogvlm_keys, ("vision.",), _cogvlm_place, lambda name: f"model.{name}",
         colours=_CLIP),
)  # fmt: skip
