"""Print `ik plan`: the log lines of a run that is not started, and a verdict per device with suggestions.

Every suggestion is planned in full before it is made. Only the context of a described GPU is an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from ikcli.backends.cuda import upload
from ikcli.engine.experts.residency import expert_places, place_lines
from ikcli.engine.plan.device_memory import MemoryPlan
from ikcli.engine.plan.devices import CONTEXT_BYTES, Machine
from ikcli.engine.plan.expert_plan import disk_options
from ikcli.engine.plan.fit import fit
from ikcli.engine.plan.graph_rules import FLOAT_TYPES
from ikcli.engine.plan.placement import CPU, offload_lines, offload_threshold, placement_sentence
from ikcli.engine.plan.planner import MIB, Planner, RunPlan
from ikcli.engine.plan.prompt_speed import speed_lines
from ikcli.engine.run import session_log
from ikcli.errors import IkError
from ikcli.quant.formats import get_format
from ikcli.settings.run import RunConfig

_CELLS = 256
_MAX_PROPOSALS = 4
_MAX_STEPS = 4
_MIN_UBATCH = 128


def plan_lines(planner: Planner, plan: RunPlan) -> list[str]:
    """Return settings, buffers by device and totals in the form that a run logs them."""
    model, config = planner.model(plan.config), plan.config
    lines = session_log.setup_lines(config, model, plan.graph_config, config.n_batch)
    if plan.placement.devices:
        lines += offload_lines(planner.hp.n_layer, -1 if config.n_gpu_layers is None else config.n_gpu_layers)
        lines += _machine_lines(planner.machine)
    memory = plan.memory
    return lines + session_log.buffer_lines(
        config, plan.caches, memory.n_ctx, memory.parts, plan.n_nodes, plan.n_splits, memory.free
    )


def _machine_lines(machine: Machine) -> list[str]:
    lines = []
    for gpu in machine.gpus:
        if gpu.info is not None:
            lines.append(f"{gpu.name}: {gpu.info.name}, {gpu.total / MIB:.0f} MiB, {gpu.free / MIB:.0f} MiB free")
        else:
            taken = min(CONTEXT_BYTES, gpu.total) / MIB
            lines.append(
                f"{gpu.name}: described, {gpu.total / MIB:.0f} MiB, of which {taken:.0f} MiB are taken as used by the "
                "CUDA context (an estimate)"
            )
    return lines


def verdict_lines(planner: Planner, plan: RunPlan) -> list[str]:
    """Describe what is on the GPU, then say for every device whether its memory suffices, and what to change if not."""
    sentence, slots = placement_sentence(plan.placement.buffer_of), planner.expert_slots(plan.config)
    lines = [sentence] if sentence else []
    lines += [slots.line()] if slots is not None else []
    lines += [plan.vram.line()] if plan.vram is not None else []
    lines += [plan.expert_nodes.line()] if plan.expert_nodes.counts else []
    model = planner.model(plan.config, plan.placement)
    lines += place_lines(expert_places(model, plan.placement.buffer_of, slots, plan.vram))
    memory = plan.memory
    lines += [_device_line(memory, device) for device in memory.parts if device in memory.free]
    if not memory.fits():
        lines += _help(planner, plan)
    return lines + _prompt_lines(planner, plan)


def _prompt_lines(planner: Planner, plan: RunPlan) -> list[str]:
    """Say where prompts that need experts in RAM are computed."""
    config, hp, model = plan.config, planner.hp, planner.model(plan.config, plan.placement)
    in_ram = [name for name, buffer in plan.placement.buffer_of.items() if "_exps." in name and buffer == CPU]
    if not plan.placement.devices or not in_ram or config.n_gpu_layers == 0:
        return []
    head = "prompts: experts in RAM are computed on the CPU"
    if planner.expert_slots(config) is not None:
        return [f"{head}, because {disk_options(config)[0]} reads them from disk"]
    least = math.ceil(offload_threshold(config.offload_min_batch, hp.n_expert, hp.n_expert_used))
    types = {model.specs[name].type for name in in_ram}
    without = sorted(get_format(t).name for t in types if not upload.has_kernels(t))
    if not all(dict(config.offload_policy).get(op, True) for op in ("ALL", "MUL_MAT_ID", "MOE_FUSED_UP_GATE")):
        return [f"{head}, because -op says so"]
    if without:
        return [f"{head}, because GPUs have no kernels for {', '.join(without)}"]
    speeds = speed_lines(planner, plan, least)
    if config.n_ubatch < least:
        why = f"because -ub {config.n_ubatch} is below {least} tokens; from -ub {least} on a GPU does it"
        return [*speeds, f"{head}, {why}"]
    return [*speeds, f"prompts: pieces of {least} tokens and more are computed on GPUs, with experts copied from RAM"]


def _device_line(memory: MemoryPlan, device: str) -> str:
    needed, free = memory.total(device), memory.free[device]
    text = f"{device} needs {needed / MIB:.2f} MiB, {free / MIB:.2f} MiB are available"
    if needed <= free:
        return f"fits: {text}, margin {(free - needed) / MIB:.2f} MiB"
    return f"does not fit: {text}, {(needed - free) / MIB:.2f} MiB too few"


def _help(planner: Planner, plan: RunPlan) -> list[str]:
    """Suggest changes of options with which everything fits."""
    found: list[str] = []
    for text in islice(proposals(planner, plan), _MAX_PROPOSALS):
        if text.removeprefix("-ngl 99 ") not in found:  # --fit may propose the same
            found.append(text)
    if found:
        return [f"would fit with {', or with '.join(found)}"]
    return ["no change of options is enough; use a smaller quantization of the model, or more memory"]


def proposals(planner: Planner, plan: RunPlan) -> Iterator[str]:
    """Return options, each of which alone makes the run fit, the least harmful first."""
    if not plan.memory.gpus_fit():
        yield from _fewer_experts(planner, plan)
    yield from _smaller_batch(planner, plan)
    yield from _smaller_cache_type(planner, plan)
    yield from _smaller_context(planner, plan)
    if plan.placement.devices:
        yield from _by_fit(planner, plan)


def _fits(planner: Planner, plan: RunPlan, **changes: Any) -> bool:
    return planner.fits(replace(plan.config, **changes))


def _fewer_experts(planner: Planner, plan: RunPlan) -> Iterator[str]:
    """Find the fewest first blocks whose experts have to move to the CPU."""
    short = {device: plan.memory.short(device) for device in plan.placement.devices}
    moved: dict[int, dict[str, int]] = {}
    for name, n_bytes in planner.gpu_weights(plan.config).items():
        buffer = plan.placement.buffer_of[name]
        if "_exps." in name and buffer != CPU and name not in plan.placement.rules.buffer_of:
            by_device = moved.setdefault(int(name.split(".")[1]), {})
            by_device[buffer] = by_device.get(buffer, 0) + n_bytes
    for il, by_device in sorted(moved.items()):
        for device, n_bytes in by_device.items():
            short[device] -= n_bytes
        if max(short.values()) <= 0 and _fits(planner, plan, n_cpu_moe=il + 1):
            yield f"--n-cpu-moe {il + 1}"
            return


def _smaller_batch(planner: Planner, plan: RunPlan) -> Iterator[str]:
    """Try half the physical batch, a quarter, and so on."""
    n = plan.config.n_ubatch // 2
    while n >= _MIN_UBATCH:
        if _fits(planner, plan, n_ubatch=n):
            yield f"-ub {n}"
            return
        n //= 2


def _smaller_cache_type(planner: Planner, plan: RunPlan) -> Iterator[str]:
    smaller = _smaller_types(planner, plan.config)
    if smaller and _fits(planner, plan, **smaller[1]):
        yield smaller[0]


def _smaller_types(planner: Planner, config: RunConfig) -> tuple[str, dict[str, Any]] | None:
    """Return the options of a cache of half the size, where there is one."""
    if config.type_k not in FLOAT_TYPES or not config.flash_attn:
        return None
    if planner.hp.kv_lora_rank and config.mla:
        return "-ctk q8_0", {"type_k": "q8_0"}
    return "-ctk q8_0 -ctv q8_0", {"type_k": "q8_0", "type_v": "q8_0"}


def _smaller_context(planner: Planner, plan: RunPlan) -> Iterator[str]:
    """Find the largest context by secants: sizes grow almost in proportion to it."""
    best, too_large = 0, plan.config.n_ctx
    for _ in range(_MAX_STEPS):
        n_ctx = _guess(planner, plan, best, too_large) // _CELLS * _CELLS
        if n_ctx <= best:
            break
        if _fits(planner, plan, n_ctx=n_ctx):
            best = n_ctx
        else:
            too_large = n_ctx
    if best:
        yield f"-c {best}"


def _guess(planner: Planner, plan: RunPlan, fits: int, too_large: int) -> int:
    """Interpolate between a context that fits (or 0) and one that does not, by the bytes that each lacks."""
    memory = planner.plan(replace(plan.config, n_ctx=too_large)).memory
    least = planner.plan(replace(plan.config, n_ctx=max(fits, _CELLS))).memory
    steps = [1.0]
    for device in memory.parts:
        growth = memory.total(device) - least.total(device)
        if memory.short(device):
            steps.append(1 - memory.short(device) / growth if growth > 0 else 0.0)
    share = max(min(steps), 0.0)
    return min(int(max(fits, _CELLS) + (too_large - max(fits, _CELLS)) * share), too_large - 1)


def _by_fit(planner: Planner, plan: RunPlan) -> Iterator[str]:
    """Return the choice of `--fit`."""
    given = replace(plan.config, n_cpu_moe=0, n_gpu_layers=None, tensor_split=())
    try:
        found = fit(planner, given, margin=0)
    except IkError:
        return
    if found.plan.memory.fits():
        yield found.options
    smaller = _smaller_types(planner, given)
    if found.config.n_gpu_layers != planner.hp.n_layer + 1 and smaller and not _fits(planner, plan, **smaller[1]):
        found = fit(planner, replace(given, **smaller[1]), margin=0)
        if found.plan.memory.fits():
            yield f"{smaller[0]} {found.options}"
