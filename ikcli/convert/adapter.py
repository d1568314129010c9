"""Convert a LoRA adapter of PEFT (adapter_config.json and adapter_model.safetensors) to a GGUF adapter.

The factors follow the rules that the base model's architecture has for its matrices: chosen or rearranged rows are
rows of b, columns are columns of a, and a transposed matrix swaps the two. GGUF has one alpha for all tensors, and
readers scale by alpha / rank; any other scale is multiplied into b.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.convert.archs import architecture_of
from ikcli.convert.build import Build, place_tensors
from ikcli.convert.config import Config
from ikcli.convert.float8 import read_floats
from ikcli.convert.json_files import read_json
from ikcli.convert.pieces import Constant, NewRows, TensorRows
from ikcli.convert.source import Array, SafetensorsSource
from ikcli.errors import FormatError, IkError, UnsupportedError, UsageError
from ikcli.gguf.constants import GGMLType, GGUFValueType
from ikcli.gguf.types import TYPES
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.encode import quantize
from ikcli.quant.output_check import check_output

Floats = npt.NDArray[np.float32]
Index = npt.NDArray[np.int64]

CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
FILE_TYPES = {
    "f32": (0, GGMLType.F32),
    "f16": (1, GGMLType.F16),
    "bf16": (32, GGMLType.BF16),
    "q8_0": (7, GGMLType.Q8_0),
}
"""Types of the factors: file type number and tensor type."""
_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+?)\.lora_(?P<part>[AB])(?:\.[^.]+)?\.weight")
# Initialisations that keep the base model unchanged; adapters with another one belong to a changed base.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of an update: left @ right is added to a matrix of the base model, in the checkpoint's shape."""

    left: Floats
    right: Floats


@dataclass(slots=True)
class PeftAdapter:
    """The contents of the GGUF file: keys, and a and b of every matrix with shape ([matrices,] rows, columns)."""

    metadata: dict[str, Any]
    tensors: dict[str, Floats]
    dtype: str
    paths: list[Path]


@dataclass(slots=True)
class _Shapes:
    """A source without values: only the shapes of the matrices that an adapter changes."""

    shapes: Mapping[str, tuple[int, ...]]
    names: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str) -> Array:
        raise UnsupportedError(f"{name}: an adapter has no values of the base model")

    def rows(self, name: str, first: int, last: int) -> Array:
        return self.read(name)


def open_adapter(directory: Path, base: Path | None = None) -> PeftAdapter:
    """Read an adapter; `base` is the directory of its base model, or its config.json.

    Raise an UnsupportedError that names the key of adapter_config.json which GGUF cannot express.
    """
    path = directory / CONFIG
    settings = read_json(path)
    _refuse(path, settings)
    weights = directory / _WEIGHTS
    if not weights.is_file():
        other = next((p.name for p in directory.glob("adapter_model*")), None)
        hint = f"; {other} is not read, save the adapter as safetensors" if other else ""
        raise IkError(f"{directory}: there is no {_WEIGHTS}{hint}")
    config = _base_config(path, settings, base)
    source = SafetensorsSource(directory, [weights])
    factors = {
        name: _Scaled(a, b, _scale(path, settings, name.removesuffix(".weight"), a.shape[0]))
        for name, (a, b) in _pairs(source, weights).items()
    }
    first = next(iter(factors.values()))
    alpha = first.scale * first.a.shape[0]
    architecture = architecture_of(config)
    turned = settings.get("fan_in_fan_out") is True
    stored = {name: f.stored(alpha, turned) for name, f in factors.items()}
    shapes = {name: (len(f.left), f.right.shape[1]) for name, f in stored.items()}
    m = Build(config, _Shapes(shapes), architecture.name)
    architecture.keys(m)
    place_tensors(m, architecture)
    tensors: dict[str, Floats] = {}
    for name, rows in m.tensors.items():
        if name.endswith(("attn_k_b.weight", "attn_v_b.weight")) and _whole_kv_b(name) in m.tensors:
            continue  # a part of attn_kv_b, which the file has as a whole
        a, b = _follow(rows, stored, directory)
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = a, b
    metadata = {
        "general.architecture": architecture.name,
        "general.type": "adapter",
        "general.name": directory.resolve().name,
        "adapter.type": "lora",
        "adapter.lora.alpha": Typed(float(alpha), GGUFValueType.FLOAT32),
    }
    return PeftAdapter(metadata, tensors, source.dtype(source.names[0]), [weights])


def write_adapter(adapter: PeftAdapter, output: Path, outtype: str) -> None:
    """Write the file. Rows whose length does not suit the type are written as F16."""
    number, wanted = FILE_TYPES[outtype]
    specs = []
    for name, values in adapter.tensors.items():
        fits = values.shape[-1] % TYPES[wanted].block_size == 0
        specs.append(NewTensor(name, values.shape[::-1], wanted if fits else GGMLType.F16))
    check_output([output], adapter.paths)
    output.parent.mkdir(parents=True, exist_ok=True)
    metadata = adapter.metadata | {"general.file_type": number, "general.quantization_version": 2}
    with GGUFWriter(output, metadata, specs) as writer:
        for spec in specs:
            writer.write_tensor(spec.name, quantize(np.ascontiguousarray(adapter.tensors[spec.name]), spec.type))


def _refuse(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuse settings that a GGUF adapter cannot express."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type is {kind!r}; GGUF has adapters of type LORA only")
    for key in ("use_dora", "use_qalora", "lora_bias", "modules_to_save", "target_parameters", "layer_replication",
                "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "corda_config"):  # fmt: skip
        if settings.get(key):
            raise UnsupportedError(
                f"{path}: {key} cannot be expressed in GGUF; merge the adapter into its base model instead"
            )
    if settings.get("bias", "none") != "none":
        raise UnsupportedError(
            f"{path}: bias {settings['bias']!r} cannot be expressed in GGUF; merge the adapter instead"
        )
    start = settings.get("init_lora_weights", True)
    if start not in _STARTS:
        raise UnsupportedError(
            f"{path}: init_lora_weights {start!r} changes the base model; save the adapter as one of the original model"
        )


def _base_config(path: Path, settings: Mapping[str, Any], base: Path | None) -> Config:
    named = settings.get("base_model_name_or_path")
    if base is None:
        local = Path(named) if isinstance(named, str) and named else None
        found = next((d for d in (local, path.parent) if d is not None and _has_config(d)), None)
        if found is None:
            raise UsageError(
                f"{path}: the base model {named!r} is not here; name its directory or its config.json with --base"
            )
        return Config(found)
    if base.is_file() and base.name != "config.json":
        raise UsageError(f"--base {base}: name the directory of the base model, or its config.json")
    return Config(base.parent if base.is_file() else base)


def _has_config(directory: Path) -> bool:
    try:
        return (directory / "config.json").is_file()
    except OSError:  # not a valid file name
        return False


def _pairs(source: SafetensorsSource, path: Path) -> dict[str, tuple[Floats, Floats]]:
    """Return a (rank, inputs) and b (outputs, rank) by the name of the base model's matrix."""
    parts: dict[str, dict[str, Floats]] = {}
    for name in source.names:
        if name.endswith(".base_layer.weight"):
            continue
        found = _NAME.fullmatch(name)
        if found is None:
            raise UnsupportedError(f"{path}: tensor {name} is neither a lora_A nor a lora_B of a matrix")
        values = read_floats(source, name)
        if values.ndim != 2 or not np.isfinite(values).all():
            raise FormatError(f"{path}: tensor {name} of shape {list(values.shape)} is not a matrix of finite numbers")
        parts.setdefault(found["module"] + ".weight", {})[found["part"]] = values
    out = {}
    for name, pair in parts.items():
        if len(pair) != 2:
            raise FormatError(f"{path}: {name} has only a lora_{next(iter(pair))}")
        a, b = pair["A"], pair["B"]
        if a.shape[0] != b.shape[1] or not a.shape[0]:
            raise FormatError(f"{path}: lora_A and lora_B of {name} have ranks {a.shape[0]} and {b.shape[1]}")
        out[name] = (a, b)
    if not out:
        raise FormatError(f"{path}: the adapter has no tensors")
    return out


def _scale(path: Path, settings: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of b @ a: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    alpha: Any = settings.get("lora_alpha")
    patterns = settings.get("alpha_pattern") or {}
    for key, value in patterns.items() if isinstance(patterns, dict) else ():
        try:
            matches = re.match(rf"(?:.*\.)?(?:{key})$", module)
        except re.error:
            raise FormatError(f"{path}: alpha_pattern {key!r} is not a regular expression") from None
        if matches:
            alpha = value
            break
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha) or not alpha:
        raise FormatError(f"{path}: lora_alpha is {alpha!r}; it should be a number other than 0")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") is True else rank)


@dataclass(frozen=True, slots=True)
class _Scaled:
    a: Floats
    b: Floats
    scale: float

    def stored(self, alpha: float, turned: bool) -> Factors:
        """Return the factors for the stored orientation of the matrix; readers scale them by alpha / rank."""
        factor = self.scale * self.a.shape[0] / alpha
        b = self.b if abs(factor - 1) < 1e-6 else self.b * np.float32(factor)
        return Factors(self.a.T, b.T) if turned else Factors(b, self.a)


def _whole_kv_b(name: str) -> str:
    return re.sub(r"attn_[kv]_b\.", "attn_kv_b.", name)


def _follow(rows: NewRows, stored: Mapping[str, Factors], directory: Path) -> tuple[Floats, Floats]:
    """Return a and b of a new tensor, derived from the pieces that it consists of."""
    if rows.value is not None or any(isinstance(piece, Constant) for piece in rows.pieces):
        raise UnsupportedError(
            f"{directory}: {rows.name} is computed from the base model, which an adapter cannot follow"
        )
    parts = [_piece(piece, stored, directory) for piece in rows.pieces]
    if len(rows.shape) == 2:
        if any(part.right is not parts[0].right and not np.array_equal(part.right, parts[0].right) for part in parts):
            raise UnsupportedError(
                f"{directory}: {rows.name} is made of several matrices, which an adapter cannot follow"
            )
        return parts[0].right, np.concatenate([part.left for part in parts])
    n_out, n_matrices = rows.shape[1], math.prod(rows.shape[2:])
    if len(parts) != n_matrices or any(len(part.left) != n_out for part in parts):
        raise UnsupportedError(f"{directory}: the adapter does not change all matrices of {rows.name} alike")
    if len({part.right.shape[0] for part in parts}) > 1:
        raise UnsupportedError(f"{directory}: matrices of {rows.name} have adapters of different rank")
    return np.stack([part.right for part in parts]), np.stack([part.left for part in parts])


def _piece(piece: Any, stored: Mapping[str, Factors], directory: Path) -> Factors:
    factors = stored[piece.name]
    if isinstance(piece, TensorRows):
        order = piece.order if piece.order is not None else np.arange(piece.first, piece.first + piece.n_rows)
        right = factors.right if piece.columns is None else factors.right[:, piece.columns]
        return Factors(factors.left[order], right)
    # apply the function to element numbers: the result shows where it moves each row and column
    width = factors.right.shape[1]
    numbers = np.arange(piece.first * width, piece.last * width, dtype=np.int64).reshape(-1, width)
    at_row, at_column = np.divmod(piece.make(numbers), width)
    if (at_row == at_row[:, :1]).all() and (at_column == at_column[:1]).all():
        return Factors(factors.left[at_row[:, 0]], factors.right[:, at_column[0]])
    if (at_row == at_row[:1]).all() and (at_column == at_column[:, :1]).all():
        return Factors(factors.right.T[at_column[:, 0]], factors.left.T[:, at_row[0]])
    raise UnsupportedError(f"{directory}: {piece.name} is rearranged in a way that an adapter cannot follow")
