"""Whether a model would fit this machine, from its header alone: one run planned as `ik plan` does, and `--fit`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ikcli.engine.plan.planner import MemoryPlan
from ikcli.engine.plan.startup import prepare
from ikcli.errors import IkError
from ikcli.gguf.reader import open_gguf
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class Verdict:
    """`fits` is None if the model cannot be planned (`reason` says why); `options` are those it fits with, if any are
    needed. Bytes by device.
    """

    fits: bool | None
    options: str
    needed: dict[str, int]
    free: dict[str, int]
    bpw: float  # bits per weight, 0 if nobody knows
    n_ctx: int
    reason: str = ""


def judge(path: Path, n_ctx: int) -> Verdict:
    """Plan a run of `n_ctx` tokens (at most those the model was trained with) on this machine."""
    config = RunConfig(command="plan", model=path, n_ctx=n_ctx)
    file = open_gguf(path, header_only=True)
    bpw = 8 * file.n_bytes / file.n_elements if file.tensors else 0.0
    try:
        started = prepare(config)
        planner = started.planner
        n_ctx = min(n_ctx, planner.hp.n_ctx_train or n_ctx)
        config = replace(started.config, n_ctx=n_ctx)
        memory, options = planner.plan(config).memory, ""
        if not memory.fits() and planner.machine.gpus:
            fitted = prepare(replace(config, fit=True))
            better = fitted.planner.plan(fitted.config).memory
            if better.fits():
                memory, options = better, "--fit"
        return Verdict(memory.fits(), options, _needed(memory), memory.free, bpw, n_ctx)
    except IkError as problem:
        return Verdict(None, "", {}, {}, bpw, n_ctx, str(problem))


def _needed(memory: MemoryPlan) -> dict[str, int]:
    return {device: memory.total(device) for device in memory.parts}
