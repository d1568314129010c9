"""Plan one model on one machine for any settings: placement, and bytes per device and part, from the header alone.

`prepare` records the graphs, divides them between the devices and lowers them. A session loads and runs the result, so
the weights, cache and work buffers of a plan are those that are allocated. A plan needs no GPUs: without opened devices
the planner describes them by their known attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ikcli import models
from ikcli.engine.experts.cache import ExpertCache
from ikcli.engine.pipeline.place import LOCAL, Pipeline, stage_memory
from ikcli.engine.plan.cache_slots import CacheSlots, cache_slots
from ikcli.engine.plan.device_memory import MemoryPlan
from ikcli.engine.plan.device_plan import planning_device
from ikcli.engine.plan.devices import Machine
from ikcli.engine.plan.expert_plan import disk_options, expert_slots, expert_steps
from ikcli.engine.plan.expert_slots import ExpertSlots
from ikcli.engine.plan.graph_rules import check_caches
from ikcli.engine.plan.head_file import head_file, join_heads
from ikcli.engine.plan.offload import make_runner, offload_of
from ikcli.engine.plan.placement import CPU, Placement, place
from ikcli.engine.plan.program_plans import memory_of, plan_programs
from ikcli.engine.plan.programs import Graphs, graph_config, output_bytes, record_graphs
from ikcli.engine.plan.sizes import Sizes, measures_heads, session_of, uses_heads
from ikcli.engine.run.adapters import Adapters
from ikcli.engine.run.expert_nodes import ExpertNodes, expert_nodes_of
from ikcli.engine.run.mirror import mirror_of
from ikcli.engine.run.model import Model
from ikcli.engine.run.run_device import Beside, RunDevice, cache_bytes
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.engine.run.weight_memory import SIZES, Pages
from ikcli.errors import UsageError
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.graph import Cache
from ikcli.models import GraphConfig, HParams, Weights
from ikcli.models.heads import external, mtp
from ikcli.settings.rules import resolve
from ikcli.settings.run import RunConfig, default_model

MIB = 2**20


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A planned run: its settings, the placement of its tensors, and the memory it needs."""

    config: RunConfig
    sizes: Sizes
    warnings: tuple[str, ...]
    graph_config: GraphConfig
    placement: Placement
    memory: MemoryPlan
    caches: Mapping[Cache, int]  # bytes in the layout of RAM
    n_nodes: int
    n_splits: int
    beside: Beside
    vram: CacheSlots | None = None  # experts that GPUs hold beside those in RAM
    expert_nodes: ExpertNodes = field(default_factory=ExpertNodes)

    def on_gpus(self) -> int:
        """Return the bytes of weights in GPU memory."""
        devices = self.placement.devices
        return sum(parts["weights"] for device, parts in self.memory.parts.items() if device in devices)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A planned run with everything that a session needs to load it."""

    plan: RunPlan
    model: Model
    graphs: Graphs
    runner: Runner
    programs: dict[str, DividedProgram]
    cached: Graphs = field(default_factory=dict)  # of steps that use the cache of experts


class Planner:
    """Plan runs of one model; see the module.

    `file` may lack tensor data. `devices` are opened GPUs. `beside`: what the run needs beside the model.
    """

    def __init__(
        self,
        file: GGUFFile,
        hp: HParams,
        machine: Machine,
        devices: Mapping[str, RunDevice] | None = None,
        adapters: Adapters | None = None,
        pipeline: Pipeline = LOCAL,
        beside: Beside | None = None,
    ) -> None:
        self.beside: Beside = beside or {}
        self.file, self.hp, self.machine, self.adapters = file, hp, machine, adapters or Adapters()
        self.pipeline = pipeline
        self._graphs: dict[tuple[GraphConfig, int], Graphs] = {}
        self._models: dict[tuple[object, ...], Model] = {}
        self._plans: dict[RunConfig, RunPlan] = {}
        self._gpus: Mapping[str, RunDevice] = (
            devices if devices is not None else {gpu.name: planning_device(gpu) for gpu in machine.gpus}
        )

    @classmethod
    def of_file(cls, config: RunConfig, *, header_only: bool = False, pipeline: Pipeline = LOCAL) -> Planner:
        """Open the model of `config`, for the CPU alone; with `header_only` its tensor data may be missing."""
        file = open_gguf(config.model or default_model(), config.override_kv, header_only=header_only)
        heads = head_file(config, file) if uses_heads(config) or measures_heads(config) else None
        if heads is not None:
            join_heads(file, heads, config, header_only=header_only)
        external.check_is_model(file.arch, str(file.paths[0]))
        models.find(file.arch, str(file.paths[0]))  # before keys, which unknown architectures may lack
        hp = HParams.from_gguf(file.metadata, file.tensors, str(file.paths[0]), config.rope)
        if (head := external.find(file.metadata, hp)) is not None:
            hp = replace(hp, n_further=head.n_blocks)
        return cls(file, hp, Machine(()), None, Adapters.open(config.adapters, file.tensors, hp), pipeline)

    def on(
        self, machine: Machine, devices: Mapping[str, RunDevice] | None = None, beside: Beside | None = None
    ) -> Planner:
        """Return a planner of the same model with other devices; `beside` stays what it was unless it is given."""
        beside = self.beside if beside is None else beside
        return Planner(self.file, self.hp, machine, devices, self.adapters, self.pipeline, beside)

    def plan(self, config: RunConfig) -> RunPlan:
        """Return the plan of the session that a command opens; nothing is printed."""
        if config not in self._plans:
            self._plans[config] = self.prepare(*session_of(config)).plan
        return self._plans[config]

    def prepare(self, config: RunConfig, sizes: Sizes) -> PreparedRun:
        """Plan a session: its memory, graphs and programs. `-c 0` means the context of the model."""
        config, warnings = resolve(config, self.hp.n_ctx_train)
        sizes = sizes if sizes.n_ctx else replace(sizes, n_ctx=config.n_ctx)
        cfg, placement = self._graph_config(config, sizes), self.place(config)
        model = self.model(config, placement)
        check_caches(cfg, config, model)
        graphs = self._record(cfg, model)
        slots = self.expert_slots(config) if config.fleet.stages == 1 else None
        offload = offload_of(config, model, placement, slots) if placement.devices else None
        vram, found = cache_slots(config, model, placement)
        warnings += found
        used = {*placement.buffer_of.values(), *placement.cache}
        gpus = {name: gpu for name, gpu in self._gpus.items() if name in used}
        if config.fleet.stages > 1 and cfg.media is not None:
            raise UsageError("--stages cannot be combined with a projector: images are computed in one process")
        if config.fleet.stages > 1:
            runner, config = self.pipeline.runner(config, sizes, cfg, model, graphs)
        else:
            experts, found = expert_steps(config, slots)
            warnings += found
            n_threads = max(config.n_threads, config.n_threads_batch)
            runner = make_runner(n_threads, gpus, placement, offload, experts)
            if vram is not None:
                runner.add_cache(ExpertCache(vram))
            runner.cpu.mirror = mirror_of(config, n_threads, "GPUs" if gpus else "weights on disk" if experts else "")
            if experts is None:
                in_ram = [graph for graph, _ in graphs.values()]
                runner.cpu.expert_nodes = expert_nodes_of(config, n_threads, in_ram, model, placement.buffer_of)
        n_outputs = min(sizes.n_seq, cfg.n_ubatch)
        cached = self._record(replace(cfg, expert_slots=vram.by_layer(self.hp.n_layer)), model) if vram else {}
        programs = plan_programs(runner, graphs, cfg, n_outputs, sizes.n_step, cached)
        parts = memory_of(runner, programs, model, output_bytes(cfg, model, n_outputs))
        for device, needs in self.beside.items():
            parts[device] = parts.get(device, {"weights": 0, "KV": 0, "compute": 0, "output": 0}) | dict(needs)
        n_nodes = max(len(graph.nodes) for graph, _ in graphs.values())
        memory = MemoryPlan(parts, cfg.n_ctx, self._free(parts) | stage_memory(config, self.machine, parts))
        n_splits = runner.n_splits(list(programs.values()))
        caches = {
            c: cache_bytes(c, runner.cache_rows(c)) for graph, _ in graphs.values() for c in graph.caches.values()
        }
        plan = RunPlan(config, sizes, tuple(warnings), cfg, placement, memory, caches, n_nodes, n_splits,
                       self.beside, vram, runner.cpu.expert_nodes)  # fmt: skip
        return PreparedRun(plan, model, graphs, runner, programs, cached)

    def fits(self, config: RunConfig) -> bool:
        """Return whether a run fits all devices; this is quick where weights and cache alone are too large."""
        return self.may_fit(config) and self.plan(config).memory.fits()

    def may_fit(self, config: RunConfig, margin: int = 0, *, gpus_only: bool = False) -> bool:
        """Return whether weights and cache alone fit, with a margin on GPUs."""
        parts = self.static_bytes(config)
        free = self._free(parts)
        return not any(
            n_bytes + (0 if device == CPU else margin) > free[device]
            for device, n_bytes in parts.items()
            if device in free and not (gpus_only and device == CPU)
        )

    def expert_slots(self, config: RunConfig) -> ExpertSlots | None:
        """Return which experts in RAM get a slot there while all are on disk; None without such a wish or experts."""
        if not disk_options(config):
            return None
        placement = self.place(config)
        model, others = self.model(config, placement), self._static_bytes(config)[CPU]
        _, cfg = self._shape(config)
        graphs = [graph for graph, _ in self._record(cfg, model).values()]
        return expert_slots(config, model, placement, graphs, self.machine.ram, others)

    def static_bytes(self, config: RunConfig) -> dict[str, int]:
        """Return the bytes of weights and cache by device."""
        parts, slots = self._static_bytes(config), self.expert_slots(config)
        if slots is not None:
            parts[CPU] += slots.n_bytes - self.model(config, self.place(config)).n_bytes(slots.on_disk)
        return parts

    def _static_bytes(self, config: RunConfig) -> dict[str, int]:
        """Return them with all experts in RAM."""
        placement = self.place(config)
        model = self.model(config, placement)
        parts = dict.fromkeys((CPU, *placement.devices), 0)
        on_gpu = self.gpu_weights(config)
        for name, n_bytes in on_gpu.items():
            buffer = placement.buffer_of[name]
            parts[buffer] += model.n_bytes([name]) if buffer == CPU else n_bytes
        for il, n_bytes in self.gpu_cache(config).items():
            parts[placement.cache[il]] += n_bytes
        for device, sizes in self.beside.items():
            parts[device] = parts.get(device, 0) + sum(sizes.values())
        vram, _ = cache_slots(config, model, placement)
        for device in vram.devices if vram is not None else ():
            parts[device] += vram.slot_bytes(device) if vram is not None else 0
        return parts

    def _free(self, devices: Iterable[str]) -> dict[str, int]:
        free = dict(zip(self.machine.names, self.machine.free, strict=True))
        if self.machine.ram is not None:
            free[CPU] = self.machine.ram
        return {name: free[name] for name in devices if name in free}

    def warnings(self, config: RunConfig) -> tuple[str, ...]:
        """Return what a session would warn about."""
        return self.plan(config).warnings

    def model(self, config: RunConfig, placement: Placement | None = None) -> Model:
        """Return the model as these settings use it; with a placement, `-rtr` skips the tensors on GPUs."""
        cfg = graph_config(config, 512, n_heads=self.n_heads(config))
        repack, n_threads = config.run_time_repack, max(config.n_threads, config.n_threads_batch)
        buffers = placement.buffer_of if placement is not None and repack else {}
        plain = frozenset(name for name, buffer in buffers.items() if buffer != CPU)
        if repack and disk_options(config):
            plain |= {name for name in self.file.tensors if "_exps." in name}  # they are read as they are on disk
        pages = Pages(config.thp is not False, SIZES.get(config.hugetlb, 0))
        key = (cfg.mla, cfg.flash_attn, cfg.n_heads, repack, n_threads, pages, plain)
        if key not in self._models:
            self._models[key] = Model.from_file(
                self.file,
                cfg,
                hp=self.hp,
                adapters=self.adapters,
                rope=config.rope,
                repack=repack,
                n_threads=n_threads,
                pages=pages,
            )
            self._models[key].keep_plain(plain)
        return self._models[key]

    def place(self, config: RunConfig) -> Placement:
        """Place the tensors, derived ones included."""
        model = self.model(config)
        names = list(model.specs)
        return place(
            names,
            self.hp.n_layer,
            config,
            self.machine.names,
            [max(gpu.free - sum(self.beside.get(gpu.name, {}).values()), 0) for gpu in self.machine.gpus],
            {name: model.n_bytes([name]) for name in names},
            model.derived_from(),
            self.n_heads(config),
        )

    def n_heads(self, config: RunConfig) -> int:
        """Return the number of heads that predict further tokens, which the session runs."""
        if measures_heads(config):
            runs = (
                self.hp.n_further and mtp.why_not(models.find(self.file.arch, ""), self.hp, self.file.tensors) is None
            )
            return self.hp.n_further if runs else 0
        return max(self.hp.n_further, 1) if uses_heads(config) else 0  # a file without them is refused by name

    def gpu_weights(self, config: RunConfig) -> dict[str, int]:
        """Return the bytes on a GPU of every weight that the run uses."""
        config, cfg = self._shape(config)
        model = self.model(config)
        names = {name for graph, _ in self._record(cfg, model).values() for name in graph.weights}
        gpu = next(iter(self._gpus.values()), None)
        return {name: gpu.weight_bytes(model, [name]) if gpu else model.n_bytes([name]) for name in names}

    def gpu_cache(self, config: RunConfig) -> dict[int, int]:
        """Return the bytes on a GPU of the cache of every block."""
        config, cfg = self._shape(config)
        graphs = self._record(cfg, self.model(config)).values()
        sizes: dict[int, int] = {}
        gpu = next(iter(self._gpus.values()), None)
        for cache in {c for graph, _ in graphs for c in graph.caches.values()}:
            n_bytes = (gpu.cache_bytes if gpu else cache_bytes)(cache, cache.rows(cfg.n_ctx, cfg.n_seq, cfg.n_window))
            sizes[cache.il] = sizes.get(cache.il, 0) + n_bytes
        return sizes

    def _shape(self, config: RunConfig) -> tuple[RunConfig, GraphConfig]:
        """Return the settings of the session that the command opens, and of its graphs."""
        config, sizes = session_of(config)
        config, _ = resolve(config, self.hp.n_ctx_train)
        sizes = sizes if sizes.n_ctx else replace(sizes, n_ctx=config.n_ctx)
        return config, self._graph_config(config, sizes)

    def _graph_config(self, config: RunConfig, sizes: Sizes) -> GraphConfig:
        n_cells, n_heads = sizes.cells(config.flash_attn), self.n_heads(config)
        cfg = graph_config(config, n_cells, sizes.n_seq, self.hp.window, sizes.outputs, n_heads)
        return replace(cfg, media=sizes.media)

    def _record(self, cfg: GraphConfig, model: Model) -> Graphs:
        key = (cfg, id(model))
        if key not in self._graphs:
            weights = Weights(model.specs, model.source, lambda name: _values(model, name))
            self._graphs[key] = record_graphs(model, weights, cfg)
        return self._graphs[key]


def _values(model: Model, name: str) -> npt.NDArray[np.float32]:
    """Return the values of a tensor, or ones where the file has only its header: no size depends on them."""
    if model.file.has_data(name):
        return model.values(name)
    return np.ones(model.file.tensors[name].shape[::-1], np.float32)
