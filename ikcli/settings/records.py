"""Structured values of options: devices, scaled files, kinds of speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A described device: `cuda` or `cpu` (host memory), its bytes, and facts (None: not given).

    `ops`: multiplications and additions of products per second. `bandwidth`: bytes per second from the host to a GPU,
    or from RAM to the CPU.
    """

    kind: str
    n_bytes: int
    capability: tuple[int, int] | None = None
    ops: float | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class ScaledFile:
    """A file and the scale applied to its content."""

    path: Path
    scale: float


@dataclass(frozen=True, slots=True)
class SpecStage:
    """One `--spec-type`: the drafter, its number of tokens (n_min..n_max) and its settings; None means the default.

    `p_min` is the minimum probability of a drafted token (draft model). n-gram types search for the last `size_n`
    tokens and draft what followed them, up to `size_m` tokens, if they occurred `min_hits` times.
    """

    type: str
    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None
    size_n: int | None = None
    size_m: int | None = None
    min_hits: int | None = None


@dataclass(frozen=True, slots=True)
class SpecSetting:
    """One `--spec-set`: a field for all stages of a type (`ngram`: all n-gram types) that do not set it."""

    type: str
    field: str
    value: float
