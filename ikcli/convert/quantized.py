"""Present a quantized checkpoint as a source of plain tensors, dequantized slab by slab when they are read.

| quant_method | what is read | file |
|---|---|---|
| fp8, fbgemm_fp8, compressed-tensors (float-, int-, naive-quantized), modelopt | a weight times a scale | `scaled.py` |
| modelopt, compressed-tensors (nvfp4-, mxfp4-pack-quantized), mxfp4 | floats of 4 bits in blocks | `fp4.py` |
| compressed-tensors (pack-quantized), gptq, awq | integers packed into words | `packed_int.py` |
| bitnet | matrices of -1, 0 and 1, and a number for each | `ternary.py` |

The tensors of a checkpoint show which weights are quantized; the method tells how to read them. All values are
float32, under the logical name and with the shape and orientation of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ikcli.convert import ternary
from ikcli.convert.float8 import FLOAT8, Floats, Recent
from ikcli.convert.fp4 import Fp4, MxFp4Experts, MxFp4Rows
from ikcli.convert.packed_int import Awq, Gptq, PackedRows
from ikcli.convert.scaled import Scaled
from ikcli.convert.source import Array, CheckpointSource
from ikcli.errors import FormatError, UnsupportedError

PACKED = ".mxfp4"
"""Endings of the names of quantized bits."""

# Tensors that runtimes of quantized models use besides weights; GGUF has no place for them.
_UNUSED = (
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


class Logical(Protocol):
    """A weight that is dequantized when it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape, outermost dimension first."""
        ...

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight as a matrix."""
        ...


class Dequantized:
    """A source that presents quantized weights as tensors of type F32 under their logical names.

    `packed(name)` returns the name of a tensor of this source, not listed in `names`, that holds the same weight as
    GGUF's MXFP4 blocks (dtype MXFP4, rows of uint8; rows are outputs, as in GGUF), or None. The experts of gpt-oss are
    (expert, input, output) under their name, as in checkpoints without quantization, but (expert, output, input) when
    packed, with rows of gate and up alternating.
    """

    def __init__(self, source: CheckpointSource, made: Mapping[str, tuple[str, Logical]], dropped: set[str]) -> None:
        self._source = source
        self._made = {name: weight for name, (_, weight) in made.items()}
        self._packed: dict[str, MxFp4Rows] = {}
        for name, weight in self._made.items():
            rows = getattr(weight, "packed", None)
            if rows is not None:
                self._packed[name + PACKED] = rows
        places: dict[str, list[str]] = {}
        for name, (primary, _) in made.items():
            places.setdefault(primary, []).append(name)
        kept = (places.get(name, [name]) for name in source.names if name in places or name not in dropped)
        self._names = [name for names in kept for name in names]

    @property
    def names(self) -> Sequence[str]:
        """Return the logical names, in the order of the files."""
        return self._names

    def packed(self, name: str) -> str | None:
        """Return the name under which a weight is read as MXFP4 blocks, bit for bit, or None if it is not MXFP4."""
        return name + PACKED if name + PACKED in self._packed else None

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the logical shape."""
        found = self._packed.get(name) or self._made.get(name)
        return self._source.shape(name) if found is None else found.shape

    def dtype(self, name: str) -> str:
        """Return F32 for dequantized weights, MXFP4 for names from `packed`."""
        return "MXFP4" if name in self._packed else "F32" if name in self._made else self._source.dtype(name)

    def read(self, name: str) -> Array:
        """Return all values."""
        if name not in self._made:
            return self._source.read(name)
        weight = self._made[name]
        return weight.rows(0, math.prod(weight.shape[:-1])).reshape(weight.shape)

    def rows(self, name: str, first: int, last: int) -> Array:
        """Return rows [first, last) of the tensor as a matrix."""
        if name in self._packed:
            return self._packed[name].rows(first, last)
        return self._made[name].rows(first, last) if name in self._made else self._source.rows(name, first, last)


def dequantized(source: CheckpointSource, config: Mapping[str, Any]) -> CheckpointSource:
    """Return the source itself, or one that dequantizes its weights.

    Raise an UnsupportedError that names the method and the key or tensor that is not understood, or a FormatError for
    one that does not fit.
    """
    settings = _settings(config)
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
            f"tensor {tell} is quantized, but config.json has no quantization_config; copy the one of the checkpoint"
        )
    method = settings.get("quant_method", "modelopt" if "quant_algo" in settings else None)
    find = _METHODS.get(method.lower() if isinstance(method, str) else "")
    if find is None:
        raise UnsupportedError(
            f"quantization_config: quant_method {method!r} cannot be read (known: {', '.join(sorted(_METHODS))}); save "
            "the model without quantization first"
        )
    made: dict[str, tuple[str, Logical]] = {}
    used: set[str] = set()
    for name, primary, weight, parts in find(source, settings):
        made[name] = (primary, weight)
        used.update((primary, *parts))
    names = [n for n in source.names if n not in used]
    dropped = used | {n for n in names if n.endswith(_UNUSED)}
    for name in names:
        if name not in dropped and (name.endswith(_LEFT_OVER) or source.dtype(name) in FLOAT8):
            raise UnsupportedError(f"quant_method {method!r}: tensor {name} is of a kind that is not understood")
    return Dequantized(source, made, dropped)


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


Found = Iterator[tuple[str, str, Logical, Sequence[str]]]
"""Logical name, the tensor whose place it takes, the weight, and other tensors that belong to it."""


def _block(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    groups = [_weights_of(group) for group in _groups(settings)]
    values = [settings.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
    for value in values:
        if value is None:
            continue
        if isinstance(value, str):
            value = value.lower().split("x")
        try:
            block = tuple(int(n) for n in value)
        except (TypeError, ValueError):
            block = ()
        if len(block) != 2 or min(block) < 1:
            raise UnsupportedError(f"quantization_config: a block of {value!r} is not understood")
        return block
    return None


def _groups(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise FormatError("quantization_config: config_groups does not map names to groups")
    return list(groups.values())


def _weights_of(group: Mapping[str, Any]) -> Mapping[str, Any]:
    weights = group.get("weights")
    return weights if isinstance(weights, dict) else {}


def _scaled(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    """Find all 8-bit weights with a scale beside them."""
    there, block = set(source.names), _block(settings)
    for name in source.names:
        if source.dtype(name) not in (*FLOAT8, "I8"):
            continue
        beside = [name + "_scale_inv", name + "_scale"]
        if name.endswith(".weight"):
            beside.append(name.removesuffix("weight") + "qscale_weight")
        scale = next((n for n in beside if n in there), None)
        if scale is None:
            continue
        zero = name + "_zero_point" if name + "_zero_point" in there else None
        weight = Scaled(source, name, scale, zero, block)
        yield name, name, weight, [scale, *([zero] if zero else [])]


def _four_bits(source: CheckpointSource) -> Found:
    """Find weights of 4-bit floats: bytes in `weight` (modelopt) or `weight_packed` (compressed-tensors)."""
    there = set(source.names)
    for name in source.names:
        if source.dtype(name) != "U8" or not name.endswith((".weight", ".weight_packed")):
            continue
        base = name.removesuffix("_packed")
        scale = base + "_scale"
        if scale not in there:
            continue
        times = base + "_scale_2" if base + "_scale_2" in there else None
        over = base + "_global_scale" if base + "_global_scale" in there else None
        parts = [part for part in (scale, times, over) if part]
        yield base, name, Fp4(source, name, scale, times, over), parts


def _modelopt(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    yield from _four_bits(source)
    yield from _scaled(source, settings)


def _compressed_tensors(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise UnsupportedError(
            f"quant_method 'compressed-tensors': sparsity_config format {sparsity['format']!r} is not read"
        )
    if (settings.get("transform_config") or {}) != {}:
        raise UnsupportedError("quant_method 'compressed-tensors': transform_config is not read")
    bits = {n for group in _groups(settings) if isinstance(n := _weights_of(group).get("num_bits"), int)}
    there, recent = set(source.names), Recent()
    for name in source.names:
        if not name.endswith(".weight_packed") or source.dtype(name) != "I32":
            continue
        base = name.removesuffix("_packed")
        optional = {key: base + key for key in ("_zero_point", "_g_idx", "_shape") if base + key in there}
        if base + "_scale" not in there or "_shape" not in optional:
            raise FormatError(f"tensor {name} has no {base}_scale or {base}_shape beside it")
        shape, zero, g_idx = (optional.get(key) for key in ("_shape", "_zero_point", "_g_idx"))
        weight = PackedRows(source, name, base + "_scale", str(shape), zero, g_idx, bits, recent)
        yield base, name, weight, [base + "_scale", *optional.values()]
    yield from _four_bits(source)
    yield from _scaled(source, settings)


def _by_columns(source: CheckpointSource, settings: Mapping[str, Any], make: type[Gptq] | type[Awq]) -> Found:
    there, recent = set(source.names), Recent()
    for name in source.names:
        if not name.endswith(".qweight"):
            continue
        base = name.removesuffix("qweight")
        parts = {key: base + key for key in ("qzeros", "scales", "g_idx") if base + key in there}
        if "scales" not in parts or "qzeros" not in parts:
            raise FormatError(f"tensor {name} has no {base}scales or {base}qzeros beside it")
        yield base + "weight", name, make(source, name, parts, settings, recent), list(parts.values())


def _gptq(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    return _by_columns(source, settings, Gptq)


def _awq(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    return _by_columns(source, settings, Awq)


def _mxfp4(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    there, recent = set(source.names), Recent()
    for name in source.names:
        if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in there:
            base = name.removesuffix("_blocks")
            yield base, name, MxFp4Experts(source, name, base + "_scales", recent), [base + "_scales"]


_METHODS: dict[str, Callable[[CheckpointSource, Mapping[str, Any]], Found]] = {
    "awq": _awq,
    "bitnet": ternary.find,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _scaled,
    "fp8": _scaled,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}
