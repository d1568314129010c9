"""Plan the programs of a session on a runner, and the memory that they take."""

from __future__ import annotations

from collections.abc import Mapping

from ikcli.engine.plan.placement import CPU
from ikcli.engine.plan.programs import Graphs, runs, step_tokens
from ikcli.engine.run.model import Model
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.models import GraphConfig


def plan_programs(
    runner: Runner, graphs: Graphs, cfg: GraphConfig, n_outputs: int, n_step: int, cached: Graphs | None = None
) -> dict[str, DividedProgram]:
    """Plan the programs of a session and return them by name; nothing is allocated.

    `cached`: the graphs of generation that use the cache of experts.
    """
    programs = {}
    for name, run in runs(graphs, cfg.n_ubatch, n_outputs, step_tokens(n_step)).items():
        programs[name] = program = runner.plan(
            *graphs[run.kind],
            run.n_tokens,
            run.n_outputs,
            cfg.n_ctx,
            cfg.n_seq,
            cfg.n_window,
            batch_invariant=run.batch_invariant,
            offload=run.offload,
        )
        if cached and run.kind in ("decode", "step"):
            runner.plan_cached(program, *cached[run.kind], run.n_tokens, run.n_outputs, run.batch_invariant)
    return programs


def memory_of(
    runner: Runner, programs: Mapping[str, DividedProgram], model: Model, n_output_bytes: int
) -> dict[str, dict[str, int]]:
    """Return the bytes by device (CPU first) and part."""
    sizes = runner.memory(list(programs.values()), model)
    output = {CPU: n_output_bytes}
    return {device: parts | {"output": output.get(device, 0)} for device, parts in sizes.items()}
