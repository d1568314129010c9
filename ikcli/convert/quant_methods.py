"""Find the quantized weights of a checkpoint, by the method that config.json names.

| quant_method | what is read | file |
|---|---|---|
| fp8, fbgemm_fp8, compressed-tensors (float-, int-, naive-quantized), modelopt | a weight times a scale | `scaled.py` |
| the same (nvfp4-, mxfp4-pack-quantized), quark, mxfp4; fp8 (experts of DeepSeek V4) | floats of 4 bits | `fp4.py` |
| compressed-tensors (pack-quantized), gptq, awq, auto-round | integers packed into words | `packed_int.py` |
| bitnet | matrices of -1, 0 and 1, and a number for each | `ternary.py` |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from ikcli.convert import ternary
from ikcli.convert.float8 import FLOAT8, Floats, Recent
from ikcli.convert.fp4 import Factors, Fp4, MxFp4Experts
from ikcli.convert.packed_int import Awq, Gptq, PackedRows
from ikcli.convert.scaled import Scaled
from ikcli.convert.source import CheckpointSource
from ikcli.errors import FormatError, UnsupportedError


class Logical(Protocol):
    """A weight that is dequantized when it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape, outermost dimension first."""
        ...

    def rows(self, first: int, last: int) -> Floats:
        """Return rows [first, last) of the weight as a matrix."""
        ...


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


def scales_of(name: str) -> list[str]:
    """Return the names that the scales of a weight may have: the third is Mistral's, the last that of DeepSeek V4."""
    names = [name + "_scale_inv", name + "_scale"]
    if ".experts." in name and not name.endswith(".weight"):
        names.append(name + "_weight_scale")
    if name.endswith(".weight"):
        names += [name.removesuffix("weight") + ending for ending in ("qscale_weight", "scale")]
    return names


def _scaled(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    """Find all 8-bit weights with a scale beside them."""
    there, block = set(source.names), _block(settings)
    for name in source.names:
        if source.dtype(name) not in (*FLOAT8, "I8"):
            continue
        scale = next((n for n in scales_of(name) if n in there), None)
        if scale is None:
            continue
        zero = name + "_zero_point" if name + "_zero_point" in there else None
        weight = Scaled(source, name, scale, zero, block)
        yield name, name, weight, [scale, *([zero] if zero else [])]


def _fp8(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    """Find 8-bit weights, and those of 4-bit floats among them: bytes with a power of two for 32 values of a row."""
    there, found = set(source.names), set()
    for name in source.names:
        if source.dtype(name) not in ("I8", "U8"):
            continue
        scale = next((n for n in scales_of(name) if n in there), None)
        if scale is None or source.dtype(scale) not in ("F8_E8M0", "U8"):
            continue
        stored = source.shape(name)
        if len(stored) > 1 and source.shape(scale) == (*stored[:-1], stored[-1] // 16) and stored[-1] % 16 == 0:
            found.add(name)
            yield name, name, Fp4(source, name, scale, None, None), [scale]
    for row in _scaled(source, settings):
        if row[0] not in found:
            yield row


def _four_bits(source: CheckpointSource) -> Found:
    """Find weights of 4-bit floats: bytes in `weight` (modelopt) or `weight_packed` (compressed-tensors).

    Experts in one tensor have a name without `.weight` (`gate_up_proj`), before which their scales have `_weight`.
    """
    there = set(source.names)
    for name in source.names:
        base = name.removesuffix("_packed")
        if source.dtype(name) != "U8" or not (base.endswith(".weight") or ".experts." in base):
            continue
        start = base if base.endswith(".weight") else base + "_weight"
        scale = start + "_scale"
        if scale not in there:
            continue
        times = start + "_scale_2" if start + "_scale_2" in there else None
        over = start + "_global_scale" if start + "_global_scale" in there else None
        parts = [part for part in (scale, times, over) if part]
        yield base, name, Fp4(source, name, scale, times, over, _inputs(source, start, there)), parts


def _inputs(source: CheckpointSource, weight: str, there: set[str]) -> Factors | None:
    """Return the factor of the activations that a weight is multiplied by, if the checkpoint has one."""
    base = weight.removesuffix("weight")
    for name, inverse in ((base + "input_scale", False), (base + "input_global_scale", True)):
        if name in there:
            return Factors(source, name, inverse)
    return None


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


def _auto_round(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    """Find what AutoRound wrote in the layout of GPTQ or AWQ."""
    layout = settings.get("packing_format")
    if layout in ("auto_round:auto_gptq", "auto_gptq"):
        return _gptq(source, settings)
    if layout in ("auto_round:auto_awq", "auto_awq"):
        return _awq(source, settings)
    if layout in ("auto_round:llm_compressor", "llm_compressor"):
        return _compressed_tensors(source, settings)
    raise UnsupportedError(
        f"quant_method 'auto-round': packing_format {layout!r} cannot be read (known: auto_round:auto_gptq, "
        "auto_round:auto_awq, auto_round:llm_compressor); export the model in one of these, or convert the original"
    )


def _awq(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    return _by_columns(source, settings, Awq)


def _mxfp4(source: CheckpointSource, settings: Mapping[str, Any]) -> Found:
    there, recent = set(source.names), Recent()
    for name in source.names:
        if name.endswith("_blocks") and name.removesuffix("_blocks") + "_scales" in there:
            base = name.removesuffix("_blocks")
            yield base, name, MxFp4Experts(source, name, base + "_scales", recent), [base + "_scales"]


METHODS: dict[str, Callable[[CheckpointSource, Mapping[str, Any]], Found]] = {
    "awq": _awq,
    "bitnet": ternary.find,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _scaled,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "modelopt_mixed": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _fp8,
    "quark": _modelopt,
    "auto-round": _auto_round,
}
