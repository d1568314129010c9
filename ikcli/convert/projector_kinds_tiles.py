"""The kinds of projectors that read an image in tiles: Idefics 3 and SmolVLM, Llama 4, MiniCPM-V."""

from __future__ import annotations

import re
from typing import Any

from ikcli.convert.projector_kind import Kind, Made, Settings, same, share
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


# --- MiniCPM-V --------------------------------------------------------------------------------------------------------
_MINICPM = {("MiniCPMV", "2.5"): 2, ("MiniCPMV", "2.6"): 3, ("MiniCPMO", "2.6"): 4, ("MiniCPMV", "4.0"): 5,
            ("MiniCPMV", "4"): 5, ("MiniCPMV", "4.5"): 6}  # fmt: skip


def _minicpm_prepare(s: Settings) -> None:
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
             "patch_size": 14, **s.vision}  # fmt: skip
    if s.config.get("drop_vision_last_layer"):
        sizes["num_hidden_layers"] -= 1
    s.vision = {**sizes, "image_size": int(s.config.get("image_size", 448))}


def _minicpm_keys(s: Settings, out: dict[str, Any]) -> None:
    name, version = (s.config.get("architectures") or [""])[0], str(s.config.get("version", "2.5"))
    if (name, version) not in _MINICPM:
        known = ", ".join(f"{name} {number}" for name, number in _MINICPM)
        raise UnsupportedError(f"{s.directory / 'config.json'}: {name} of version {version}; known are {known}")
    out["clip.has_text_encoder"] = False
    out["clip.has_minicpmv_projector"] = True
    out["clip.projector_type"] = "resampler"
    out["clip.minicpmv_version"] = _MINICPM[name, version]
    out["clip.minicpmv_query_num"] = int(s.config.get("query_num", 64))
    out["clip.vision.attention.layer_norm_epsilon"] = 1e-6
    out["clip.use_gelu"] = True


def _minicpm_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if match := re.match(r"vpm\.encoder\.layers\.(\d+)\.", name):
        return None if int(match[1]) < s.number("num_hidden_layers") else []
    if name.startswith("vpm.head."):
        return []
    if match := re.fullmatch(r"resampler\.attn\.in_proj_(weight|bias)", name):
        return [(f"resampler.attn.{part}.{match[1]}", share(i, 3)) for i, part in enumerate("qkv")]
    if name.startswith("vpm.post_layernorm."):
        return [(name.replace("vpm.post_layernorm", "v.post_ln"), same)]
    if name == "resampler.proj":
        return [("resampler.proj.weight", lambda x: x.T)]
    fixed = {"attn.out_proj.": "attn.out.", "kv_proj.": "kv."}
    if name.startswith("resampler.pos_embed"):
        return []
    if name.startswith("resampler."):
        return [(next((name.replace(a, b) for a, b in fixed.items() if a in name), name), same)]
    return None


def _minicpm46_prepare(s: Settings) -> None:
    s.vision = {**s.vision, "image_size": int(s.processor.get("scale_resolution") or 448)}


def _minicpm46_keys(s: Settings, out: dict[str, Any]) -> None:
    if int(s.config.get("merger_times", 1)) != 1:
        raise UnsupportedError(f"{s.directory / 'config.json'}: key merger_times is not 1")
    out["clip.projector_type"] = "minicpmv4_6"
    out["clip.vision.projector.scale_factor"] = 2 if s.processor.get("downsample_mode") == "4x" else 4
    layer = s.config.get("insert_layer_id", s.vision.get("insert_layer_id", 6))
    out["clip.vision.wa_layer_indexes"] = [int(layer)]
    out["clip.use_gelu"] = True
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-6))


_MERGER = {"layer_norm1": "ln1", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
           "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_out", "pre_norm": "ds_ln",
           "linear_1": "ds_ffn_up", "linear_2": "ds_ffn_down"}  # fmt: skip
_LAST = {"pre_norm": "mm.input_norm", "linear_1": "mm.up", "linear_2": "mm.down"}


def _minicpm46_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    inner, _, kind = name.rpartition(".")
    if inner.startswith("vision_tower.vit_merger."):
        if s.processor.get("downsample_mode") == "4x":
            return []
        return [(f"v.vit_merger.{_MERGER[inner.removeprefix('vision_tower.vit_merger.')]}.{kind}", same)]
    if inner.startswith("merger.mlp.0."):
        return [(f"{_LAST[inner.removeprefix('merger.mlp.0.')]}.{kind}", same)]
    return None


KINDS = (
    Kind(("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), _idefics_keys, ("vision_model.",
         "vision_tower.", "connector."), renamed=lambda name: f"model.{name}", prepare=_idefics_prepare,
         f32=r"\.embeddings\."),
    Kind(("Llama4ForConditionalGeneration",), _llama4_keys, ("multi_modal_projector.", "vision_model."), _llama4_place,
         _llama4_renamed),
    Kind(("MiniCPMV4_6ForConditionalGeneration",), _minicpm46_keys, ("vision_tower.", "merger."), _minicpm46_place,
         lambda name: name.replace("vision_tower.", "vision_tower.vision_model.", 1), _minicpm46_prepare,
         f32=r"\.embeddings\.position"),
    Kind(("MiniCPMV", "MiniCPMO"), _minicpm_keys, ("vpm.", "resampler."), _minicpm_place, prepare=_minicpm_prepare,
         f32=r"\.embeddings\.position"),
)  # fmt: skip
