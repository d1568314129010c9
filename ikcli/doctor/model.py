"""What the roofs of a machine allow a model: at most so many tokens per second, and what limits them.

Generation reads every weight that a token uses, and what is cached of its sequence. Prompts multiply; a micro-batch
reads the weights once for all its tokens. Attention is counted as reading the cache, its products are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ikcli.backends.cpu.lower import activation_kind
from ikcli.doctor.roofline import Roofs
from ikcli.engine.plan.placement import CPU
from ikcli.engine.plan.planner import Planner, RunPlan
from ikcli.gguf.types import TYPES
from ikcli.graph import Per
from ikcli.models import HParams
from ikcli.settings.run import RunConfig

_EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Per token and device: bytes of weights read when generating, multiplications and additions by kind of product,
    and of weights that a large micro-batch reads in all. `cache`: bytes per cached position, `state` per token."""

    weights: Mapping[str, int]
    products: Mapping[str, Mapping[str, float]]
    batch_weights: Mapping[str, int]
    cache: Mapping[str, float]
    state: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second at most, and what limits; None where a roof of a device is not known."""

    name: str
    tokens_per_s: float | None
    limit: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A planned run of the model: what it needs and what the roofs allow."""

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


def model_report(planner: Planner, config: RunConfig, roofs: Roofs | None) -> ModelReport:
    """Plan the run and set it against the roofs (None: not measured, no speeds)."""
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
        speeds=tuple(speeds(cost, roofs, n_ubatch, n_ctx)) if roofs is not None else (),
    )


def token_cost(planner: Planner, plan: RunPlan) -> TokenCost:
    """What one token costs by the placement of the plan."""
    hp, tensors = planner.hp, planner.file.tensors
    weights, batch = defaultdict[str, int](int), defaultdict[str, int](int)
    products: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    tied = "output.weight" not in tensors
    for t in tensors.values():
        device = plan.placement.buffer_of.get(t.name, CPU)
        if t.name in _EMBEDDINGS and not (tied and t.name == _EMBEDDINGS[0]):
            continue  # one row
        share = _share(hp, t.name)
        weights[device] += round(t.n_bytes * share)
        batch[device] += t.n_bytes
        if len(t.shape) > 1:
            kind = activation_kind(t.type).replace("q8", "i8")
            products[device][kind] += 2 * t.n_elements * share
    cache: dict[str, float] = defaultdict(float)
    state = defaultdict[str, int](int)
    for c, n_bytes in plan.caches.items():
        device = plan.placement.cache[c.il] if 0 <= c.il < len(plan.placement.cache) else CPU
        if c.per is Per.CELL:
            cache[device] += n_bytes / plan.memory.n_ctx
        else:
            state[device] += n_bytes
    return TokenCost(dict(weights), {d: dict(p) for d, p in products.items()}, dict(batch), dict(cache), dict(state))


def _share(hp: HParams, name: str) -> float:
    """The part of a tensor that one token uses: of experts, those that are chosen."""
    return hp.n_expert_used / hp.n_expert if "_exps." in name and hp.n_expert else 1.0


def speeds(cost: TokenCost, roofs: Roofs, n_ubatch: int, n_ctx: int) -> list[Speed]:
    """Prompts at an empty cache, generation at an empty and at a full one."""
    return [
        _prompt(cost, roofs, n_ubatch),
        _generation(cost, roofs, 0, "generation, empty cache"),
        _generation(cost, roofs, n_ctx, f"generation, {n_ctx} tokens cached"),
    ]


def _bandwidth(roofs: Roofs, device: str) -> float | None:
    if device == CPU:
        return roofs.read_all
    return next((gpu.memory for gpu in roofs.gpus if gpu.name == device), None)


def _generation(cost: TokenCost, roofs: Roofs, depth: int, name: str) -> Speed:
    seconds: dict[str, float] = {}
    for device in {*cost.weights, *cost.cache, *cost.state}:
        bandwidth = _bandwidth(roofs, device)
        n_bytes = cost.weights.get(device, 0) + depth * cost.cache.get(device, 0.0) + cost.state.get(device, 0)
        if not n_bytes:
            continue
        if bandwidth is None:
            return Speed(name, None, f"the bandwidth of {device} was not measured")
        seconds[f"memory of {device}" if device != CPU else "memory bandwidth"] = n_bytes / bandwidth
    computing = _computing(cost, roofs, 1)
    if computing is not None and sum(seconds.values()) < computing:
        return Speed(name, 1 / computing, "products")
    return _result(name, seconds, 1)


def _computing(cost: TokenCost, roofs: Roofs, n_tokens: int) -> float | None:
    """Seconds of the products on the CPU; of GPUs nothing is known."""
    total = 0.0
    for kind, n in cost.products.get(CPU, {}).items():
        peak = roofs.products.get(kind) or roofs.products.get("f32", 0.0)
        if not peak:
            return None
        total += n_tokens * n / peak
    return total


def _prompt(cost: TokenCost, roofs: Roofs, n_ubatch: int) -> Speed:
    name = f"prompt, micro-batches of {n_ubatch}"
    if any(device != CPU for device in cost.weights):
        return Speed(name, None, "products of GPUs are not measured")
    computing = _computing(cost, roofs, n_ubatch) or 0.0
    reading = cost.batch_weights.get(CPU, 0) / roofs.read_all
    if reading > computing:
        return Speed(name, n_ubatch / reading, "memory bandwidth: a larger -ub reads the weights less often")
    kinds = cost.products.get(CPU, {})
    main = max(kinds, key=lambda kind: kinds[kind] / (roofs.products.get(kind) or 1.0), default="")
    return Speed(name, n_ubatch / computing if computing else None, f"products of {main}" if main else "nothing known")


def _result(name: str, seconds: Mapping[str, float], n_tokens: int) -> Speed:
    total = sum(seconds.values())
    if not total:
        return Speed(name, None, "nothing is read")
    limit = max(seconds, key=lambda what: seconds[what])
    share = f" ({100 * seconds[limit] / total:.0f} % of the time)" if len(seconds) > 1 else ""
    return Speed(name, n_tokens / total, limit + share)
