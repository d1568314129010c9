"""Judge from its header alone whether a model fits this machine: one run planned as `ik plan` and `--fit` do it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ikcli.engine.plan.device_memory import MemoryPlan
from ikcli.engine.plan.startup import prepare
from ikcli.errors import IkError
from ikcli.gguf.reader import open_gguf
from ikcli.settings.run import RunConfig


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the model fits: None if it cannot be planned, with `reason`.

    `options` are those it fits with, if it needs any. Sizes are bytes by device.
    """

    fits: bool | None
    options: str
    needed: dict[str, int]
    free: dict[str, int]
    bpw: float  # bits per weight, 0 if unknown
    n_ctx: int
    reason: str = ""


def judge(path: Path, n_ctx: int) -> Verdict:
    """Plan a run of `n_ctx` tokens (at most the training context of the model) on this machine."""
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
