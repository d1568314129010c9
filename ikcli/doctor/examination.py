"""The whole examination: facts, measured rooflines, GPUs, kernel cache, an optional model, and advice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ikcli.bench.environment import software
from ikcli.doctor.advice import Advice, machine_advice, model_advice
from ikcli.doctor.inventory import Gpu, take_inventory
from ikcli.doctor.machine import KernelCache, MachineMemory, Processor, kernel_cache, memory, processor
from ikcli.doctor.model import ModelReport, model_report
from ikcli.doctor.roofline import Peaks, measure
from ikcli.engine.plan.planner import Planner
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything found; `roofs` is None if nothing was measured, `no_gpu` says why there is no GPU."""

    software: dict[str, str | None]
    processor: Processor
    memory: MachineMemory
    gpus: tuple[Gpu, ...]
    no_gpu: str | None
    cache: KernelCache
    roofs: Peaks | None
    model: ModelReport | None
    notices: tuple[str, ...]
    advice: tuple[Advice, ...]


def examine(
    model: Path | None = None,
    *,
    n_ctx: int = 0,
    n_ubatch: int = 512,
    n_threads: int = 0,
    quick: bool = False,
    tell: Callable[[str], None] = lambda what: None,
) -> Examination:
    """Inspect the machine, measure it unless `quick`, plan a run of `model`; `tell` gets messages before slow steps."""
    cpu, ram, cache, inventory = processor(), memory(), kernel_cache(), take_inventory()
    threads = n_threads or cpu.threads
    planned = (
        _plan(model, n_ctx, n_ubatch, threads) if model is not None else None
    )  # before measuring, to report a bad file
    roofs = None
    if not quick:
        tell(f"measuring products and memory with {threads} threads")
        roofs = measure(threads, model)
    advice = machine_advice(cpu, ram, cache, roofs)
    found: ModelReport | None = None
    notices: tuple[str, ...] = ()
    if planned is not None:
        from ikcli.engine.run.repacking import repacked_specs

        found, notices = model_report(planned.planner, planned.config, roofs), planned.notices
        file = planned.planner.file
        repackable = sum(file.tensors[name].n_bytes for name in repacked_specs(file.tensors, planned.planner.hp))
        advice += model_advice(found, ram, repackable, planned.config.mmap)
    return Examination(
        software(), cpu, ram, tuple(inventory.gpus), inventory.no_gpu, cache, roofs, found, notices, tuple(advice)
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    planner: Planner
    config: RunConfig
    notices: tuple[str, ...]


def _plan(model: Path, n_ctx: int, n_ubatch: int, threads: int) -> _Planned:
    from ikcli.engine.plan.startup import prepare

    config = RunConfig(
        command="plan", model=model, n_ctx=n_ctx, n_ubatch=n_ubatch, n_batch=max(2048, n_ubatch),
        n_threads=threads, n_threads_batch=threads,
    )  # fmt: skip
    startup = prepare(config)
    return _Planned(startup.planner, startup.config, (*startup.notices, *startup.warnings))
