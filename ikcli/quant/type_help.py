"""Describe each TYPE of `ik quantize` in one line, in the words that users of the reference look for."""

from __future__ import annotations

from ikcli.gguf.constants import FILE_TYPES, FileType, GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.recipe_rules import NEEDS_IMATRIX

MIXES = {
    "Q2_K": 2.94, "Q3_K_M": 3.87, "Q3_K_L": 4.24, "Q4_K_M": 4.82, "Q5_K_M": 5.66, "IQ2_S": 2.53, "IQ2_M": 2.73,
    "IQ2_M_R4": 2.73, "IQ3_XS": 3.25, "IQ3_M": 3.64, "IQ3_KL": 3.87,
}  # fmt: skip
"""Bits per weight of mixes: of the blocks of a model with the shapes of Llama 7B."""
_NON_LINEAR = {GGMLType.IQ4_NL, GGMLType.IQ4_XS}


def type_lines() -> list[str]:
    """Return lines such as `IQ4_K        4.5 bpw non-linear quantization`, in the order of the file types."""
    lines = [f"  {name:<12} {_about(f, name)}" for f in FILE_TYPES.values() for name in f.names]
    return [*lines, f"  {'COPY':<12} only copy tensors, no quantization"]


def _about(f: FileType, name: str) -> str:
    if name != f.names[-1]:
        return f"alias for {f.names[-1]}"
    t = TYPES[f.type]
    base = TYPES[t.plain]
    if t.kind == "float":
        return f"{_bpw(t.bpw)} bpw float" + (f", {base.name.upper()} repacked" if t.base is not None else "")
    words = [f"{_bpw(MIXES.get(name, t.bpw))} bpw"]
    if base.kind == "ternary":
        words.append("ternary quantization (Bitnet)")
    elif base.type == GGMLType.MXFP4:
        words.append("4-bit float quantization")
    elif "decoders.trellis" in base.decode:
        words.append("trellis quantization")
    elif "decoders.iqk" in base.decode or base.type in _NON_LINEAR:
        words.append("non-linear quantization")
    else:
        words.append("quantization")
    text = " ".join(words) + (" mix" if name in MIXES else "")
    text += f", {base.name.upper()} repacked" if t.is_interleaved and t.base is not None else ""
    return text + (", needs --imatrix" if f.number in NEEDS_IMATRIX or t.needs_imatrix else "")


def _bpw(value: float) -> str:
    """Format bits per weight: `4.0`, `2.0625`."""
    return f"{value:.1f}" if round(value, 1) == value else f"{value:g}"
