"""Write the projector of a checkpoint (its vision tower and what leads to the text model) as an mmproj file.

Names, keys, types and order of tensors are those of convert_hf_to_gguf.py --mmproj. Most names come from the map of the
gguf package; a `Kind` has what differs: which tensors belong to it, how they are named and cut, and its keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.convert.json_files import read_json
from ikcli.convert.naming import describe, fill_name
from ikcli.convert.quantized import dequantized
from ikcli.convert.source import CheckpointSource, SafetensorsSource
from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.output_check import check_output
from ikcli.quant.quantizer import QUANTIZATION_VERSION

Values = npt.NDArray[Any]
Change = Callable[[Values], Values]
Made = tuple[str, Change]
"""A GGUF name, and what becomes of the values of the tensor."""

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}
_TYPES = {"f32": GGMLType.F32, "f16": GGMLType.F16, "bf16": GGMLType.BF16}
_BLOCKS = ("n_layers", "num_hidden_layers", "n_layer", "num_layers", "depth", "layers", "encoder_layers")


@dataclass(slots=True)
class Settings:
    """config.json, its vision part, and the settings of the image processor."""

    directory: Path
    config: dict[str, Any]
    vision: dict[str, Any]
    processor: dict[str, Any]

    def number(self, *names: str, default: Any = None) -> Any:
        """Return a value of the vision part; raise FormatError if it is missing."""
        found = next((self.vision[name] for name in names if self.vision.get(name) is not None), default)
        if found is None:
            raise FormatError(f"{self.directory / 'config.json'}: key vision_config.{names[0]} is missing")
        return found[0] if isinstance(found, list) else found

    @property
    def text(self) -> dict[str, Any]:
        """Return the keys of the text model."""
        found = [self.config[k] for k in ("text_config", "llm_config") if isinstance(self.config.get(k), dict)]
        return {**self.config, **(found[0] if found else {})}


def _same(x: Values) -> Values:
    return x


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of projector.

    `own`: prefixes of its tensors, without `model.`. `place` returns the tensors that one becomes, None where the map
    of gguf has its name. `renamed` gives the name to look up there. `f16` and `f32`: parts of names whose tensors keep
    that type in every file.
    """

    classes: tuple[str, ...]
    keys: Callable[[Settings, dict[str, Any]], None]
    own: tuple[str, ...]
    place: Callable[[Settings, str, tuple[int, ...]], list[Made] | None] = lambda s, name, shape: None
    renamed: Callable[[str], str] = lambda name: name
    prepare: Callable[[Settings], None] = lambda s: None
    f16: str = "$^"
    f32: str = "$^"
    extra: Callable[[Settings, str], list[Made] | None] = lambda s, name: None


def _part(of: int, count: int) -> Change:
    """Return a change that takes one of `count` equal parts of the rows."""

    def take(x: Values) -> Values:
        n = x.shape[0] // count
        return x[of * n : (of + 1) * n]

    return take


def _frames(name: str, shape: tuple[int, ...], directory: Path) -> list[Made]:
    """Cut a convolution over two frames into one per frame."""
    if len(shape) != 5 or shape[2] != 2:
        raise UnsupportedError(
            f"{directory}: tensor {name} has the shape {list(shape)}, not that of patches of two frames"
        )
    first, second = (lambda x: x[:, :, 0]), (lambda x: x[:, :, 1])
    return [("v.patch_embd.weight", first), ("v.patch_embd.weight.1", second)]


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
        return _frames(name, shape, s.directory)
    if ".qkv." not in name:
        return None
    return [(_looked_up(s, name.replace("qkv", part)), _part(i, 3)) for i, part in enumerate("qkv")]


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
    out["clip.vision.is_deepstack_layers"] = [i in deep for i in range(s.number(*_BLOCKS))]


def _qwen3_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if name == "visual.patch_embed.proj.weight":
        return _frames(name, shape, s.directory)
    if name == "visual.patch_embed.proj.bias":
        return [("v.patch_embd.bias", _same)]
    if match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
        layer = s.vision["deepstack_visual_indexes"][int(match[1])]
        return [(f"v.deepstack.{layer}.{match[2].removeprefix('linear_')}.{match[3]}", _same)]
    if match := re.fullmatch(r"visual\.merger\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
        return [(f"{({'norm': 'v.post_ln', 'linear_fc1': 'mm.0', 'linear_fc2': 'mm.2'})[match[1]]}.{match[2]}", _same)]
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
    if s.vision.get("model_type") != "pixtral":
        kind = s.vision.get("model_type")
        raise UnsupportedError(f"{s.directory}: a vision tower of type {kind} is not converted; known here is pixtral")
    out["clip.projector_type"] = "pixtral"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.vision.get("layer_norm_eps", 1e-5))
    out |= _activation(s)
    if "spatial_merge_size" in s.config:
        out["clip.vision.spatial_merge_size"] = int(s.config["spatial_merge_size"])


def _activation(s: Settings) -> dict[str, Any]:
    act = s.vision.get("hidden_act")
    if act not in ("silu", "gelu"):
        raise UnsupportedError(
            f"{s.directory / 'config.json'}: key vision_config.hidden_act is {act}, not silu or gelu"
        )
    return {f"clip.use_{act}": True}


def _pixtral_place(s: Settings, name: str, shape: tuple[int, ...]) -> list[Made] | None:
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return None
    n_head = s.number("num_attention_heads")

    def pairs(x: Values) -> Values:  # rotated pairs become adjacent
        return x.reshape(n_head, 2, x.shape[0] // n_head // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    return [(_looked_up(s, name), pairs)]


def _row_break(s: Settings, name: str) -> list[Made] | None:
    """Take the embedding of the token that ends a row of an image."""
    if not name.endswith("embed_tokens.weight"):
        return None
    token = _token_id(s.directory, "[IMG_BREAK]")
    return [("v.token_embd.img_break", lambda x: x[token])]


def _token_id(directory: Path, text: str) -> int:
    path = directory / "tokenizer_config.json"
    added = (read_json(path) if path.is_file() else {}).get("added_tokens_decoder") or {}
    for token, about in added.items():
        if about.get("content") == text:
            return int(token)
    path = directory / "tokenizer.json"
    for about in (read_json(path) if path.is_file() else {}).get("added_tokens") or ():
        if about.get("content") == text:
            return int(about["id"])
    raise FormatError(f"{directory}: neither tokenizer_config.json nor tokenizer.json has the token {text}")


def _intern_keys(s: Settings, out: dict[str, Any]) -> None:
    out["clip.projector_type"] = "internvl"
    out["clip.vision.attention.layer_norm_epsilon"] = float(s.number("layer_norm_eps"))
    out |= _activation(s)
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
    return [(_looked_up(s, _intern_renamed(one)), _part(i, 3)) for i, one in enumerate(names)]


KINDS = (
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
         ("multi_modal_projector.", "vision_tower."), _pixtral_place, extra=_row_break),
    Kind(("InternVLChatModel", "InternVisionModel", "InternVLForConditionalGeneration"), _intern_keys, ("vision_model.",
         "mlp1.", "vision_tower.", "multi_modal_projector."), _intern_place, _intern_renamed),
)  # fmt: skip


# --- a projector ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be written: the one it is made of, and how."""

    spec: NewTensor
    source: str
    change: Change


@dataclass(slots=True)
class Projector:
    """A projector that can be written. `dropped`: tensors of the text model and others that do not belong to it."""

    source: CheckpointSource
    metadata: dict[str, Any]
    tensors: list[_Tensor]
    stem: str
    paths: list[Path]
    dropped: list[str] = field(default_factory=list)

    def file_name(self, type_name: str) -> str:
        """Return a name such as `mmproj-Name-F16.gguf`."""
        return f"mmproj-{self.stem}-{type_name.upper()}.gguf"

    def write(self, output: Path) -> None:
        """Write the file; an existing one is replaced when it is whole."""
        check_output([output], self.paths)
        output.parent.mkdir(parents=True, exist_ok=True)
        with GGUFWriter(output, self.metadata, [t.spec for t in self.tensors]) as writer:
            for t in self.tensors:
                values = np.ascontiguousarray(t.change(_floats(self.source, t.source)))
                writer.write_tensor(t.spec.name, _as(values, t.spec.type))


def open_projector(directory: Path, outtype: str = "auto", model_name: str | None = None) -> Projector:
    """Open the projector of a checkpoint. Raise UnsupportedError if its kind is not known."""
    config = read_json(directory / "config.json")
    kind = _kind(directory, config)
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise FormatError(
            f"{directory / 'config.json'}: key vision_config is missing, so the model has no vision tower"
        )
    settings = Settings(directory, config, dict(vision), _processor(directory))
    kind.prepare(settings)
    files = SafetensorsSource(directory)
    source = dequantized(files, config)
    outtype = _auto(source) if outtype == "auto" else outtype
    if outtype not in FILE_TYPES:
        raise UsageError(
            f"--outtype {outtype}: projectors are written as f32, f16, bf16 or auto; then ik quantize FILE"
        )
    made: list[_Tensor] = []
    dropped = []
    for name in source.names:
        found = _place(kind, settings, name, source.shape(name))
        if not found:
            dropped.append(name)
        for target, change in found:
            shape = change(np.empty(source.shape(name), np.bool_)).shape
            type = _type(kind, name, target, len(shape), outtype)
            made.append(_Tensor(NewTensor(target, tuple(reversed(shape)), type), name, change))
    if not made:
        raise FormatError(f"{directory}: no tensor of a vision tower ({', '.join(kind.own)})")
    description = describe(directory, [(t.spec.name, t.spec.shape) for t in made], model_name)
    keys: dict[str, Any] = {"general.architecture": "clip", "general.type": "mmproj", **description.keys}
    keys |= {"general.file_type": FILE_TYPES[outtype], "clip.has_vision_encoder": True, **_sizes(settings)}
    kind.keys(settings, keys)
    keys["general.quantization_version"] = QUANTIZATION_VERSION
    stem = re.sub(r"-[0-9.]+[KMBT]$", "", description.stem)
    return Projector(source, keys, made, stem, files.paths, dropped)


def output_path(given: str | None, directory: Path, projector: Projector, type_name: str) -> Path:
    """Return where a projector goes: a file, or its usual name in a folder."""
    path = Path(given) if given is not None else directory
    return path / projector.file_name(type_name) if path.is_dir() else path.with_name(fill_name(path.name, type_name))


def type_of(projector: Projector) -> str:
    """Return the name of the file type."""
    return next(name for name, number in FILE_TYPES.items() if number == projector.metadata["general.file_type"])


def _kind(directory: Path, config: dict[str, Any]) -> Kind:
    inner = config.get("vision_config")
    names = [
        *(inner.get("architectures") or () if isinstance(inner, dict) else ()),
        *(config.get("architectures") or ()),
    ]
    for name in names:
        for kind in KINDS:
            if name in kind.classes:
                return kind
    known = ", ".join(kind.classes[0] for kind in KINDS)
    what = ", ".join(map(str, names)) or "this model"
    raise UnsupportedError(f"{directory}: the projector of {what} is not converted; known are those of {known}")


def _processor(directory: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, inner in (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor")):
        path = directory / name
        found = read_json(path) if path.is_file() else {}
        out |= {**found, **(found.get(inner) or {})}
    for key in ("image_mean", "image_std"):
        if not isinstance(out.get(key), list) or len(out[key]) != 3:
            raise FormatError(f"{directory}: preprocessor_config.json has no {key} of three numbers")
    return out


def _sizes(s: Settings) -> dict[str, Any]:
    width = s.text.get("hidden_size", s.text.get("n_embd"))
    if not isinstance(width, int):
        raise FormatError(f"{s.directory / 'config.json'}: key hidden_size of the text model is missing")
    return {
        "clip.vision.projection_dim": width,
        "clip.vision.image_size": int(s.number("image_size")),
        "clip.vision.patch_size": int(s.number("patch_size")),
        "clip.vision.embedding_length": int(s.number("hidden_size", "width")),
        "clip.vision.feed_forward_length": int(s.number("intermediate_size")),
        "clip.vision.block_count": int(s.number(*_BLOCKS)),
        "clip.vision.attention.head_count": int(s.number("num_attention_heads", "num_heads", "heads")),
        "clip.vision.image_mean": [float(x) for x in s.processor["image_mean"]],
        "clip.vision.image_std": [float(x) for x in s.processor["image_std"]],
    }


def _place(kind: Kind, s: Settings, name: str, shape: tuple[int, ...]) -> Sequence[Made]:
    """Return the tensors that one of the checkpoint becomes; none if it does not belong to the projector."""
    extra = kind.extra(s, name)
    if extra is not None:
        return extra
    bare = name.removeprefix("model.")
    if not bare.startswith(kind.own):
        return ()
    found = kind.place(s, bare, shape)
    return [(_looked_up(s, kind.renamed(bare)), _same)] if found is None else found


def _looked_up(s: Settings, name: str) -> str:
    """Return the name that gguf has for a tensor; raise UnsupportedError if it has none."""
    import gguf

    n_blocks = max(int(s.number(*_BLOCKS)), 4)  # the map has the layers of a projector as blocks, too
    found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, n_blocks).get_name(name, (".weight", ".bias"))
    if found is None:
        raise UnsupportedError(f"{s.directory}: tensor {name} has no place in a projector")
    return found


def _type(kind: Kind, name: str, target: str, n_dims: int, outtype: str) -> GGMLType:
    if n_dims <= 1 or target.endswith("_norm.weight"):
        return GGMLType.F32
    if re.search(kind.f16, target) or re.search(kind.f16, name):
        return GGMLType.F16
    if re.search(kind.f32, name) or "position_embd" in target:
        return GGMLType.F32
    if ".patch_embd.weight" in target or ".patch_merger.weight" in target:
        return GGMLType.F16 if outtype == "f16" else GGMLType.F32
    return _TYPES[outtype] if target.endswith(".weight") else GGMLType.F32


def _auto(source: CheckpointSource) -> str:
    """Return the type of the first matrix; float32 checkpoints become f16."""
    matrix = next((name for name in source.names if len(source.shape(name)) > 1), None)
    return "bf16" if matrix is not None and source.dtype(matrix) == "BF16" else "f16"


def _floats(source: CheckpointSource, name: str) -> Values:
    """Return the values of a tensor as float32, or float16 where the checkpoint has that."""
    values, dtype = source.read(name), source.dtype(name)
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F16", "F32"):
        return values
    raise UnsupportedError(f"tensor {name} is of type {dtype}, which a projector is not converted from")


def _as(values: Values, type: GGMLType) -> npt.NDArray[np.uint8]:
    """Return the bytes of values in a float type, rounded to the nearest."""
    if type == GGMLType.BF16:
        bits = values.astype(np.float32).view(np.uint32)
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        found: Values = np.where(nan, (bits >> 16) | 64, rounded).astype(np.uint16)
    else:
        found = values.astype(np.float16 if type == GGMLType.F16 else np.float32)
    return np.ascontiguousarray(found).reshape(-1).view(np.uint8)
