"""How a model is divided into pipeline stages: their runner, their shares, their memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ikcli.engine.pipeline.cuts import find_cuts
from ikcli.engine.pipeline.driver import STAGE, StagedRunner, Supervise
from ikcli.engine.pipeline.part import StageRunner
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
    """Return the shares of stages on equal machines: none are needed."""
    return ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the stages of a model are started. The default are processes of this machine.

    `supervise(config, bytes of each stage)` starts them, `shares` says how much of the model each gets. In the process
    of a stage, `stage` has the split points of the model and the number of the stage.
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
        cuts = find_cuts(config, model, graphs, lambda c: cache_bytes(c, c.rows(cfg.n_ctx, cfg.n_seq, cfg.n_window)))
        return StagedRunner(config, sizes, cuts, self.supervise), config


LOCAL = Pipeline()


def stage_memory(config: RunConfig, machine: Machine, parts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the RAM of each stage: that of a described machine, or what the others leave of this one.

    Empty for a cluster, of which nothing is known.
    """
    sizes = {name: sum(p.values()) for name, p in parts.items() if name.startswith(STAGE)}
    if machine.ram is None or not (machine.described or config.fleet.ray in (None, "local")):
        return {}
    if machine.described:
        return dict.fromkeys(sizes, machine.ram)
    return {name: max(0, machine.ram - sum(sizes.values()) + size) for name, size in sizes.items()}
