"""Read the rotation of a checkpoint, under any of its three sets of names in config.json, and write the GGUF keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ikcli.convert.build import Build
from ikcli.convert.config import Config
from ikcli.convert.pieces import Floats
from ikcli.errors import UnsupportedError

_ALWAYS = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "max_position_embeddings"}
_KNOWN: dict[str, set[str]] = {
    "default": {"mrope_section", "mrope_interleaved", "factor"},
    "linear": {"factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "attn_factor",
        "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta", "extrapolation_factor", "finetuned",
        "mrope_section", "mrope_interleaved",
    },
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "longrope": {"short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor",
                 "long_mscale", "short_mscale"},
    "proportional": set(),
    "dynamic": {"factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},
}  # fmt: skip
_SAME = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn", "none": "default"}


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """A rotation: its type, its base, the share of a head that it rotates, and other values."""

    type: str
    theta: float
    partial: float
    values: dict[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UnsupportedError(f"config.json: rope parameter {key} should be a number, but is {value!r}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise UnsupportedError(f"config.json: rope parameter {key} should be above 0, but is {value}")
        return value


def read_rope(config: Config, kind: str = "full_attention") -> RopeSettings:
    """Return the rotation of layers of a kind; raise an UnsupportedError for an unknown type or value."""
    new = config.given("rope_parameters")
    found: dict[str, Any] = dict(_of_kind(config.defaults.get("rope_parameters") or {}, kind))
    if isinstance(new, dict):
        own = dict(_of_kind(new, kind))
        found = {k: v for k, v in found.items() if k in ("rope_theta", "partial_rotary_factor")} | own
    old = config.given("rope_scaling")
    if "rope_scaling" in config.values:
        found = {k: v for k, v in found.items() if k in ("rope_theta", "partial_rotary_factor")} | dict(old or {})
    for key, names in _OLD_NAMES.items():
        value = next((v for v in map(config.given, names) if v is not None), None)
        if value is not None and not (isinstance(new, dict) and key in _of_kind(new, kind)):
            found[key] = value
    if "original_max_position_embeddings" in config:
        found.setdefault("original_max_position_embeddings", config.given("original_max_position_embeddings"))
    name = str(found.get("rope_type") or found.get("type") or "default")
    name = _SAME.get(name, name)
    if name not in _KNOWN:
        raise UnsupportedError(f"{config.path}: rope_type {name} is not known; known are {', '.join(_KNOWN)}")
    found = {k: v for k, v in found.items() if v is not None}
    strange = sorted(set(found) - _ALWAYS - _KNOWN[name] - {"original_max_position_embeddings"})
    if strange:
        raise UnsupportedError(f"{config.path}: rope parameter {strange[0]} of rope_type {name} is not known")
    theta = found.get("rope_theta", 10000.0)
    partial = found.get("partial_rotary_factor", 1.0)
    for key, value in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise config.fail(key, f"should be a positive number, but is {value!r}")
    return RopeSettings(name, float(theta), float(partial), found)


_OLD_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base", "rope_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct", "rope_pct"),
}


def _of_kind(parameters: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the parameters of a kind of layers; they are nested if the kinds differ."""
    nested = {k: v for k, v in parameters.items() if isinstance(v, dict)}
    if not nested:
        return parameters
    return nested.get(kind) or next(iter(nested.values()))


def put_rope(m: Build, rope: RopeSettings) -> None:
    """Write the keys of base and scaling."""
    m.key("rope.freq_base", rope.theta)
    if rope.type == "linear":
        m.key("rope.scaling.type", "linear")
        m.key("rope.scaling.factor", rope.number("factor"))
    elif rope.type == "yarn":
        put_yarn(m, rope)
    elif rope.type == "dynamic":  # a plain rotation up to the model's context
        if "alpha" in rope.values:
            raise UnsupportedError(f"{m.config.path}: rope parameter alpha is not known for {m.arch}")
        m.notes.append("rope_type dynamic extends the context beyond that of the model; the file does not")


def check_factors(m: Build) -> None:
    """Refuse a checkpoint whose rotation has factors by frequency that the conversion did not store."""
    if not ("rope_parameters" in m.config or "rope_scaling" in m.config):
        return
    found = read_rope(m.config)
    if found.type in ("llama3", "longrope") and not any(name.startswith("rope_f") for name in m.tensors):
        raise UnsupportedError(f"{m.config.path}: rope_type {found.type} is not known for {m.arch}")


def put_yarn(m: Build, rope: RopeSettings) -> None:
    """Write the keys of YaRN that the checkpoint states, and no defaults."""
    m.key("rope.scaling.type", "yarn")
    m.key("rope.scaling.factor", rope.number("factor"))
    original = rope.positive("original_max_position_embeddings", m.config.integer("max_position_embeddings", least=1))
    m.key("rope.scaling.original_context_length", int(original))
    if rope.values.get("truncate") is False:
        m.key("rope.scaling.yarn_truncate", False)
        m.notes.append(
            "YaRN without rounding (truncate false) is stored in a key that only ik reads; other programs round"
        )
    for key, name in (
        ("extrapolation_factor", "yarn_ext_factor"),
        ("attention_factor", "yarn_attn_factor"),
        ("attn_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if key in rope.values:
            m.key(f"rope.scaling.{name}", rope.number(key))


def llama3_factors(m: Build, rope: RopeSettings, n_rot: int) -> Floats:
    """Return the divisors of frequencies: `factor` for long wavelengths, 1 for short ones, interpolated between."""
    factor = np.float32(rope.positive("factor", 8.0))
    low, high = np.float32(rope.positive("low_freq_factor", 1.0)), np.float32(rope.positive("high_freq_factor", 4.0))
    one, context = np.float32(1), np.float32(rope.positive("original_max_position_embeddings", 8192))
    exponents = np.arange(0, n_rot, 2, dtype=np.float32) / np.float32(n_rot)
    frequencies = one / np.power(rope.theta, exponents, dtype=np.float64).astype(np.float32)
    factors: list[np.float32] = []
    for wavelength in one / frequencies * np.float32(2 * math.pi):  # multiply by reciprocals, as torch does
        if wavelength < context / high:
            factors.append(one)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (one / wavelength * context - low) / (high - low)
            factors.append(one / ((one - smooth) / factor + smooth))
    return np.array(factors, np.float32)
