"""Memory of a run before it reads weights: the log lines of a session that is planned but not loaded, and a verdict.

All sizes are those the session would allocate; nothing is estimated.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from ikcli.config import sequences_per_batch
from ikcli.engine.placement import CPU, placement_sentence
from ikcli.engine.report import MIB
from ikcli.engine.session import Session
from ikcli.engine.startup import Startup

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by device and part (weights, KV, output, compute); `n_ctx` is the context the cache is made for."""

    parts: dict[str, dict[str, int]]
    n_ctx: int

    @property
    def total(self) -> int:
        return sum(sum(part.values()) for part in self.parts.values())


def make_plan(startup: Startup) -> MemoryPlan:
    """Plan the session of this run, with its log lines on stdout; no weight is read."""
    config = startup.config
    n_seq = sequences_per_batch(config) if config.command in ("perplexity", "imatrix") else 1
    with contextlib.redirect_stderr(sys.stdout):
        session = Session.plan(config, n_ctx=config.n_ctx * n_seq or None, n_seq_max=n_seq)
    with contextlib.closing(session):
        names = {name for graph, _ in session.graphs.values() for name in graph.weights}
        parts = {
            "weights": session.model.n_bytes(names),
            "KV": sum(session.cache_bytes().values()),
            "output": session.output_bytes,
            "compute": session.compute_bytes,
        }
        return MemoryPlan({CPU: parts}, session.n_ctx)


def verdict_lines(startup: Startup, plan: MemoryPlan, free: int | None) -> list[str]:
    """What is on the GPU in words, then whether the plan fits the available memory and what to lower if not."""
    sentence = placement_sentence(startup.placement.buffer_of)
    lines = [sentence] if sentence else []
    if free is None:
        return lines
    needed, available = f"{plan.total / MIB:.2f} MiB", f"{free / MIB:.2f} MiB"
    if plan.total <= free:
        margin = f"{(free - plan.total) / MIB:.2f} MiB"
        return [*lines, f"fits: {CPU} needs {needed}, {available} are available, margin {margin}"]
    return [*lines, f"does not fit: {CPU} needs {needed}, {available} are available; {advice(plan, plan.total - free)}"]


def advice(plan: MemoryPlan, short: int) -> str:
    """What to lower to save `short` bytes."""
    parts = plan.parts[CPU]
    if parts["KV"] > short:
        n_ctx = int(plan.n_ctx * (1 - short / parts["KV"])) // 256 * 256
        return f"-c {n_ctx} would fit" if n_ctx else "a smaller -c or -ctk q8_0 may fit"
    if parts["KV"] + parts["compute"] > short:
        return "lower both -c and -ub"
    return "use a smaller quantization of the model"


def available_memory(path: Path = _MEMINFO) -> int | None:
    """Bytes of RAM available to new programs, or None where the system does not say."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
