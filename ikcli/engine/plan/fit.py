"""Choose options for `--fit`: as many tensors as possible in GPU memory, with a free margin on every GPU.

If everything fits, everything goes to the GPUs. Otherwise the routed experts of as few first blocks as possible stay on
the CPU. Blocks are assigned to the GPUs in order, and each GPU is filled before the next, unless `-ts` gives shares.
The space left on a GPU then takes up and gate, or down, of one more block. If even attention and dense parts do not
fit, the first blocks stay on the CPU entirely. Candidates are compared by exact bytes; the chosen one is planned in
full. What is left after that, `with_cache` gives to the cache of experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ikcli.engine.plan.cache_slots import cached_layers, largest_cache
from ikcli.engine.plan.expert_plan import disk_options
from ikcli.engine.plan.offload import EMBEDDING, OUTPUT
from ikcli.engine.plan.placement import CPU, WITH_OUTPUT, device_shares, split_layers
from ikcli.engine.plan.planner import MIB, Planner, RunPlan
from ikcli.engine.run.run_device import RESERVE_BYTES
from ikcli.errors import IkError
from ikcli.settings.run import RunConfig

_BLOCK = re.compile(r"blk\.(\d+)\.")
_ROUNDS = 6
_FIRST_GUESS = 1 << 30  # bytes of work memory, until the first plan gives the exact number


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings that fit, the options that produce them, and the plan."""

    config: RunConfig
    options: str
    plan: RunPlan


@dataclass(frozen=True, slots=True)
class _Costs:
    """Bytes on a GPU: per block without its routed experts, of these experts, of the output, and already placed."""

    block: list[int]
    up_gate: list[int]
    down: list[int]
    output: int
    fixed: dict[str, int]

    def experts(self, il: int) -> int:
        return self.up_gate[il] + self.down[il]


@dataclass(frozen=True, slots=True)
class _Choice:
    """Blocks per GPU (the output counts for the last GPU in use), blocks with experts on the CPU, and extra rules."""

    n_gpu_layers: int
    counts: tuple[int, ...]
    on_cpu: tuple[int, ...]
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Dealt:
    """An assignment of blocks: blocks per GPU, the GPU of every block (-1 = CPU), and bytes left on each GPU."""

    n_gpu_layers: int
    counts: tuple[int, ...]
    home: list[int]
    left: list[int]
    on_cpu: tuple[int, ...]


def fit(planner: Planner, config: RunConfig, margin: int | None = None) -> Fit:
    """Choose `-ngl`, `-ts` and `--n-cpu-moe`; raise IkError if the GPUs cannot hold even one block.

    `margin` is in bytes, by default that of `--fit-margin`. Given `-ot` rules and `-ts` are kept; `-ngl` is an upper
    bound.
    """
    margin = max(config.fit_margin * MIB if margin is None else margin, RESERVE_BYTES)
    config = replace(config, fit=False)
    whole = replace(config, n_gpu_layers=_most_layers(planner, config))
    if planner.may_fit(whole, margin, gpus_only=True):
        plan = planner.plan(whole)
        if plan.memory.gpus_fit(margin):
            return Fit(whole, f"-ngl {_ngl_text(planner, whole)}", plan)
    names = planner.place(whole).devices
    reserve = dict.fromkeys(names, margin + _FIRST_GUESS)
    tried: list[Fit] = []
    while len(tried) < _ROUNDS:
        found = _apply(planner, whole, _choose(planner, whole, reserve))
        if any(found == fit.config for fit in tried):
            break
        tried.append(Fit(found, _options(planner, config, found), planner.plan(found)))
        work = {name: tried[-1].plan.memory.parts.get(name, {}).get("compute", 0) for name in names}
        reserve = {name: margin + (n_bytes or max(work.values())) for name, n_bytes in work.items()}
    good = [fit for fit in tried if fit.plan.memory.gpus_fit(margin)]
    if not good:
        raise IkError("--fit found no placement that fits; use a smaller -c or -ub, -ctk q8_0, or --fit-margin 0")
    return max(good, key=lambda fit: fit.plan.on_gpus())


def with_cache(planner: Planner, found: Fit, margin: int) -> Fit:
    """Return what was found with `--expert-cache` as large as fits beside it; unchanged if that is not worth it.

    `margin`: bytes that stay free on every GPU. The size is the same for all GPUs whose layers have experts in RAM. It
    is worth it if each of these layers gets a slot.
    """
    config, memory = found.config, found.plan.memory
    if disk_options(config) or planner.adapters.specs() or config.fleet.stages > 1:
        return found
    margin = max(margin, RESERVE_BYTES)
    layers, _ = cached_layers(planner.model(config, found.plan.placement), found.plan.placement)
    of = {device: [x for x in layers if x.device == device] for device in memory.parts}
    devices = [device for device in memory.free if of.get(device)]
    if not devices:
        return found
    free = min(memory.free[d] - memory.total(d) - margin for d in devices)
    size = min(free, max(largest_cache(of[d]) for d in devices) + MIB - 1) // MIB
    while size > 0:
        plan = planner.plan(replace(config, expert_cache=size))
        if plan.vram is None or len(plan.vram.layers) < len(layers):
            break
        short = max(plan.memory.short(d, margin) for d in plan.placement.devices)
        if not short:
            return Fit(replace(config, expert_cache=size), f"{found.options} --expert-cache {size}", plan)
        size -= -(-short // MIB)
    return found


def _most_layers(planner: Planner, config: RunConfig) -> int:
    n_all = planner.hp.n_layer + 1
    ngl = config.n_gpu_layers
    return n_all if ngl is None or ngl < 0 else min(ngl, n_all)


def _ngl_text(planner: Planner, config: RunConfig) -> int:
    """Return the text of `-ngl`: by convention 99 means all blocks."""
    ngl = config.n_gpu_layers or 0
    return max(ngl, 99) if ngl > planner.hp.n_layer else ngl


def _costs(planner: Planner, config: RunConfig) -> _Costs:
    n_layer = planner.hp.n_layer
    costs = _Costs([0] * n_layer, [0] * n_layer, [0] * n_layer, 0, {})
    placement = planner.place(config)
    ruled = placement.rules.buffer_of
    costs.fixed.update({device: sum(sizes.values()) for device, sizes in planner.beside.items()})
    output = 0
    for name, n_bytes in planner.gpu_weights(config).items():
        block = _BLOCK.match(name)
        if name in ruled:
            costs.fixed[ruled[name]] = costs.fixed.get(ruled[name], 0) + n_bytes
        elif block is not None and int(block[1]) >= n_layer:  # heads are where the output is
            output += n_bytes
        elif block is not None and "_exps." in name:
            (costs.down if ".ffn_down_" in name else costs.up_gate)[int(block[1])] += n_bytes
        elif block is not None:
            costs.block[int(block[1])] += n_bytes
        elif name.startswith(WITH_OUTPUT) or (name == EMBEDDING and OUTPUT not in planner.file.tensors):
            output += n_bytes
    if not config.no_kv_offload:
        for il, n_bytes in planner.gpu_cache(config).items():
            if il < n_layer:
                costs.block[il] += n_bytes
            else:
                output += n_bytes
    return replace(costs, output=output)


def _choose(planner: Planner, config: RunConfig, reserve: Mapping[str, int]) -> _Choice:
    """Choose the best candidate by arithmetic."""
    costs = _costs(planner, config)
    names = planner.place(config).devices
    free = dict(zip(planner.machine.names, planner.machine.free, strict=True))
    room = [free[name] - reserve[name] - costs.fixed.get(name, 0) for name in names]
    most = config.n_gpu_layers or 0
    if config.tensor_split or config.split_mode == "none":
        shares = device_shares(config, len(names), [free[name] for name in names])
        dealt: Iterator[_Dealt | None] = (_deal_by_shares(costs, room, ngl, shares) for ngl in range(most, 0, -1))
    else:
        dealt = _deals(costs, room, most)
    best = next((d for d in dealt if d is not None), None)
    return _Choice(0, (), ()) if best is None else _fill(costs, best, names)


def _deals(costs: _Costs, room: Sequence[int], most: int) -> Iterator[_Dealt | None]:
    """Yield assignments from best to worst: experts of more and more blocks on the CPU, then whole blocks."""
    n_layer = len(costs.block)
    yield _deal(costs, room, most, 0)
    for il in range(n_layer):
        if costs.experts(il):
            yield _deal(costs, room, most, il + 1)
    for ngl in range(most - 1, 0, -1):
        yield _deal(costs, room, ngl, n_layer)


def _deal(costs: _Costs, room: Sequence[int], ngl: int, n_cpu: int) -> _Dealt | None:
    """Fill the GPUs in order, with the experts of blocks before `n_cpu` on the CPU; None if that does not fit."""
    n_layer, gpu = len(costs.block), 0
    home, left = [-1] * n_layer, list(room)
    items = [(il, costs.block[il] + (costs.experts(il) if il >= n_cpu else 0)) for il in range(n_layer)]
    items = items[max(n_layer - ngl, 0) :] + ([(n_layer, costs.output)] if ngl > n_layer else [])
    counts = [0] * len(room)
    for il, cost in items:
        while gpu < len(left) and left[gpu] < cost:
            gpu += 1
        if gpu == len(left):
            return None
        left[gpu] -= cost
        counts[gpu] += 1
        if il < n_layer:
            home[il] = gpu
    on_cpu = tuple(il for il in range(n_cpu) if costs.experts(il) and home[il] >= 0)
    return _Dealt(ngl, tuple(counts), home, left, on_cpu)


def _deal_by_shares(costs: _Costs, room: Sequence[int], ngl: int, shares: Sequence[float]) -> _Dealt | None:
    """Assign blocks as `-ts` or `-sm none` asks; every GPU holds the experts of as many of its last blocks as fit."""
    split = split_layers(len(costs.block), ngl, shares)
    left = list(room)
    for il, gpu in enumerate(split.blocks):
        if gpu >= 0:
            left[gpu] -= costs.block[il]
    if split.output >= 0:
        left[split.output] -= costs.output
    if any(n < 0 and (gpu in split.blocks or gpu == split.output) for gpu, n in enumerate(left)):
        return None
    on_cpu: list[int] = []
    for gpu in range(len(room)):
        blocks = [il for il in reversed(range(len(split.blocks))) if split.blocks[il] == gpu and costs.experts(il)]
        for i, il in enumerate(blocks):
            if left[gpu] < costs.experts(il):
                on_cpu += blocks[i:]
                break
            left[gpu] -= costs.experts(il)
    return _Dealt(ngl, (), list(split.blocks), left, tuple(sorted(on_cpu)))


def _fill(costs: _Costs, dealt: _Dealt, names: Sequence[str]) -> _Choice:
    """Fill the space left on a GPU with up and gate, or down, of its last block whose experts are on the CPU."""
    rules: list[str] = []
    for gpu, name in enumerate(names):
        block = max((il for il in dealt.on_cpu if dealt.home[il] == gpu), default=-1)
        for pattern, sizes in (("(up|gate|gate_up)", costs.up_gate), ("down", costs.down)):
            if block >= 0 and 0 < sizes[block] <= dealt.left[gpu]:
                rules.append(rf"blk\.{block}\.ffn_{pattern}_exps\.={name}")
                break
    return _Choice(dealt.n_gpu_layers, dealt.counts, dealt.on_cpu, tuple(rules))


def _apply(planner: Planner, config: RunConfig, choice: _Choice) -> RunConfig:
    """Return the settings of a choice."""
    rules, n_cpu = list(choice.rules), max(choice.on_cpu, default=-1) + 1
    moe = {int(name.split(".")[1]) for name in planner.file.tensors if "_exps." in name} & set(
        range(planner.hp.n_layer)
    )
    if set(choice.on_cpu) != {il for il in moe if il < n_cpu and il >= planner.hp.n_layer - choice.n_gpu_layers}:
        blocks = "|".join(str(il) for il in choice.on_cpu)
        rules.append(rf"blk\.({blocks})\.ffn_(up|down|gate|gate_up)_exps\.={CPU}")
        n_cpu = 0
    return replace(
        config,
        n_gpu_layers=choice.n_gpu_layers,
        tensor_split=tuple(map(float, choice.counts)) if len(choice.counts) > 1 else config.tensor_split,
        n_cpu_moe=n_cpu,
        override_tensor=(*config.override_tensor, *rules),
    )


def _options(planner: Planner, before: RunConfig, after: RunConfig) -> str:
    """Return the options that turn the settings `before` into those `after`."""
    parts = [f"-ngl {_ngl_text(planner, after)}"]
    if after.tensor_split != before.tensor_split:
        parts.append(f"-ts {','.join(f'{share:g}' for share in after.tensor_split)}")
    parts += [f'-ot "{rule}"' for rule in after.override_tensor[len(before.override_tensor) :]]
    if after.n_cpu_moe:
        parts.append(f"--n-cpu-moe {after.n_cpu_moe}")
    return " ".join(parts)
