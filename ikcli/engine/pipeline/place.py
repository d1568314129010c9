"""The runner of a model in stages, or of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ikcli.engine.pipeline.cuts import find_cuts
from ikcli.engine.pipeline.driver import STAGE, StagedRunner
from ikcli.engine.pipeline.part import StageRunner
from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.programs import Graphs
from ikcli.engine.plan.sizes import Sizes
from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.model import Model
from ikcli.engine.run.run_device import cache_bytes
from ikcli.engine.run.runner import Runner
from ikcli.models import GraphConfig
from ikcli.settings.run import RunConfig


def staged(
    config: RunConfig,
    sizes: Sizes,
    cfg: GraphConfig,
    model: Model,
    graphs: Graphs,
    stage: tuple[tuple[int, ...], int] | None,
) -> tuple[Runner, RunConfig]:
    """The runner of all stages, or of this one (cuts, index); on one machine the stages share its threads."""
    if stage is not None:
        return StageRunner(CpuDevice(max(config.n_threads, config.n_threads_batch)), *stage), config
    if config.fleet.ray in (None, "local"):
        n = config.fleet.stages
        config = replace(
            config, n_threads=max(1, config.n_threads // n), n_threads_batch=max(1, config.n_threads_batch // n)
        )
    cuts = find_cuts(config, model, graphs, lambda c: cache_bytes(c, c.rows(cfg.n_ctx, cfg.n_seq, cfg.n_window)))
    return StagedRunner(config, sizes, cuts), config


def stage_memory(config: RunConfig, machine: Machine, parts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """RAM for each stage: of a described machine, or what the others leave of this one; not known of a cluster."""
    sizes = {name: sum(p.values()) for name, p in parts.items() if name.startswith(STAGE)}
    if machine.ram is None or not (machine.described or config.fleet.ray in (None, "local")):
        return {}
    if machine.described:
        return dict.fromkeys(sizes, machine.ram)
    return {name: max(0, machine.ram - sum(sizes.values()) + size) for name, size in sizes.items()}
