"""The kinds of projectors that read an image at any size: GLM-4.1V and its kind, Kimi-VL, Kimi K2.5, LFM2-VL,
dots.ocr, PaddleOCR-VL, MiniMax-M3, Muse Glimmer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ikcli.convert.projector_kind import Change, Kind, Made, Settings, Values, frames, looked_up, same, share
from ikcli.errors import FormatError


# --- GLM-4V -----------------------------------------------------------------------------------------------------------
def _glm_prepare(s: Settings) -> None:
    s.vision = {"image_size": 336, "patch_size": 14, **s.vision}


def _glm_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "glm4v"
    act = str(s.vision.get("hidden_act", "")).lower()
    if act in ("gelu", "silu"):
        out[f"clip.use_{act}"] = True
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("rms_norm_eps", 1e-5))


def _glm_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name == "visual.patch_embed.proj.weight":
        return frames(name, shape, s.directory)
    return None


# --- Kimi -------------------------------------------------------------------------------------------------------------
def _kimi_prepare(s: Settings) -> None:
    s.vision = {**s.vision, "image_size": 64 * 14}  # programs want the key


def _kimi_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "kimivl"
    out["clip.use_gelu"] = True
    out["clip.vision.projector.scale_factor"] = 2
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-5))


def _kimi_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name.endswith("pos_emb.weight"):
        return [(looked_up(s, name), lambda x: x.reshape(-1, x.shape[-1]))]
    if "wqkv" not in name:
        return None
    return [(looked_up(s, name.replace("wqkv", f"w{part}")), share(i, 3)) for i, part in enumerate("qkv")]


def _k25_prepare(s: Settings) -> None:
    found = {key.removeprefix("vt_"): value for key, value in s.vision.items()}
    patch = int(found.get("patch_size", 14))
    s.vision = {**found, "patch_size": patch, "image_size": int(found.get("init_pos_emb_height", 64)) * patch}


def _k25_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "kimik25"
    for axis, default in (("height", 64), ("width", 64), ("time", 4)):
        out[f"vision.pos_emb_{axis}"] = int(s.vision.get(f"init_pos_emb_{axis}", default))
    out["clip.use_gelu"] = s.vision.get("projector_hidden_act", "gelu") == "gelu"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("projector_ln_eps", 1e-5))
    merge = s.vision.get("merge_kernel_size") or [2, 2]
    out["clip.vision.projector.scale_factor"] = int(merge[0])
    area = int(s.vision["patch_size"]) ** 2
    out["clip.vision.image_min_pixels"] = 8 * area
    out["clip.vision.image_max_pixels"] = int(s.processor.get("in_patch_limit", 16384)) * area


def _k25_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name.endswith("pos_emb.time_weight"):
        return [(looked_up(s, name), lambda x: x.reshape(x.shape[0], -1))]
    if "wqkv" in name:
        return [(looked_up(s, name), _columns_first(s.number("num_attention_heads", default=16)))]
    return None


def _columns_first(n_head: int) -> Change:
    """Return a change that puts the pairs which columns rotate before those of rows, in queries and keys."""

    def change(x: Values) -> Values:
        parts = np.split(x, 3)
        n = parts[0].shape[0] // n_head // 4
        for i in (0, 1):
            heads = parts[i].reshape(n_head, n, 2, 2, *x.shape[1:]).swapaxes(1, 2)
            parts[i] = heads.reshape(parts[i].shape)
        return np.concatenate(parts)

    return change


def _k25_renamed(name: str) -> str:
    return name.replace(".proj.0.", ".proj.linear_1.").replace(".proj.2.", ".proj.linear_2.")


# --- LFM2-VL ----------------------------------------------------------------------------------------------------------
def _lfm2_prepare(s: Settings) -> None:
    layer = int(s.config.get("vision_feature_layer", -1))
    n_layer = s.number("num_hidden_layers") + min(layer + 1, 0)
    s.vision = {**s.vision, "image_size": 256, "num_hidden_layers": n_layer}


def _lfm2_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "lfm2"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.number("layer_norm_eps", default=1e-6))
    out["clip.vision.projector.scale_factor"] = int(s.config.get("downsample_factor", 2))
    out["clip.use_gelu"] = True


def _lfm2_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    name = _lfm2_renamed(name)
    if ".vision_model.head." in name:
        return []
    if name.endswith("patch_embedding.weight") and len(shape) == 2:
        return [(looked_up(s, name), _channels_first(int(s.number("patch_size"))))]
    match = name.split(".encoder.layers.")
    if len(match) == 2 and int(match[1].split(".")[0]) >= s.number("num_hidden_layers"):
        return []
    return None


def _lfm2_renamed(name: str) -> str:
    if name.startswith("vision_tower.") and ".vision_model." not in name:
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name


def _channels_first(side: int) -> Callable[[Values], Values]:
    """Return a change of patches stored by row, column and channel."""
    return lambda x: np.ascontiguousarray(x.reshape(x.shape[0], side, side, 3).transpose(0, 3, 1, 2))


# --- dots.ocr ---------------------------------------------------------------------------------------------------------
def _dots_prepare(s: Settings) -> None:
    s.vision = {**s.vision, "hidden_size": s.number("embed_dim", "hidden_size"), "image_size": 0}


def _dots_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "dots_ocr"
    for end in ("min", "max"):
        if f"{end}_pixels" not in s.processor:
            raise FormatError(f"{s.directory / 'preprocessor_config.json'}: key {end}_pixels is missing")
        out[f"clip.vision.image_{end}_pixels"] = int(s.processor[f"{end}_pixels"])
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.number("rms_norm_eps", default=1e-5))
    out["clip.vision.projector.scale_factor"] = int(s.number("spatial_merge_size", default=2))
    out["clip.use_silu"] = True


def _dots_renamed(name: str) -> str:
    if ".mlp.fc" not in name:
        return name
    name = name.replace("vision_tower.blocks.", "visual.blocks.")
    return name.replace(".fc1.", ".gate_proj.").replace(".fc2.", ".down_proj.").replace(".fc3.", ".up_proj.")


# --- PaddleOCR-VL -----------------------------------------------------------------------------------------------------
def _paddle_pixels(s: Settings, end: str, edge: str) -> int:
    found = s.processor.get(f"{end}_pixels") or (s.processor.get("size") or {}).get(edge)
    if not isinstance(found, int):
        raise FormatError(f"{s.directory / 'preprocessor_config.json'}: key {end}_pixels is missing")
    return found


def _paddle_prepare(s: Settings) -> None:
    s.vision = {**s.vision, "image_size": int(_paddle_pixels(s, "max", "longest_edge") ** 0.5)}


def _paddle_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "paddleocr"
    out["clip.vision.image_max_pixels"] = _paddle_pixels(s, "max", "longest_edge")
    out["clip.vision.image_min_pixels"] = _paddle_pixels(s, "min", "shortest_edge")
    out["clip.use_gelu"] = True
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.number("rms_norm_eps", "layer_norm_eps", default=1e-6))


def _paddle_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    return [] if "packing_position_embedding" in name or ".vision_model.head." in name else None


def _paddle_renamed(name: str) -> str:
    name = name.replace("visual.vision_model.", "vision_tower.vision_model.")
    return f"mlp_AR.{name.removeprefix('projector.')}" if name.startswith("projector.") else name


# --- MiniMax M3 -------------------------------------------------------------------------------------------------------
def _minimax_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "minimax_m3"
    out["clip.use_gelu"] = True
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-5))
    merge = (s.vision.get("img_token_compression_config") or {}).get("spatial_merge_size")
    out["clip.vision.spatial_merge_size"] = int(merge or s.vision.get("spatial_merge_size") or 2)


def _minimax_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name == "vision_tower.vision_model.embeddings.patch_embedding.weight":
        return frames(name, shape, s.directory)
    if found := re.fullmatch(r"patch_merge_mlp\.linear_([12])\.(weight|bias)", name):
        return [(f"mm.merger.fc{found[1]}.{found[2]}", same)]
    if ".q_proj." in name or ".k_proj." in name:
        return [(looked_up(s, name), _by_axis(int(s.number("num_attention_heads"))))]
    return None


def _by_axis(n_head: int) -> Change:
    """Put the columns of heads that one axis rotates side by side; the checkpoint has halves of all axes in turn."""

    def change(x: Values) -> Values:
        heads = x.reshape(n_head, -1, *x.shape[1:])
        d = heads.shape[1]
        n = d // 3 // 2
        order = np.arange(6 * n).reshape(2, 3, n).transpose(1, 0, 2).reshape(-1)
        return heads[:, [*order, *range(6 * n, d)]].reshape(x.shape)

    return change


# --- Muse Glimmer -----------------------------------------------------------------------------------------------------
def _muse_prepare(s: Settings) -> None:
    side = int(s.number("pos_emb_height", default=32)) * int(s.number("patch_size"))
    s.vision = {**s.vision, "image_size": side * int(s.number("merge_size", default=2))}


def _muse_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "muse-glimmer"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-5))
    out["clip.vision.spatial_merge_size"] = int(s.number("merge_size", default=2))


_MUSE = {"attn.q_proj": "attn_q", "attn.k_proj": "attn_k", "attn.v_proj": "attn_v", "attn.proj": "attn_out",
         "norm1": "ln1", "norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}  # fmt: skip
_MUSE_OUTSIDE = {"vision_tower.patch_embedder.position_embedding_table": "v.position_embd",
                 "vision_tower.ln_pre": "v.pre_ln", "vision_tower.ln_post": "v.post_ln",
                 "vision_adapter.fc1": "mm.0", "vision_adapter.fc2": "mm.1", "vision_projection": "mm.2"}  # fmt: skip


def _muse_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    inner, _, kind = name.rpartition(".")
    if inner == "vision_tower.patch_embedder.patch_embedding":
        patch = int(s.number("patch_size"))
        return [("v.patch_embd.weight", lambda x: x.reshape(len(x), -1, 3, patch, patch).sum(axis=1, dtype=x.dtype))]
    if inner in _MUSE_OUTSIDE:
        return [(f"{_MUSE_OUTSIDE[inner]}.{kind}", same)]
    found = re.fullmatch(r"vision_tower\.layers\.(\d+)\.(.+)", inner)
    if found is None or found[2] not in _MUSE:
        return None
    rotated = found[2] in ("attn.q_proj", "attn.k_proj")
    change = _in_pairs(int(s.number("num_attention_heads"))) if rotated else same
    return [(f"v.blk.{found[1]}.{_MUSE[found[2]]}.{kind}", change)]


def _in_pairs(n_head: int) -> Change:
    """Put the two columns of a rotated pair side by side; the checkpoint has them half a head apart."""
    return lambda x: x.reshape(n_head, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


KINDS = (
    Kind(("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "Glm46VForConditionalGeneration",
          "GlmOcrForConditionalGeneration"), _glm_keys, ("visual.",), _glm_place, prepare=_glm_prepare),
    Kind(("KimiVLForConditionalGeneration",), _kimi_keys, ("vision_tower.", "multi_modal_projector."), _kimi_place,
         prepare=_kimi_prepare),
    Kind(("KimiK25ForConditionalGeneration",), _k25_keys, ("vision_tower.", "mm_projector."), _k25_place, _k25_renamed,
         _k25_prepare),
    Kind(("Lfm2VlForConditionalGeneration",), _lfm2_keys, ("vision_tower.", "multi_modal_projector."), _lfm2_place,
         _lfm2_renamed, _lfm2_prepare),
    Kind(("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForConditionalGeneration"), _minimax_keys,
         ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp."), _minimax_place),
    Kind(("MuseGlimmerForConditionalGeneration",), _muse_keys, ("vision_tower.", "vision_adapter.",
         "vision_projection."), _muse_place, prepare=_muse_prepare),
    Kind(("DotsOCRForCausalLM",), _dots_keys, ("vision_tower.",), renamed=_dots_renamed, prepare=_dots_prepare),
    Kind(("PaddleOCRVLForConditionalGeneration", "PaddleOCRVisionModel"), _paddle_keys,
         ("visual.", "mlp_AR.", "projector."), _paddle_place, _paddle_renamed, _paddle_prepare),
)  # fmt: skip
