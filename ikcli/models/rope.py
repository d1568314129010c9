"""Rotation frequencies: plain, linear scaling, YaRN, and per-frequency factors (`rope_freqs.weight` of Llama 3).

YaRN (arXiv:2309.00071) blends interpolated and original frequencies between two correction dimensions.
Answers to `rope_yarn` of ggml: its magnitude factor 1 + 0.1*ln(factor) multiplies cosine and sine.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ikcli.models.hparams import RopeParams


def inverse_frequencies(
    rope: RopeParams, n_rot: int, factors: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float64]:
    """Angle per position of each of the n_rot/2 pairs; `factors` divide the frequencies."""
    i = np.arange(n_rot // 2, dtype=np.float64)
    original = rope.freq_base ** (-2.0 * i / n_rot)
    if factors is not None:
        original = original / factors[: n_rot // 2].astype(np.float64)
    scaled = original / rope.factor
    if rope.scaling != "yarn":
        return scaled
    low, high = correction_dims(rope, n_rot)
    extrapolate = 1.0 - np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
    return scaled * (1.0 - extrapolate) + original * extrapolate


def correction_dims(rope: RopeParams, n_rot: int) -> tuple[float, float]:
    """First and last pair between which YaRN blends."""

    def dim(n_rotations: float) -> float:
        return n_rot * math.log(rope.n_ctx_orig / (n_rotations * 2 * math.pi)) / (2 * math.log(rope.freq_base))

    return max(0.0, math.floor(dim(rope.beta_fast))), min(n_rot - 1.0, math.ceil(dim(rope.beta_slow)))


def magnitude(rope: RopeParams, attn_factor: float) -> float:
    """What cosine and sine are multiplied by."""
    return attn_factor * (yarn_log(rope) if rope.scaling == "yarn" else 1.0)


def yarn_log(rope: RopeParams, multiplier: float = 0.1) -> float:
    """1 + multiplier * ln(factor)."""
    return 1.0 + multiplier * math.log(rope.factor)
