"""Compute RoPE frequencies: plain, linear scaling, YaRN, and per-frequency factors (`rope_freqs.weight` of Llama 3).

YaRN (arXiv:2309.00071) blends interpolated and original frequencies between two correction dimensions. Corresponds to
`rope_yarn` of ggml: its magnitude factor 1 + 0.1*ln(factor) multiplies cosine and sine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.models.keys import HasShape, Keys, short

LONG_ROPE = ("minicpm", "minicpm3", "phi3", "phimoe")  # with factors for short and for long contexts


CONTIGUOUS = ("qwen2vl", "glm4", "glm4moe", "paddleocr")
SECTIONED = (*CONTIGUOUS, "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
"""With M-RoPE: pairs are rotated by time, row or column of a position, in runs or in turns."""


@dataclass(frozen=True, slots=True, order=True)
class RopeParams:
    """RoPE settings: base, scaling ("none", "linear", "yarn") and its factor (1 = unscaled).

    `factors`: divide the frequencies by those of the file, where it has any. `ext_factor`: YaRN's blending strength.
    `truncate`: blend between whole pairs (gpt-oss does not). `sections`: pairs rotated by time, row and column of a
    position (M-RoPE); `interleaved`: the three take turns.
    """

    freq_base: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    n_ctx_orig: int = 0
    attn_factor: float = 1.0
    log_mul: float = 0.0  # yarn_log_multiplier
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ext_factor: float = 1.0
    factors: bool = True
    truncate: bool = True
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    def axes(self, n_pairs: int) -> list[int]:
        """Return the axis of the position (time, row, column) that each pair is rotated by."""
        found = [0] * n_pairs
        for axis, (begin, n) in enumerate(zip(accumulate((0, *self.sections)), self.sections[:3], strict=False)):
            at = range(axis, 3 * n, 3) if self.interleaved and axis else range(begin, begin + n)
            for i in at if axis else ():
                if i < n_pairs:
                    found[i] = axis
        return found


def _sections(keys: Keys) -> tuple[int, ...]:
    """Return the pairs that are rotated by time, row and column."""
    found = keys.raw("rope.dimension_sections", ())
    try:
        values = tuple(int(x) for x in found)
    except (TypeError, ValueError):
        values = (-1,)
    if len(values) > 4 or any(not 0 <= x <= 1 << 16 for x in values):
        raise keys.fail("rope.dimension_sections", "must hold at most four whole numbers")
    return values if any(values) else ()


def inverse_frequencies(
    rope: RopeParams, n_rot: int, factors: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float64]:
    """Return the angle per position of each of the n_rot/2 pairs; `factors` divide the frequencies."""
    i = np.arange(n_rot // 2, dtype=np.float64)
    original = rope.freq_base ** (-2.0 * i / n_rot)
    if factors is not None:
        original = original / factors[: n_rot // 2].astype(np.float64)
    scaled = original / rope.factor
    if rope.scaling != "yarn":
        return scaled
    low, high = correction_dims(rope, n_rot)
    extrapolate = rope.ext_factor * (1.0 - np.clip((i - low) / max(0.001, high - low), 0.0, 1.0))
    return scaled * (1.0 - extrapolate) + original * extrapolate


def correction_dims(rope: RopeParams, n_rot: int) -> tuple[float, float]:
    """Return the first and last pair between which YaRN blends."""

    def dim(n_rotations: float) -> float:
        return n_rot * math.log(rope.n_ctx_orig / (n_rotations * 2 * math.pi)) / (2 * math.log(rope.freq_base))

    low, high = dim(rope.beta_fast), dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(0.0, low), min(n_rot - 1.0, high)


def magnitude(rope: RopeParams, attn_factor: float) -> float:
    """Return the factor on cosine and sine."""
    return attn_factor * (yarn_log(rope) if rope.scaling == "yarn" and rope.ext_factor else 1.0)


def yarn_log(rope: RopeParams, multiplier: float = 0.1) -> float:
    """Return 1 + multiplier * ln(factor)."""
    return 1.0 + multiplier * math.log(rope.factor)


def read_rope(
    keys: Keys, tensors: Mapping[str, HasShape], n_ctx_train: int, given: Mapping[str, Any] | None = None
) -> RopeParams:
    """Read the RoPE keys for all layers (for those without a window, where the two differ).

    `given`: the command line's values, which win (`rope_options`).
    """
    given = given or {}
    long = "rope_factors_long.weight" in tensors
    if long and keys.arch not in LONG_ROPE:
        raise UnsupportedError(
            f"{keys.source}: LongRoPE factor tensors (rope_factors_long) are known of {', '.join(LONG_ROPE)}"
        )
    scaling = keys.raw("rope.scaling.type", "linear")
    if not isinstance(scaling, str) or scaling not in ("none", "linear", "yarn", *(("longrope",) if long else ())):
        raise UnsupportedError(
            f"{keys.source}: {keys.name('rope.scaling.type')} is {short(scaling)}; known are none, linear, yarn"
        )
    scaling = "linear" if scaling == "longrope" else scaling
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0) or 1.0
    if factor <= 0:
        raise keys.fail("rope.scaling.factor", f"is {factor}; it must be positive")
    base = keys.number("rope.freq_base", 10000.0)
    if base <= 1:
        raise keys.fail("rope.freq_base", f"is {base}; it must be larger than 1")
    ext_factor = keys.number("rope.scaling.yarn_ext_factor", 1.0, most=1e6)
    attn_factor = _attn_factor(keys, scaling, factor)
    scaling, factor = given.get("scaling", scaling), given.get("factor", factor)
    if scaling == "none" or (factor == 1.0 and scaling == "linear"):
        scaling, factor = "none", 1.0
    found = RopeParams(
        freq_base=base,
        scaling="yarn" if "ext_factor" in given else scaling,  # a mix of frequencies, whatever it is called
        factor=factor,
        n_ctx_orig=keys.integer("rope.scaling.original_context_length", n_ctx_train, least=1),
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0, most=1e6) * given.get("attn_factor", attn_factor),
        log_mul=keys.number("rope.scaling.yarn_log_multiplier", 0.0, most=1e6),
        beta_fast=_rotations(keys, "rope.scaling.yarn_beta_fast", 8.0 if keys.arch == "grok" else 32.0),
        beta_slow=_rotations(keys, "rope.scaling.yarn_beta_slow", 1.0),
        ext_factor=1.0 if ext_factor < 0 else ext_factor,
        truncate=bool(keys.raw("rope.scaling.yarn_truncate", True)),  # a key of ik's own
    )
    found = replace(found, **{n: v for n, v in given.items() if n not in ("scaling", "factor", "attn_factor")})
    if keys.arch in SECTIONED:
        found = replace(found, sections=_sections(keys), interleaved=keys.arch not in CONTIGUOUS)
    if keys.arch == "mistral3":  # what a file says about K*Q (log_mul) cancels YaRN's factor on cosine and sine
        found = replace(found, attn_factor=found.attn_factor / yarn_log(found, 0.1 * found.log_mul))
    return found


def _attn_factor(keys: Keys, scaling: str, factor: float) -> float:
    """Return the factor on cosine and sine beside YaRN's own one.

    Converters write the `attention_factor` of a checkpoint, which is the whole factor and often the usual value, or 1
    if there is none.
    """
    whole = keys.number("rope.scaling.yarn_attn_factor", 1.0, most=1e6)
    return whole / (1.0 + 0.1 * math.log(factor)) if scaling == "yarn" and whole != 1 and factor > 1 else whole


def _rotations(keys: Keys, key: str, default: float) -> float:
    n = keys.number(key, default, most=1e9)
    if n <= 0:
        raise keys.fail(key, f"is {n}; it must be positive")
    return n
