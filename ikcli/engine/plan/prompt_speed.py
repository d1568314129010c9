"""Predict how fast prompts are, with experts in RAM computed by the CPU or copied to a GPU in every micro-batch.

A micro-batch of n tokens takes, at an empty cache and without what is not a product:

* weights on a GPU: 2 n multiplications and additions of each weight, at the GPU's speed in products; several GPUs take
  turns;
* experts on the CPU: the same for the chosen experts, or reading all of them from RAM, whichever is slower;
* experts copied to a GPU: copying all of them over the bus, or the products there, whichever is slower, since copies
  overlap with products.

Speeds come from `--device-spec`, else they are assumed: those of the largest card of a compute capability with its
usual bus, and of the threads of the run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ikcli.backends.cuda.device import DeviceInfo
from ikcli.engine.plan.device_plan import described_info
from ikcli.engine.plan.devices import GpuFacts, Machine
from ikcli.engine.plan.placement import CPU
from ikcli.engine.plan.planner import Planner, RunPlan

GPU_OPS_PER_SM = 1.45e12
"""Products of quantized types with large micro-batches: 195 TOP/s of 132 SMs (q4_K, measured; docs/gpu.md)."""
CPU_OPS_PER_THREAD, CPU_READ = 1.5e11, 6e10
"""Assumed: products per thread (AVX-512 with 8-bit products; AVX2 has about half), bytes per second from RAM."""
BUS = {8: 2.5e10}  # by major compute capability: PCIe 4.0 x16; later ones have PCIe 5.0
NEWER_BUS = 5.5e10
PINNED, UNPINNED = 0.8, 0.4
"""Shares of the bus that copies reach (measured): memory can be pinned up to half of the RAM."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Operations of products and bytes per second; `bus` is what copies reach."""

    gpu_ops: float
    bus: float
    cpu_ops: float
    cpu_read: float


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplications and additions per token of weights on GPUs, of the CPU, and of experts in RAM; their bytes."""

    gpu: float
    cpu: float
    experts: float
    expert_bytes: int


def work_of(planner: Planner, plan: RunPlan) -> Work:
    """Return the work of a token of a prompt; its last layer's output matrix is not used."""
    hp, model = planner.hp, planner.model(plan.config, plan.placement)
    ops: dict[str, float] = defaultdict(float)
    expert_bytes = 0
    for t in planner.file.tensors.values():
        if len(t.shape) < 2 or not t.name.startswith("blk.") or t.name not in plan.placement.buffer_of:
            continue
        routed = "_exps." in t.name and hp.n_expert > 0
        device = plan.placement.buffer_of[t.name]
        part = "experts" if routed and device == CPU else "cpu" if device == CPU else "gpu"
        ops[part] += 2 * t.n_elements * (hp.n_expert_used / hp.n_expert if routed else 1)
        if part == "experts":
            expert_bytes += model.n_bytes([t.name])
    return Work(ops["gpu"], ops["cpu"], ops["experts"], expert_bytes)


def speeds_of(machine: Machine, n_threads: int, expert_bytes: int) -> Speeds:
    """Return the speeds of the first GPU and of the CPU."""
    gpu, cpu = machine.gpus[0], machine.cpu_rates
    pinned = machine.ram is None or 2 * expert_bytes <= machine.ram
    return Speeds(
        gpu.rates.ops or GPU_OPS_PER_SM * _info(gpu).n_sm,
        (PINNED if pinned else UNPINNED) * (gpu.rates.bandwidth or BUS.get(_info(gpu).cc[0], NEWER_BUS)),
        cpu.ops or CPU_OPS_PER_THREAD * n_threads,
        cpu.bandwidth or CPU_READ,
    )


def _info(gpu: GpuFacts) -> DeviceInfo:
    return gpu.info or described_info(gpu)


def seconds(work: Work, speeds: Speeds, n_tokens: int, *, streamed: bool) -> float:
    """Return the seconds of a micro-batch."""
    experts = n_tokens * work.experts
    if streamed:
        moved = max(work.expert_bytes / speeds.bus, experts / speeds.gpu_ops)
    else:
        moved = max(work.expert_bytes / speeds.cpu_read, experts / speeds.cpu_ops)
    return n_tokens * (work.gpu / speeds.gpu_ops + work.cpu / speeds.cpu_ops) + moved


def speed_lines(planner: Planner, plan: RunPlan, least: int) -> list[str]:
    """Return what prompts gain from copying experts, which is done from `least` tokens on, and what is assumed."""
    config, machine = plan.config, planner.machine
    work = work_of(planner, plan)
    n = min(config.n_ubatch, plan.memory.n_ctx)
    speeds = speeds_of(machine, config.n_threads_batch, work.expert_bytes)
    with_, without = (n / seconds(work, speeds, n, streamed=on) for on in (True, False))
    now = "" if n >= least else f" (only from -ub {least} on)"
    gpu, cpu = machine.gpus[0], machine.cpu_rates
    share = speeds.bus / (gpu.rates.bandwidth or BUS.get(_info(gpu).cc[0], NEWER_BUS))
    facts = [
        f"{gpu.name} {speeds.gpu_ops / 1e12:.3g} TOP/s ({_origin(gpu.rates.ops)})",
        f"bus {speeds.bus / share / 1e9:.3g} GB/s ({_origin(gpu.rates.bandwidth)}), of which copies reach {share:.1f}",
        f"CPU {speeds.cpu_ops / 1e12:.3g} TOP/s ({_origin(cpu.ops, f'{config.n_threads_batch} threads')})",
        f"RAM {speeds.cpu_read / 1e9:.3g} GB/s ({_origin(cpu.bandwidth)})",
    ]
    return [
        f"prompts, -ub {n}: about {with_:.0f} tokens/s with experts copied to the GPU{now}, {without:.0f} with experts "
        "on the CPU (empty cache, products and copies only)",
        f"speeds: {'; '.join(facts)}",
    ]


def _origin(given: float | None, why: str = "") -> str:
    return "given" if given else f"assumed, {why}" if why else "assumed"
