"""Plan from the settings of a run which experts live on disk, and with how much RAM."""

from __future__ import annotations

from collections.abc import Iterable

from ikcli.engine.plan.expert_slots import ExpertSlots, on_disk, row_tables, slots_for
from ikcli.engine.plan.placement import CPU, Placement
from ikcli.engine.run.expert_steps import ExpertSteps
from ikcli.engine.run.model import Model
from ikcli.errors import UsageError
from ikcli.graph import Graph
from ikcli.settings.run import RunConfig

FILLED = 0.95  # of free RAM, what a run with --prefetch-experts takes
WORK_SHARE, WORK_BYTES = 1 / 8, 1 << 30  # of free RAM, what is left for work memory: a share, but at most these bytes
READERS = 4


def disk_options(config: RunConfig) -> list[str]:
    """Return the given options that keep experts on disk."""
    wanted = {"--expert-ram": bool(config.expert_ram), "--prefetch-experts": config.prefetch_experts}
    return [option for option, on in wanted.items() if on]


def expert_slots(
    config: RunConfig,
    model: Model,
    placement: Placement,
    graphs: Iterable[Graph],
    ram: int | None,
    static_bytes: int,
) -> ExpertSlots | None:
    """Return the slots that the options ask for; None if no experts are in RAM.

    `graphs`: those of the session. `static_bytes`: weights and cache in RAM if all experts were there.
    """
    layers = on_disk(model, (name for name, buffer in placement.buffer_of.items() if buffer == CPU))
    if not layers:
        return None
    tables = {name: n for name, n in row_tables(graphs, model).items() if placement.buffer_of.get(name, CPU) == CPU}
    if config.expert_ram:
        return slots_for(layers, config.expert_ram, tables=tables)
    if ram is None:
        raise UsageError("--prefetch-experts: the free memory is not known; give --expert-ram GIB")
    others = static_bytes - model.n_bytes(m.name for layer in layers for m in layer.matrices) - sum(tables.values())
    work = min(int(WORK_SHARE * ram), WORK_BYTES)
    return slots_for(layers, max(int(FILLED * ram) - others - work, 0), "--prefetch-experts: ", tables)


def expert_steps(config: RunConfig, slots: ExpertSlots | None) -> tuple[ExpertSteps | None, list[str]]:
    """Return what runs programs with experts on disk, and warnings about options without effect."""
    if slots is None:
        return None, [f"{option} has no effect: no routed experts stay in RAM" for option in disk_options(config)]
    return ExpertSteps(slots, config.prefetch_experts_threads or READERS, fill=not config.defer_experts), []
