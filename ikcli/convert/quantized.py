"""Present a quantized checkpoint as a source of plain tensors, dequantized slab by slab when they are read.

The tensors of a checkpoint show which weights are quantized; the method tells how to read them (`quant_methods.py`).
All values are float32, under the logical name and with the shape and orientation of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ikcli.convert.float8 import FLOAT8
from ikcli.convert.quant_methods import METHODS, Logical, scales_of
from ikcli.convert.source import Array, CheckpointSource
from ikcli.errors import FormatError, UnsupportedError

# Tensors that runtimes of quantized models use besides weights; GGUF has no place for them.
_UNUSED = (
    "_input_scale",
    ".input_scale",
    ".input_scale_ub",
    ".input_global_scale",
    ".input_zero_point",
    ".input_amax",
    ".output_scale",
    ".activation_scale",
    "_activation_scale",
    ".qscale_act",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
)
_LEFT_OVER = (
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_shape",
    ".weight_zero_point",
    ".pre_quant_scale",
    "_blocks",
    "_scales",
    ".absmax",
    ".compressed",
    ".bitmask",
)


class Dequantized:
    """A source that presents quantized weights as tensors of type F32 under their logical names.

    Beside these it has tensors that `names` does not list. `packed` returns the name of the same weight as blocks of a
    GGUF type (which is its dtype, rows are bytes; a row is an output, as in GGUF), `factors` and `inputs` those of the
    numbers that multiply such blocks and scale their activations. The experts of gpt-oss are (expert, input, output)
    under their name, as in checkpoints without quantization, but (expert, output, input) when packed, with rows of gate
    and up alternating.
    """

    def __init__(self, source: CheckpointSource, made: Mapping[str, tuple[str, Logical]], dropped: set[str]) -> None:
        self._source = source
        self._made = {name: weight for name, (_, weight) in made.items()}
        self._beside: dict[str, Any] = {}
        for name, weight in self._made.items():
            rows = getattr(weight, "packed", None)
            if rows is not None:
                parts = {".blocks": rows} | {f".{part}": getattr(rows, part, None) for part in ("factors", "inputs")}
                self._beside |= {name + ending: part for ending, part in parts.items() if part is not None}
        self._types = {str(part.type) for name, part in self._beside.items() if name.endswith(".blocks")}
        places: dict[str, list[str]] = {}
        for name, (primary, _) in made.items():
            places.setdefault(primary, []).append(name)
        kept = (places.get(name, [name]) for name in source.names if name in places or name not in dropped)
        self._names = [name for names in kept for name in names]

    @property
    def names(self) -> Sequence[str]:
        """Return the logical names, in the order of the files."""
        return self._names

    def packed(self, name: str, types: Collection[str] = ("MXFP4",)) -> str | None:
        """Return the name under which a weight is read as blocks, bit for bit, or None if they are of another type."""
        rows = self._beside.get(name + ".blocks")
        return name + ".blocks" if rows is not None and rows.type in types else None

    def has_packed(self, types: Collection[str]) -> bool:
        """Return whether any weight can be read as blocks of these types."""
        return not self._types.isdisjoint(types)

    def factors(self, name: str) -> str | None:
        """Return the name of the factors of a weight's blocks (one, or one per matrix), or None."""
        return name + ".factors" if name + ".factors" in self._beside else None

    def inputs(self, name: str) -> str | None:
        """Return the name of the factors of the activations that meet a weight, or None."""
        return name + ".inputs" if name + ".inputs" in self._beside else None

    def made(self, name: str) -> bool:
        """Return whether the values of a tensor are dequantized."""
        return name in self._made

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the logical shape."""
        found = self._beside.get(name) or self._made.get(name)
        shape: tuple[int, ...] = self._source.shape(name) if found is None else found.shape
        return shape

    def dtype(self, name: str) -> str:
        """Return F32 for dequantized weights and factors, the GGUF type for blocks."""
        if name in self._beside:
            return str(getattr(self._beside[name], "type", "F32"))
        return "F32" if name in self._made else self._source.dtype(name)

    def read(self, name: str) -> Array:
        """Return all values."""
        if name not in self._made and name not in self._beside:
            return self._source.read(name)
        shape = self.shape(name)
        values = self.rows(name, 0, math.prod(shape[:-1]))
        return values.reshape(shape) if name in self._made else values.reshape(*shape[:-1], -1)

    def rows(self, name: str, first: int, last: int) -> Array:
        """Return rows [first, last) of the tensor as a matrix."""
        found = self._beside.get(name) or self._made.get(name)
        rows: Array = self._source.rows(name, first, last) if found is None else found.rows(first, last)
        return rows


def dequantized(source: CheckpointSource, config: Mapping[str, Any]) -> CheckpointSource:
    """Return the source itself, or one that dequantizes its weights.

    Raise an UnsupportedError that names the method and the key or tensor that is not understood, or a FormatError for
    one that does not fit.
    """
    settings = _settings(config)
    words = next((n for n in source.names if source.dtype(n) == "U32" and n.endswith(".weight")), None)
    if words is not None:
        raise UnsupportedError(
            f"tensor {words} is quantized by MLX, which cannot be read; convert the checkpoint that it was made from"
        )
    if settings is None and any(name.endswith(".weight_scale_2") for name in source.names):
        settings = {"quant_method": "modelopt"}  # its settings may be in a separate file
    if settings is None and config.get("architectures") == ["BitnetForCausalLM"]:
        settings = {"quant_method": "bitnet", "quantization_mode": "online"}
    if settings is None:
        tell = next(
            (n for n in source.names if source.dtype(n) in FLOAT8 or n.endswith((".qweight", ".weight_packed"))), None
        )
        if tell is None:
            return source
        raise UnsupportedError(
            f"tensor {tell} is quantized, but config.json has no quantization_config; copy the one of the checkpoint, "
            "or its hf_quant_config.json"
        )
    method = settings.get("quant_method", "modelopt" if "quant_algo" in settings else None)
    find = METHODS.get(method.lower() if isinstance(method, str) else "")
    if find is None:
        raise UnsupportedError(
            f"quantization_config: quant_method {method!r} cannot be read (known: {', '.join(METHODS)}); save "
            "the model without quantization first, or convert the checkpoint that it was made from"
        )
    made: dict[str, tuple[str, Logical]] = {}
    used: set[str] = set()
    for name, primary, weight, parts in find(source, settings):
        made[name] = (primary, weight)
        used.update((primary, *parts))
    names = [n for n in source.names if n not in used]
    dropped = used | {n for n in names if n.endswith(_UNUSED)}
    for name in names:
        bare = name.endswith(".weight") and source.dtype(name) in ("I8", "U8")
        if name not in dropped and (bare or name.endswith(_LEFT_OVER) or source.dtype(name) in FLOAT8):
            raise UnsupportedError(f"quant_method {method!r}: tensor {name} {_why(name, source)}")
    return Dequantized(source, made, dropped)


def _why(name: str, source: CheckpointSource) -> str:
    """Say what is wrong with a tensor that no method reads."""
    if source.dtype(name) in ("F8_E4M3", "F8_E5M2", "I8", "U8") and name.endswith(".weight"):
        there = set(source.names)
        found = next((n for n in scales_of(name) if n in there), None)
        if found is None:
            beside = [scale.removeprefix(name.removesuffix("weight")) for scale in scales_of(name)]
            return f"is of a kind that is not understood: it has no scale beside it (known: {', '.join(beside)})"
        return (
            f"is of a kind that is not understood: {source.dtype(name)} of {list(source.shape(name))} with the scale "
            f"{found}, {source.dtype(found)} of {list(source.shape(found))}"
        )
    return "is of a kind that is not understood"


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            found = place.get(key)
            if found is None:
                continue
            if not isinstance(found, dict):
                raise FormatError(f"config.json: {key} is not an object")
            inner = found.get("quantization_config")
            return inner if isinstance(inner, dict) else found
    return None
