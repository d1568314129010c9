"""The kinds of projectors that read an image in tiles: Idefics 3 and SmolVLM, Llama 4."""

from __future__ import annotations

import re
from typing import Any

from ikcli.convert.projector_kind import Kind, Made, Settings, same
from ikcli.errors import UnsupportedError


# --- Idefics 3, SmolVLM -----------------------------------------------------------------------------------------------
def _idefics_prepare(s: Settings) -> None:
    if s.vision.get("model_type") == "smolvlm_vision":  # what its config.json leaves out
        s.vision = {"hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 3072, **s.vision}


def _idefics_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "idefics3"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-5))
    out["clip.vision.projector.scale_factor"] = int(s.config.get("scale_factor", 2))
    out["clip.use_gelu"] = True
    longest = (s.processor.get("size") or {}).get("longest_edge", s.number("image_size"))
    out["clip.vision.preproc_image_size"] = int(longest)


# --- Llama 4 ----------------------------------------------------------------------------------------------------------
def _llama4_keys(s: Settings, out: dict[str, Any]) -> None:
    if s.vision.get("hidden_act", "gelu") != "gelu":
        raise UnsupportedError(f"{s.directory / 'config.json'}: key vision_config.hidden_act is not gelu")
    out["clip.projector_type"] = "llama4"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("norm_eps", 1e-5))
    out["clip.vision.projector.scale_factor"] = int(1 / s.number("pixel_shuffle_ratio", default=0.5))
    out["clip.use_gelu"] = True


def _llama4_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name == "multi_modal_projector.linear_1.weight":  # one layer, in spite of its number
        return [("mm.model.fc.weight", same)]
    if match := re.fullmatch(r"vision_model\.model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)", name):
        return [(f"v.blk.{match[1]}.ln2.{match[2]}", same)]  # the map of gguf has the name of a norm in Gemma 4
    return None


def _llama4_renamed(name: str) -> str:
    return f"{name}.weight" if name.endswith("positional_embedding_vlm") else name


KINDS = (
    Kind(("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), _idefics_keys, ("vision_model.",
         "vision_tower.", "connector."), renamed=lambda name: f"model.{name}", prepare=_idefics_prepare,
         f32=r"\.embeddings\."),
    Kind(("Llama4ForConditionalGeneration",), _llama4_keys, ("multi_modal_projector.", "vision_model."), _llama4_place,
         _llama4_renamed),
)  # fmt: skip
