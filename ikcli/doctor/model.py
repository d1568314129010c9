"""Apply the rooflines of a machine to a model: the maximum tokens per second, and the limiting resource.

Generation reads every weight that a token uses, and the cache of its sequence. Prompts are limited by arithmetic; a
micro-batch reads the weights once for all its tokens. Attention counts as reading the cache; its products are ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ikcli.backends.cpu.lower import products_of
from ikcli.doctor.roofline import Peaks
from ikcli.engine.plan.placement import CPU
from ikcli.engine.plan.planner import Planner, RunPlan
from ikcli.gguf.types import TYPES
from ikcli.graph import Per
from ikcli.models import HParams
from ikcli.settings.run import RunConfig

_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost per token and device: bytes of weights read in generation, and multiply-adds by kind of product.

    Also the bytes of weights that a large micro-batch reads in all; `cache`: bytes per cached position; `state`: per
    token; `once`: the part of the products that prompts compute for their last token only, that is, those of the output
    and of the last layer after its attention.
    """

    weights: Mapping[str, int]
    products: Mapping[str, Mapping[str, float]]
    batch_weights: Mapping[str, int]
    cache: Mapping[str, float]
    state: Mapping[str, int]
    once: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Speed:
    """The maximum tokens per second, and the limiting resource; None where a peak of a device is unknown."""

    name: str
    tokens_per_s: float | None
    limit: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A planned run of the model: what it needs and what the rooflines allow."""

    path: str
    arch: str
    n_params: int
    n_bytes: int
    types: tuple[tuple[str, int], ...]
    n_experts: int
    n_ctx: int
    n_ubatch: int
    needs: Mapping[str, int]
    free: Mapping[str, int]
    fits: bool
    cost: TokenCost
    speeds: tuple[Speed, ...]


def model_report(planner: Planner, config: RunConfig, peaks: Peaks | None) -> ModelReport:
    """Plan the run and compare it with the rooflines (None: not measured, so no speeds)."""
    plan = planner.plan(config)
    cost = token_cost(planner, plan)
    file, types = planner.file, defaultdict[str, int](int)
    for t in file.tensors.values():
        types[TYPES[t.type].name] += t.n_bytes
    n_ctx = plan.memory.n_ctx
    n_ubatch = min(config.n_ubatch, n_ctx)
    return ModelReport(
        path=str(file.paths[0]),
        arch=file.arch,
        n_params=file.n_elements,
        n_bytes=file.n_bytes,
        types=tuple(sorted(types.items(), key=lambda item: -item[1])),
        n_experts=planner.hp.n_expert,
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        needs={device: plan.memory.total(device) for device in plan.memory.parts},
        free=plan.memory.free,
        fits=plan.memory.fits(),
        cost=cost,
        speeds=tuple(speeds(cost, peaks, n_ubatch, n_ctx)) if peaks is not None else (),
    )


def token_cost(planner: Planner, plan: RunPlan) -> TokenCost:
    """Return the cost of one token with the placement of the plan."""
    hp, tensors = planner.hp, planner.file.tensors
    weights, batch = defaultdict[str, int](int), defaultdict[str, int](int)
    products: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    once: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    tied = "output.weight" not in tensors
    ends = (_EMBEDDINGS[0] if tied else "output.weight", f"blk.{hp.n_layer - 1}.ffn_")
    for t in tensors.values():
        device = plan.placement.buffer_of.get(t.name, CPU)
        if t.name in _EMBEDDINGS and not (tied and t.name == _EMBEDDINGS[0]):
            continue  # one row
        share = _share(hp, t.name)
        weights[device] += round(t.n_bytes * share)
        batch[device] += t.n_bytes
        if len(t.shape) > 1:
            kind = products_of(t.type)
            products[device][kind] += 2 * t.n_elements * share
            if t.name.startswith(ends):
                once[device][kind] += 2 * t.n_elements * share
    cache: dict[str, float] = defaultdict(float)
    state = defaultdict[str, int](int)
    for c, n_bytes in plan.caches.items():
        device = plan.placement.cache[c.il] if 0 <= c.il < len(plan.placement.cache) else CPU
        if c.per is Per.CELL:
            cache[device] += n_bytes / plan.memory.n_ctx
        else:
            state[device] += n_bytes
    of_devices = [{d: dict(p) for d, p in kinds.items()} for kinds in (products, once)]
    return TokenCost(dict(weights), of_devices[0], dict(batch), dict(cache), dict(state), of_devices[1])


def _share(hp: HParams, name: str) -> float:
    """Return the part of a tensor that one token uses: of experts, the chosen ones."""
    return hp.n_expert_used / hp.n_expert if "_exps." in name and hp.n_expert else 1.0


def speeds(cost: TokenCost, peaks: Peaks, n_ubatch: int, n_ctx: int) -> list[Speed]:
    """Return the speed of prompts at an empty cache, and of generation at an empty and at a full one."""
    return [
        _prompt(cost, peaks, n_ubatch),
        _generation(cost, peaks, 0, "generation, empty cache"),
        _generation(cost, peaks, n_ctx, f"generation, {n_ctx} tokens cached"),
    ]


def _bandwidth(peaks: Peaks, device: str) -> float | None:
    if device == CPU:
        return peaks.read_all
    return next((gpu.memory for gpu in peaks.gpus if gpu.name == device), None)


def _generation(cost: TokenCost, peaks: Peaks, depth: int, name: str) -> Speed:
    seconds: dict[str, float] = {}
    for device in {*cost.weights, *cost.cache, *cost.state}:
        bandwidth = _bandwidth(peaks, device)
        n_bytes = cost.weights.get(device, 0) + depth * cost.cache.get(device, 0.0) + cost.state.get(device, 0)
        if not n_bytes:
            continue
        if bandwidth is None:
            return Speed(name, None, f"the bandwidth of {device} was not measured")
        seconds[f"memory of {device}" if device != CPU else "memory bandwidth"] = n_bytes / bandwidth
    computing = _computing(cost, peaks, 1)
    if computing is not None and sum(seconds.values()) < computing:
        return Speed(name, 1 / computing, "products")
    return _result(name, seconds, 1)


def _computing(cost: TokenCost, peaks: Peaks, n_tokens: int) -> float | None:
    """Return the seconds of the products on the CPU; for GPUs no peak is known."""
    total = 0.0
    for kind, n in cost.products.get(CPU, {}).items():
        peak = peaks.products.get(kind) or peaks.products.get("f32", 0.0)
        if not peak:
            return None
        total += (n_tokens * n - (n_tokens - 1) * cost.once.get(CPU, {}).get(kind, 0.0)) / peak
    return total


def _prompt(cost: TokenCost, peaks: Peaks, n_ubatch: int) -> Speed:
    name = f"prompt, micro-batches of {n_ubatch}"
    if any(device != CPU for device in cost.weights):
        return Speed(name, None, "products of GPUs are not measured")
    computing = _computing(cost, peaks, n_ubatch) or 0.0
    reading = cost.batch_weights.get(CPU, 0) / peaks.read_all
    if reading > computing:
        return Speed(name, n_ubatch / reading, "memory bandwidth: a larger -ub reads the weights less often")
    kinds = cost.products.get(CPU, {})
    main = max(kinds, key=lambda kind: kinds[kind] / (peaks.products.get(kind) or 1.0), default="")
    return Speed(name, n_ubatch / computing if computing else None, f"products of {main}" if main else "nothing known")


def _result(name: str, seconds: Mapping[str, float], n_tokens: int) -> Speed:
    total = sum(seconds.values())
    if not total:
        return Speed(name, None, "nothing is read")
    limit = max(seconds, key=lambda what: seconds[what])
    share = f" ({100 * seconds[limit] / total:.0f} % of the time)" if len(seconds) > 1 else ""
    return Speed(name, n_tokens / total, limit + share)
