"""`--rope-*` and `--yarn-*`: rotation settings of the command line override those of the model file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ikcli.errors import UsageError
from ikcli.settings.adapters import RopeConfig


def overrides(rope: RopeConfig) -> Mapping[str, Any]:
    """Return the given ones: scaling, factor, freq_base, n_ctx_orig, ext_factor, attn_factor, beta_fast, beta_slow."""
    if rope.scale and rope.freq_scale and abs(rope.scale * rope.freq_scale - 1) > 1e-6:
        raise UsageError(
            f"--rope-scale {rope.scale:g} and --rope-freq-scale {rope.freq_scale:g} contradict each other: one is 1 "
            "over the other; give one of them"
        )
    if rope.freq_base and rope.freq_base <= 1:
        raise UsageError(f"--rope-freq-base {rope.freq_base:g} must be larger than 1, for example 1000000")
    betas = {"--yarn-beta-fast": rope.beta_fast, "--yarn-beta-slow": rope.beta_slow}
    for name, value in betas.items():
        if value == 0:
            raise UsageError(f"{name} 0 must be a positive number of rotations; below 0 it is that of the model file")
    given = {
        "scaling": rope.scaling or None,
        "factor": rope.scale or (1 / rope.freq_scale if rope.freq_scale else None),
        "freq_base": rope.freq_base or None,
        "n_ctx_orig": rope.orig_ctx or None,
        "ext_factor": _given(rope.ext_factor),
        "attn_factor": _given(rope.attn_factor),
        "beta_fast": _given(rope.beta_fast),
        "beta_slow": _given(rope.beta_slow),
    }
    return {name: value for name, value in given.items() if value is not None}


def _given(value: float) -> float | None:
    return value if value >= 0 else None
