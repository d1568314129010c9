"""Divide a model into pipeline stages: their runner, their shares, their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ikcli.engine.pipeline.driver import STAGE, PipelineRunner, Supervise
from ikcli.engine.pipeline.part import StageRunner
from ikcli.engine.pipeline.split_points import find_split_points
from ikcli.engine.pipeline.supervisor import supervise_here
from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.programs import Graphs
from ikcli.engine.plan.sizes import Sizes
from ikcli.engine.run.cpu_device import CpuDevice
from ikcli.engine.run.model import Model
from ikcli.engine.run.run_device import cache_bytes
from ikcli.engine.run.runner import Runner
from ikcli.models import GraphConfig
from ikcli.settings.fleet import BatchConfig
from ikcli.settings.run import RunConfig


def share_evenly(fleet: BatchConfig) -> tuple[float, ...]:
    """Return no shares: stages on equal machines need none."""
    return ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages of a model are started; by default as processes of this machine.

    `supervise(config, bytes of each stage)` starts them. `shares` returns how much of the model each one gets. In the
    process of a stage, `stage` holds the split points of the model and the index of the stage.
    """

    supervise: Supervise = supervise_here
    shares: Callable[[BatchConfig], tuple[float, ...]] = share_evenly
    stage: tuple[tuple[int, ...], int] | None = None

    def runner(
        self, config: RunConfig, sizes: Sizes, cfg: GraphConfig, model: Model, graphs: Graphs
    ) -> tuple[Runner, RunConfig]:
        """Return the runner of all stages, or of this one, and its settings: local stages share the threads."""
        if self.stage is not None:
            return StageRunner(CpuDevice(max(config.n_threads, config.n_threads_batch)), *self.stage), config
        if config.fleet.ray in (None, "local"):
            n = config.fleet.stages
            config = replace(
                config, n_threads=max(1, config.n_threads // n), n_threads_batch=max(1, config.n_threads_batch // n)
            )
        split_points = find_split_points(
            config, model, graphs, lambda c: cache_bytes(c, c.rows(cfg.n_ctx, cfg.n_seq, cfg.n_window))
        )
        return PipelineRunner(config, sizes, split_points, self.supervise), config


LOCAL = Pipeline()


def stage_memory(config: RunConfig, machine: Machine, parts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the RAM of each stage: that of a described machine, or what the other stages leave on this one.

    Return an empty dict for a cluster, whose memory is unknown.
    """
    sizes = {name: sum(p.values()) for name, p in parts.items() if name.startswith(STAGE)}
    if machine.ram is None or not (machine.described or config.fleet.ray in (None, "local")):
        return {}
    if machine.described:
        return dict.fromkeys(sizes, machine.ram)
    return {name: max(0, machine.ram - sum(sizes.values()) + size) for name, size in sizes.items()}
