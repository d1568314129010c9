"""Types for a given size: the cheapest sum of estimated damages whose bytes fit (`--target-size`, `--target-bpw`).

Each tensor's candidate types are tried on sampled rows; damage = sensitivity * squared relative error. Starting from
the smallest types, the upgrade with the largest damage removed per byte is taken until nothing fits: steps run along
the lower convex hull of each tensor's (bytes, damage) points. What is left is spent on single steps, and in small
models on exchanges of two. Up and gate experts of a block are one item, because fused experts want equal types.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ikcli.errors import NonFiniteError, UsageError
from ikcli.gguf.constants import FILE_TYPES, GGMLType
from ikcli.gguf.reader import GGUFFile
from ikcli.quant.decode import decodable_types
from ikcli.quant.encoders import EncodeOptions, available_types
from ikcli.quant.formats import FORMATS, interleaved_type, tensor_size
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.measure import Errors, fits, measure, sample_tensor
from ikcli.quant.recipe_rules import TENSOR_NEEDS_IMATRIX
from ikcli.quant.recipes import Choice
from ikcli.quant.sensitivity import BRANCH_ENDS, sensitivities

T = GGMLType
# Good types of every size with encoders and kernels that are fast enough everywhere; trellis types are not among them.
DEFAULT_CANDIDATES = (
    *(T.IQ1_M, T.IQ2_XXS, T.IQ2_KS, T.IQ2_K, T.IQ2_KL, T.IQ3_XXS, T.IQ3_KS, T.IQ3_K, T.IQ3_S),
    *(T.IQ4_KSS, T.IQ4_KS, T.IQ4_XS, T.IQ4_K, T.IQ4_NL, T.IQ5_KS, T.IQ5_K, T.Q5_0, T.IQ6_K, T.Q6_K, T.Q6_0, T.Q8_0),
)
_MOST_EXCHANGED = 1000  # options of all tensors together; above that single steps are fine enough
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Budget: bytes of all tensors, or bits per weight; `rows` per tensor are measured (0 = all).

    `keeps_file_type`: the file type was given and is recorded, whatever types the tensors get.
    """

    n_bytes: int = 0
    bpw: float = 0.0
    candidates: tuple[GGMLType, ...] = ()
    repackable: bool = False
    rows: int = 256
    keeps_file_type: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """One type for an item: its bytes and damage."""

    type: GGMLType
    n_bytes: int
    damage: float


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """Type by tensor name, the predicted damage (an estimate of the KL divergence), bytes of all tensors, budget."""

    types: dict[str, GGMLType]
    damage: float
    n_bytes: int
    budget: int


def parse_size(text: str) -> int:
    """Bytes of `12GiB`, `900M` or `1.5GB` (K, M, G and KiB, ... are powers of 1024, KB, MB, GB of 1000)."""
    m = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(i?B|B)?\s*", text, re.IGNORECASE)
    if m is None or float(m[1]) <= 0:
        raise UsageError(f'--target-size: "{text}" is not a size; write for example 12GiB, 900M or 1.5GB')
    decimal = bool(m[2]) and (m[3] or "").upper() == "B"
    return int(float(m[1]) * (1000 if decimal else 1024) ** _UNITS[m[2].upper()])


def candidates_for(
    options: TargetOptions, name: str, shape: tuple[int, ...], old: GGMLType, imatrix: Imatrix | None
) -> list[GGMLType]:
    """Types a tensor may get: those that suit its rows, are not larger than what it is, and do not lack weights."""
    wanted = options.candidates or DEFAULT_CANDIDATES
    can = available_types() & decodable_types()
    weighted = imatrix is not None and imatrix.find(name) is not None
    found = [t for t in wanted if t in can and fits(t, shape) and (weighted or t not in TENSOR_NEEDS_IMATRIX)]
    if options.repackable:
        found = [t for t in found if interleaved_type(t) is not None or FORMATS[t].is_interleaved]
    smaller = [t for t in found if tensor_size(t, shape) <= tensor_size(old, shape)]
    return smaller or found[:1] or [t for t in (T.Q8_0, T.F16) if fits(t, shape)][:1]


def plan_target(
    file: GGUFFile,
    choices: Sequence[Choice],
    fixed: Callable[[Choice], bool],
    options: TargetOptions,
    imatrix: Imatrix | None,
    *,
    n_threads: int = 1,
    encode: EncodeOptions | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> TargetPlan:
    """Types for all choices that are not `fixed`; UsageError if even the smallest types do not fit the budget."""
    free = [c for c in choices if not fixed(c)]
    kept_bytes = sum(c.n_bytes for c in choices if fixed(c))
    budget = options.n_bytes or int(options.bpw * file.n_elements / 8)
    table, energies, stream = _measure_all(file, free, options, imatrix, n_threads, encode or EncodeOptions(), advance)
    weights = sensitivities([c.name for c in choices], file.metadata, energies, stream)
    items: dict[str, list[Choice]] = {}
    for c in free:
        items.setdefault(c.name.replace("ffn_gate_exps", "ffn_up_exps"), []).append(c)
    curves = [_curve(members, table, weights) for members in items.values()]
    least = kept_bytes + sum(min(o.n_bytes for o in curve) for curve in curves)
    if least > budget:
        raise UsageError(
            f"the target of {budget / 2**20:.2f} MiB is below {least / 2**20:.2f} MiB "
            f"({8 * least / file.n_elements:.3f} BPW), the least that the candidate types can reach"
            + ("" if imatrix is not None else "; with --imatrix smaller types are allowed")
        )
    picked = solve(curves, budget - kept_bytes)
    types = {c.name: o.type for members, o in zip(items.values(), picked, strict=True) for c in members}
    return TargetPlan(types, sum(o.damage for o in picked), kept_bytes + sum(o.n_bytes for o in picked), budget)


def _curve(
    members: Sequence[Choice], table: dict[str, dict[GGMLType, float]], weights: dict[str, float]
) -> list[Option]:
    common = [t for t in table[members[0].name] if all(t in table[c.name] for c in members)]
    return [
        Option(
            t,
            sum(tensor_size(t, c.shape) for c in members),
            sum(weights[c.name] * table[c.name][t] for c in members),
        )
        for t in common
    ]


def _measure_all(
    file: GGUFFile,
    free: Sequence[Choice],
    options: TargetOptions,
    imatrix: Imatrix | None,
    n_threads: int,
    encode: EncodeOptions,
    advance: Callable[[float], None],
) -> tuple[dict[str, dict[GGMLType, float]], dict[str, float], float | None]:
    """Squared relative errors by tensor and type, output energies of branch ends, energy of embedding rows."""
    table: dict[str, dict[GGMLType, float]] = {}
    energies: dict[str, float] = {}
    stream: float | None = None
    ends = tuple(BRANCH_ENDS.values())
    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        for c in free:
            t = file.tensors[c.source or c.name]
            found = imatrix.weights(t.name, t.shape) if imatrix is not None else None
            sample = sample_tensor(file, t, found, options.rows)
            types = candidates_for(options, c.name, c.shape, c.old, imatrix)
            try:
                errors = list(pool.map(lambda type, sample=sample: measure(sample, type, encode), types))
            except NonFiniteError:
                raise NonFiniteError(f"tensor {t.name} holds NaN or Inf") from None
            table[c.name] = {type: e.weighted**2 for type, e in zip(types, errors, strict=True)}
            if found is not None and c.name.endswith(ends):
                energies[c.name] = _per_row(errors[0], sample.n_sampled) * (t.shape[1] if len(t.shape) > 1 else 1)
            if c.name == "token_embd.weight":
                stream = errors[0].value2 / sample.n_sampled
            file.release(t.name, 0, t.n_bytes)
            advance(t.n_bytes)
    return table, energies, stream


def _per_row(errors: Errors, n_rows: int) -> float:
    """Mean squared output of one row of the matrix."""
    return errors.weighted_value2 / max(1, n_rows)


# --- the knapsack -----------------------------------------------------------------------------------------------------
def hull(options: Sequence[Option]) -> list[Option]:
    """Lower convex hull of (bytes, damage), smallest first: every step removes less damage per byte than the last."""
    out: list[Option] = []
    for o in sorted(options, key=lambda o: (o.n_bytes, o.damage)):
        if out and o.damage >= out[-1].damage:
            continue
        while len(out) > 1 and _slope(out[-2], out[-1]) <= _slope(out[-2], o):
            out.pop()
        if out and out[-1].n_bytes == o.n_bytes:
            continue
        out.append(o)
    return out


def _slope(a: Option, b: Option) -> float:
    """Damage removed per byte added."""
    return (a.damage - b.damage) / (b.n_bytes - a.n_bytes) if b.n_bytes > a.n_bytes else math.inf


def solve(curves: Sequence[Sequence[Option]], budget: int) -> list[Option]:
    """One option per curve with little damage in all; the smallest of all must fit `budget` bytes."""
    hulls = [hull(curve) for curve in curves]
    at = [0] * len(hulls)
    left = budget - sum(h[0].n_bytes for h in hulls)
    queue = [(-_slope(h[0], h[1]), i) for i, h in enumerate(hulls) if len(h) > 1]
    heapq.heapify(queue)
    while queue:
        _, i = heapq.heappop(queue)
        h, k = hulls[i], at[i]
        cost = h[k + 1].n_bytes - h[k].n_bytes
        if cost > left:
            continue  # the rest of this curve is out of reach; others may still fit
        at[i], left = k + 1, left - cost
        if k + 2 < len(h):
            heapq.heappush(queue, (-_slope(h[k + 1], h[k + 2]), i))
    picked = [h[k] for h, k in zip(hulls, at, strict=True)]
    picked = _spend(picked, curves, left)
    if sum(len(c) for c in curves) <= _MOST_EXCHANGED:
        _exchange(picked, curves, budget)
    return picked


def _exchange(picked: list[Option], curves: Sequence[Sequence[Option]], budget: int) -> None:
    """Small problems, where steps are coarse: change two items at once while that helps."""
    moves = [(i, o) for i, curve in enumerate(curves) for o in curve]
    item = np.array([i for i, _ in moves])
    for _ in range(len(moves)):
        left = budget - sum(o.n_bytes for o in picked)
        n_bytes = np.array([o.n_bytes - picked[i].n_bytes for i, o in moves])
        damage = np.array([o.damage - picked[i].damage for i, o in moves])
        allowed = (n_bytes[:, None] + n_bytes <= left) & (item[:, None] != item)
        total = np.where(allowed, damage[:, None] + damage, 0.0)
        a, b = np.unravel_index(int(total.argmin()), total.shape) if total.size else (0, 0)
        if not total.size or total[a, b] >= -1e-12:
            return
        for k in (a, b):
            picked[moves[k][0]] = moves[k][1]


def _spend(picked: list[Option], curves: Sequence[Sequence[Option]], left: int) -> list[Option]:
    """Use what is left over on single upgrades, the most useful first."""
    while True:
        best, gain = None, 0.0
        for i, curve in enumerate(curves):
            for o in curve:
                if o.n_bytes - picked[i].n_bytes <= left and picked[i].damage - o.damage > gain:
                    best, gain = (i, o), picked[i].damage - o.damage
        if best is None:
            return picked
        i, o = best
        left -= o.n_bytes - picked[i].n_bytes
        picked[i] = o


# --- recipes ----------------------------------------------------------------------------------------------------------
def recipe_rules(types: dict[str, GGMLType]) -> list[str]:
    """`RE=TYPE` rules for --custom-q that give these types, blocks of one kind and type in one rule."""
    groups: dict[tuple[str, GGMLType], list[str]] = {}
    for name, type in types.items():
        m = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
        groups.setdefault((m[2] if m else name, type), []).append(m[1] if m else "")
    rules: list[str] = []
    for (kind, type), blocks in groups.items():
        tail = re.escape(kind)
        if blocks != [""]:
            which = blocks[0] if len(blocks) == 1 else f"({'|'.join(blocks)})"
            tail = rf"blk\.{which}\.{tail}"
        rules.append(f"^{tail}$={FORMATS[type].name}")
    return rules


def nearest_file_type(types: dict[str, GGMLType], sizes: dict[str, int]) -> int:
    """The file type whose tensors' type holds the most of these bytes."""
    totals: dict[GGMLType, int] = {}
    for name, type in types.items():
        totals[type] = totals.get(type, 0) + sizes[name]
    for type in sorted(totals, key=lambda t: -totals[t]):
        found = [n for n, f in FILE_TYPES.items() if f.names and f.type == type and FORMATS[type].is_quantized]
        if found:
            return min(found)
    return 7
