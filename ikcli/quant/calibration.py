"""Measure sensitivities: the KL divergence of a model in which a single group of tensors is quantized.

A group holds the tensors of one role in adjacent blocks. Each group is tried with types below and above the one that
the estimate chooses. Between these points, the cost of a squared relative error is interpolated on logarithmic axes,
where small errors make a line of slope 1. Inside a group the estimated sensitivities divide the damage. The caller
supplies `Measure`, which runs the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.encoding import Encoding

# Mean KL divergence (nats per token) of every trial, tensor name -> type; all other tensors stay as they are.
Measure = Callable[[Sequence[Mapping[str, GGMLType]], Encoding], list[float]]
Table = Mapping[str, Mapping[GGMLType, float]]  # tensor -> type -> squared relative error
# Bits per weight of the trials from the expected ones; large errors do not just add up, so low types get a third point.
_AROUND, _AROUND_LOW, _LOW = (-1.0, 0.75), (-1.5, -0.5, 0.75), 4.0
_SLOPES = (0.75, 1.75)
_LEAST = 1e-9  # divergences below are rounding
# Damage grows faster than the error. Files of a single type show 0 to 4; mixes are chosen best with more, which keeps
# single tensors from getting very few bits.
CURVATURE = 8.0


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a tensor as a function of its squared relative error: `weight` times the curve through `points`.

    A point is (squared error, divergence). Without points the curve is that of the estimate, close to the error itself.
    """

    weight: float
    points: tuple[tuple[float, float], ...] = ()

    def of(self, error2: float) -> float:
        """Return the estimated KL divergence at a squared relative error."""
        if error2 <= 0:
            return 0.0
        if not self.points:
            return self.weight * error2 * (1 + CURVATURE * error2)
        x, logs = math.log(error2), [(math.log(e), math.log(v)) for e, v in self.points]
        if len(logs) == 1:
            return self.weight * math.exp(logs[0][1] + x - logs[0][0])
        i = min(max(1, sum(x >= e for e, _ in logs)), len(logs) - 1)
        (x0, y0), (x1, y1) = logs[i - 1], logs[i]
        slope = min(max((y1 - y0) / (x1 - x0), _SLOPES[0]), _SLOPES[1])
        inside = x0 <= x <= x1
        near = (y1, x1) if x >= x1 else (y0, x0)
        at = y0 + (y1 - y0) * (x - x0) / (x1 - x0) if inside else near[0] + slope * (x - near[1])
        return self.weight * math.exp(at)


@dataclass(frozen=True, slots=True)
class TrialGroup:
    """Tensors that share a coefficient, and the trials that measure it: a type per tensor for each trial."""

    title: str
    names: tuple[str, ...]
    trials: tuple[Mapping[str, GGMLType], ...]


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """Tensors that were quantized together while all others stayed as they are, with the KL divergence of each type."""

    names: tuple[str, ...]
    points: tuple[tuple[GGMLType, float], ...]


@dataclass(frozen=True, slots=True)
class Studied:
    """The results of a study, and the tensors of the file that the model does not use."""

    groups: tuple[MeasuredGroup, ...]
    unused: frozenset[str] = frozenset()


def role(name: str) -> str:
    """Return a tensor name without its block number; fused experts (up and gate) have one role."""
    return re.sub(r"^blk\.\d+\.", "", name).replace("ffn_gate_exps", "ffn_up_exps")


def make_groups(table: Table, bpw: Mapping[str, float], most: int = 64) -> list[TrialGroup]:
    """Group the tensors in `table` and choose the trials of each group.

    `most` is the approximate number of groups; there is at least one per role. `bpw` holds the bits per weight that
    each tensor is expected to get; trials are placed around their mean.
    """
    blocks = sorted({int(m[1]) for name in table if (m := re.match(r"blk\.(\d+)\.", name))})
    roles = {role(name) for name in table}
    n_part = max(1, min(len(blocks), most // max(1, len(roles))))
    part_of = {block: i * n_part // len(blocks) for i, block in enumerate(blocks)}
    members: dict[tuple[int, str], list[str]] = {}
    for name in table:
        m = re.match(r"blk\.(\d+)\.", name)
        members.setdefault((part_of[int(m[1])] if m else -1, role(name)), []).append(name)
    out = []
    for (part, kind), names in members.items():
        inside = [b for b in blocks if part_of[b] == part]
        where = f"blk.{inside[0]}-{inside[-1]}." if len(inside) > 1 else f"blk.{inside[0]}." if inside else ""
        trials: list[dict[str, GGMLType]] = []
        mean = sum(bpw[n] for n in names) / len(names)
        for offset in _AROUND if mean >= _LOW else _AROUND_LOW:
            trial = {n: _nearest(table[n], mean + offset) for n in names}
            if trial not in trials:
                trials.append(trial)
        out.append(TrialGroup(where + kind, tuple(names), tuple(trials)))
    return out


def _nearest(errors: Mapping[GGMLType, float], bpw: float) -> GGMLType:
    return min(errors, key=lambda t: (abs(TYPES[t].bpw - bpw), errors[t]))


def fit(group: TrialGroup, klds: Sequence[float], table: Table, prior: Mapping[str, float]) -> dict[str, Damage]:
    """Return the damage of every tensor of a group, fitted to the divergence of each of its trials."""
    total = sum(prior[n] for n in group.names)
    points: dict[float, float] = {}
    for kld, trial in zip(klds, group.trials, strict=True):
        error = sum(prior[n] * table[n][t] for n, t in trial.items()) / total if total > 0 else 0.0
        if error > 0:
            points[error] = max(kld, _LEAST) / total
    rising: list[tuple[float, float]] = []
    for error in sorted(points):  # a larger error never costs less
        rising.append((error, max(points[error], rising[-1][1] if rising else 0.0)))
    return {n: Damage(prior[n], tuple(rising)) for n in group.names}


def calibrate(
    table: Table,
    prior: Mapping[str, float],
    bpw: Mapping[str, float],
    measure: Measure,
    encoding: Encoding,
    most: int = 64,
) -> dict[str, Damage]:
    """Measure the damage of every tensor in `table` by groups, near the expected bits per weight."""
    groups = make_groups(table, bpw, most)
    klds = iter(measure([trial for g in groups for trial in g.trials], encoding))
    out: dict[str, Damage] = {}
    for g in groups:
        out |= fit(g, [next(klds) for _ in g.trials], table, prior)
    return out


def from_study(study: Sequence[MeasuredGroup], table: Table, prior: Mapping[str, float]) -> dict[str, Damage]:
    """Return the damage of the tensors that a study measured, for types that the table has for their whole group."""
    out: dict[str, Damage] = {}
    for group in study:
        names = tuple(n for n in group.names if n in table)
        points = [(t, kld) for t, kld in group.points if all(t in table[n] for n in names)]
        if names and len(names) == len(group.names) and points:
            trials = tuple(dict.fromkeys(names, t) for t, _ in points)
            out |= fit(TrialGroup("", names, trials), [kld for _, kld in points], table, prior)
    return out
