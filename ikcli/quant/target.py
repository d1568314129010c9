"""Choose types for a given size: the least estimated damage whose bytes fit (`--target-size`, `--target-bpw`).

Each tensor's candidate types are tried on sampled rows, which gives squared relative errors, weighted by the importance
matrix. Their damage is estimated (`sensitivity`) or measured (`calibration`), and `knapsack` chooses. Tensors that stay
on the CPU choose among types with a row-interleaved twin, all others among all types; the two sides may have separate
budgets. Up and gate experts of a block are one item, because fused experts need equal types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ikcli.errors import NonFiniteError, UsageError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.heads import block_of, head_blocks
from ikcli.gguf.reader import GGUFFile
from ikcli.gguf.types import TYPES
from ikcli.log import warn
from ikcli.quant.calibration import Damage, Measure, Studied, calibrate, from_study
from ikcli.quant.decode import decodable_types
from ikcli.quant.encoders import available_types
from ikcli.quant.encoding import Encoding
from ikcli.quant.formats import interleaved_type, tensor_size
from ikcli.quant.imatrix_file import Imatrix
from ikcli.quant.knapsack import Solution, TypeOption, solve
from ikcli.quant.measure import Errors, fits, measure_piece, sample_tensor
from ikcli.quant.recipes import TypeChoice
from ikcli.quant.repack import can_repack, repacked_type
from ikcli.quant.sensitivity import BRANCH_ENDS, KEY, QUERY, sensitivities

T = GGMLType
CPU, GPU = "cpu", "gpu"


@dataclass(frozen=True, slots=True)
class CpuShare:
    """Which tensors stay on the CPU.

    `named`: the sides that the user named; if there are any, the rest is known to be on a GPU. `patterns`: the user's
    patterns, by option.
    """

    on_cpu: Callable[[str], bool] = lambda name: "exps" in name
    named: frozenset[str] = frozenset()
    patterns: tuple[tuple[str, str], ...] = ()

    def side(self, name: str) -> str:
        return CPU if self.on_cpu(name) else GPU


@dataclass(frozen=True, slots=True)
class SizeBudget:
    """Bytes of all tensors, or bits per weight where `n_bytes` is 0."""

    n_bytes: int = 0
    bpw: float = 0.0

    def of(self, n_elements: int) -> int:
        """Return the bytes for that many weights."""
        return self.n_bytes or int(self.bpw * n_elements / 8)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Budget of all tensors together, or of `gpu` and `cpu` apart; `rows` per tensor are measured (0 = all).

    `repackable`: all tensors get types with an interleaved twin. `r4`: those on the CPU get the twin itself.
    `keeps_file_type`: the file type was given and is recorded, whatever types the tensors get.
    """

    total: SizeBudget = SizeBudget()
    gpu: SizeBudget | None = None
    cpu: SizeBudget | None = None
    candidates: tuple[GGMLType, ...] = ()
    placement: CpuShare = CpuShare()
    repackable: bool = False
    r4: bool = False
    rows: int = 256
    keeps_file_type: bool = False
    calibrate: Measure | None = None
    calibrate_groups: int = 64
    study: Studied | None = None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice for one tensor: its type, with squared relative error and estimated damage."""

    type: GGMLType
    side: str
    error2: float
    damage: float


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """Choices by tensor name and bytes of all tensors.

    `damage` is the estimated KL divergence, `bound` the least that any choice in the budget could have, `measured` the
    divergence of the whole choice on the calibration text.
    """

    chosen: dict[str, Chosen]
    damage: float
    bound: float
    n_bytes: int
    budget: int
    measured: float | None = None

    @property
    def types(self) -> dict[str, GGMLType]:
        """Return the type of every tensor by name."""
        return {name: c.type for name, c in self.chosen.items()}


def default_candidates(*, on_gpu: bool) -> tuple[GGMLType, ...]:
    """Return good types of every size, the smallest first, whose kernels are fast enough everywhere.

    For tensors known to be on a GPU the list adds types that are fast only there (and slow to encode).
    """
    found = [t for t in TYPES.values() if t.candidate == "all" or (on_gpu and t.candidate == "gpu")]
    return tuple(t.type for t in sorted(found, key=lambda t: (t.bpw, -t.type)))


def candidates_for(
    options: TargetOptions, name: str, shape: tuple[int, ...], old: GGMLType, imatrix: Imatrix | None
) -> list[GGMLType]:
    """Return the types a tensor may get: they suit its rows, are not larger than its own, and do not lack weights."""
    cpu = options.placement.on_cpu(name)
    wanted = options.candidates or default_candidates(on_gpu=bool(options.placement.named) and not cpu)
    can = available_types() & decodable_types()
    weighted = imatrix is not None and imatrix.find(name, shape) is not None
    found = [t for t in wanted if t in can and fits(t, shape) and (weighted or not TYPES[t].needs_imatrix)]
    if options.repackable or cpu:
        twins = [t for t in found if interleaved_type(t) is not None or TYPES[t].is_interleaved]
        found = twins if twins or options.repackable else found
    smaller = [t for t in found if tensor_size(t, shape) <= tensor_size(old, shape)]
    return smaller or found[:1] or [t for t in (T.Q8_0, T.F16) if fits(t, shape)][:1]


def plan_target(
    file: GGUFFile,
    choices: Sequence[TypeChoice],
    fixed: Callable[[TypeChoice], bool],
    options: TargetOptions,
    encoding: Encoding,
    *,
    n_threads: int = 1,
    advance: Callable[[float], None] = lambda amount: None,
) -> TargetPlan:
    """Choose types for all choices that are not `fixed`; raise UsageError if even the smallest do not fit a budget."""
    free = [c for c in choices if not fixed(c)]
    table, energies, stream = _measure_all(file, free, options, encoding, n_threads, advance)
    prior = sensitivities([c.name for c in choices], file.metadata, energies, stream)
    damages = {c.name: Damage(prior[c.name]) for c in free}
    if options.study is not None:
        damages |= _studied(options.study, table, prior)
    budgets = _budgets(options, choices)
    _check(options, budgets, free, choices, fixed, table, encoding.imatrix is not None)
    problem = _Problem(options, free, _side_budgets(options, budgets, choices, fixed), table)
    chosen, bound = problem.solve(damages)
    if options.calibrate is not None:
        bpw = {name: TYPES[c.type].bpw for name, c in chosen.items()}
        heads = head_blocks(file.tensors, file.metadata)  # do not run with the model, so their damage stays estimated
        runs = {name: errors for name, errors in table.items() if block_of(name) not in heads}
        damages |= calibrate(runs, prior, bpw, options.calibrate, encoding, options.calibrate_groups)
        chosen, bound = problem.solve(damages)
    n_bytes = sum(c.n_bytes for c in choices if fixed(c))
    n_bytes += sum(tensor_size(chosen[c.name].type, c.shape) for c in free)
    measured = None
    if options.calibrate is not None and chosen:
        plain = {name: TYPES[c.type].base or c.type for name, c in chosen.items()}
        measured = options.calibrate([plain], encoding)[0]
    return TargetPlan(chosen, sum(c.damage for c in chosen.values()), bound, n_bytes, sum(budgets.values()), measured)


def _studied(
    study: Studied, table: Mapping[str, Mapping[GGMLType, float]], prior: Mapping[str, float]
) -> dict[str, Damage]:
    """Return measured damages; raise UsageError if the study does not cover these tensors."""
    found = from_study(study.groups, table, prior)
    if not found:
        raise UsageError(
            "--study: it has measured none of these tensors in a type they may get; "
            "study the same model, with types among the --candidates"
        )
    missing = [name for name in table if name not in found]
    idle = [name for name in missing if name in study.unused]
    if idle:
        warn(
            f"--study: the model does not use {len(idle)} tensors ({idle[0]}): nothing was measured, their damage is "
            "estimated as if it did; --custom-q gives them other types"
        )
    if len(missing) > len(idle):
        first = next(name for name in missing if name not in study.unused)
        warn(f"--study: {len(missing) - len(idle)} of {len(table)} tensors are not in it and are estimated ({first})")
    return found


def _side_budgets(
    options: TargetOptions,
    budgets: Mapping[str, int],
    choices: Sequence[TypeChoice],
    fixed: Callable[[TypeChoice], bool],
) -> dict[str, int]:
    """Return the bytes that the budgets leave for tensors that are not fixed."""
    place = options.placement.side
    kept = {s: sum(c.n_bytes for c in choices if fixed(c) and s in ("", place(c.name))) for s in budgets}
    return {side: budget - kept[side] for side, budget in budgets.items()}


@dataclass(frozen=True, slots=True)
class _Problem:
    """Tensors to choose types for, bytes for them by side (an empty name: both), squared errors."""

    options: TargetOptions
    free: Sequence[TypeChoice]
    budgets: Mapping[str, int]
    table: Mapping[str, Mapping[GGMLType, float]]

    def solve(self, damages: Mapping[str, Damage]) -> tuple[dict[str, Chosen], float]:
        """Return the choice by tensor name, and the lower bound of its damage."""
        chosen: dict[str, Chosen] = {}
        bound = 0.0
        place = self.options.placement
        for side, budget in self.budgets.items():
            items = _items([c for c in self.free if side in ("", place.side(c.name))], place)
            found = solve([_curve(members, self.table, damages) for members in items], budget)
            bound += found.bound
            chosen |= _chosen(items, found, self.table, damages, self.options)
        return chosen, bound


def _budgets(options: TargetOptions, choices: Sequence[TypeChoice]) -> dict[str, int]:
    """Return the bytes by side; one entry with an empty name for a common budget."""
    elements = {CPU: 0, GPU: 0}
    for c in choices:
        n = 1
        for ne in c.shape:
            n *= ne
        elements[options.placement.side(c.name)] += n
    total = options.total.of(sum(elements.values()))
    if options.gpu is None and options.cpu is None:
        return {"": total}
    gpu = options.gpu.of(elements[GPU]) if options.gpu is not None else None
    cpu = options.cpu.of(elements[CPU]) if options.cpu is not None else None
    gpu = total - (cpu or 0) if gpu is None else gpu
    cpu = total - gpu if cpu is None else cpu
    for side, budget in ((GPU, gpu), (CPU, cpu)):
        if budget <= 0:
            raise UsageError(f"the budget of the {side.upper()} tensors is more than the whole target leaves for it")
    return {GPU: gpu, CPU: cpu}


def budget_bytes(options: TargetOptions, choices: Sequence[TypeChoice]) -> int:
    """Return the bytes that all tensors together may take."""
    return sum(_budgets(options, choices).values())


def _check(
    options: TargetOptions,
    budgets: Mapping[str, int],
    free: Sequence[TypeChoice],
    choices: Sequence[TypeChoice],
    fixed: Callable[[TypeChoice], bool],
    table: Mapping[str, Mapping[GGMLType, float]],
    weighted: bool,
) -> None:
    """Raise UsageError if a budget is below the smallest types."""
    for side, budget in budgets.items():
        mine = [c for c in choices if side in ("", options.placement.side(c.name))]
        least = sum(c.n_bytes for c in mine if fixed(c))
        names = {c.name for c in mine}
        for members in _items([c for c in free if c.name in names], options.placement):
            least += min(sum(tensor_size(t, c.shape) for c in members) for t in _common(members, table))
        if least > budget:
            of = f" of the {side.upper()} tensors" if side else ""
            raise UsageError(
                f"the target{of} of {budget / 2**20:.2f} MiB is below {least / 2**20:.2f} MiB, the least that the "
                "candidate types can reach" + ("" if weighted else "; with --imatrix smaller types are allowed")
            )


def _items(free: Sequence[TypeChoice], placement: CpuShare) -> list[list[TypeChoice]]:
    """Group the tensors that get one type together."""
    items: dict[tuple[str, str], list[TypeChoice]] = {}
    for c in free:
        key = c.name.replace("ffn_gate_exps", "ffn_up_exps"), placement.side(c.name)
        items.setdefault(key, []).append(c)
    return list(items.values())


def _common(members: Sequence[TypeChoice], table: Mapping[str, Mapping[GGMLType, float]]) -> list[GGMLType]:
    return [t for t in table[members[0].name] if all(t in table[c.name] for c in members)]


def _curve(
    members: Sequence[TypeChoice], table: Mapping[str, Mapping[GGMLType, float]], damages: Mapping[str, Damage]
) -> list[TypeOption]:
    return [
        TypeOption(
            t,
            sum(tensor_size(t, c.shape) for c in members),
            sum(damages[c.name].of(table[c.name][t]) for c in members),
        )
        for t in _common(members, table)
    ]


def _chosen(
    items: Sequence[Sequence[TypeChoice]],
    found: Solution,
    table: Mapping[str, Mapping[GGMLType, float]],
    damages: Mapping[str, Damage],
    options: TargetOptions,
) -> dict[str, Chosen]:
    out: dict[str, Chosen] = {}
    for members, picked in zip(items, found.picked, strict=True):
        for c in members:
            side, error2 = options.placement.side(c.name), table[c.name][picked.type]
            type = picked.type
            if options.r4 and side == CPU and can_repack(type, c.shape, c.name):
                type = repacked_type(type) or type
            out[c.name] = Chosen(type, side, error2, damages[c.name].of(error2))
    return out


def _measure_all(
    file: GGUFFile,
    free: Sequence[TypeChoice],
    options: TargetOptions,
    encoding: Encoding,
    n_threads: int,
    advance: Callable[[float], None],
) -> tuple[dict[str, dict[GGMLType, float]], dict[str, float], float | None]:
    """Measure squared relative errors by tensor and type.

    Also returns the energies that `sensitivities` needs, and the energy of embedding rows.
    """
    table: dict[str, dict[GGMLType, float]] = {}
    energies: dict[str, float] = {}
    stream: float | None = None
    ends = tuple(BRANCH_ENDS.values())
    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        for c in free:
            t = file.tensors[c.source or c.name]
            mine = encoding.of(t.name, t.shape)
            found = mine.weights
            sample = sample_tensor(file, t, found, options.rows)
            types = candidates_for(options, c.name, c.shape, c.old, encoding.imatrix)
            errors = [Errors()] * len(types)
            try:
                for piece in sample.pieces:  # all types of a piece before the next: they share its second moments
                    now = pool.map(lambda type, p=piece, by=mine: measure_piece(p, type, by), types)
                    errors = [a + b for a, b in zip(errors, now, strict=True)]
            except NonFiniteError:
                raise NonFiniteError(f"tensor {t.name} holds NaN or Inf") from None
            table[c.name] = {type: e.weighted**2 for type, e in zip(types, errors, strict=True)}
            rows = max(1, sample.n_sampled)
            if found is not None and c.name.endswith(ends):
                energies[c.name] = errors[0].weighted_value2 / rows * (t.shape[1] if len(t.shape) > 1 else 1)
            if found is not None and c.name.endswith((QUERY, KEY)):
                energies[c.name] = errors[0].weighted_value2 / rows
            if c.name == "token_embd.weight":
                stream = errors[0].value2 / rows
            file.release(t.name, 0, t.n_bytes)
            advance(t.n_bytes)
    return table, energies, stream
