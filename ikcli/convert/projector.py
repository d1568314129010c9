"""Write the projector of a checkpoint (its vision tower and what leads to the text model) as an mmproj file.

Names, keys, types and order of tensors are those of convert_hf_to_gguf.py --mmproj. Most names come from the map of the
gguf package; a `Kind` has what differs: which tensors belong to it, how they are named and cut, and its keys.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.convert.json_files import read_json
from ikcli.convert.naming import describe, fill_name
from ikcli.convert.projector_kind import BLOCKS, Change, Kind, Made, Settings, Values, looked_up, same
from ikcli.convert.projector_kinds import KINDS as KINDS_OF_ONE_TILE
from ikcli.convert.projector_kinds_grids import KINDS as KINDS_OF_GRIDS
from ikcli.convert.projector_kinds_squares import KINDS as KINDS_OF_SQUARES
from ikcli.convert.projector_kinds_tiles import KINDS as KINDS_OF_TILES
from ikcli.convert.quantized import dequantized
from ikcli.convert.source import CheckpointSource, SafetensorsSource
from ikcli.errors import FormatError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.output_check import check_output
from ikcli.quant.quantizer import QUANTIZATION_VERSION

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}
KINDS = (*KINDS_OF_ONE_TILE, *KINDS_OF_GRIDS, *KINDS_OF_SQUARES, *KINDS_OF_TILES)
_TYPES = {"f32": GGMLType.F32, "f16": GGMLType.F16, "bf16": GGMLType.BF16}


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
    settings = Settings(directory, config, dict(vision), _processor(directory, kind))
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
    tower = inner.get("model_type") if isinstance(inner, dict) else None
    for name in names:
        for kind in KINDS:
            if name in kind.classes and (not kind.towers or tower in kind.towers):
                return kind
    if towers := [tower for kind in KINDS if set(names) & set(kind.classes) for tower in kind.towers]:
        raise UnsupportedError(
            f"{directory}: a vision tower of type {tower} is not converted; known here are {', '.join(towers)}"
        )
    known = ", ".join(kind.classes[0] for kind in KINDS)
    what = ", ".join(map(str, names)) or "this model"
    raise UnsupportedError(f"{directory}: the projector of {what} is not converted; known are those of {known}")


def _processor(directory: Path, kind: Kind) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, inner in (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor")):
        path = directory / name
        found = read_json(path) if path.is_file() else {}
        out |= {**found, **(found.get(inner) or {})}
    for i, key in enumerate(("mean", "std")):  # MiniCPM-V has other names
        colours = out.get(f"norm_{key}") if kind.colours is None else list(kind.colours[i])
        out.setdefault(f"image_{key}", colours)
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
        "clip.vision.block_count": int(s.number(*BLOCKS)),
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
    return [(looked_up(s, kind.renamed(bare)), same)] if found is None else found


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
