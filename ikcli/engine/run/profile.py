"""`--profile`: show where the time goes. Programs run op by op under a clock, and the times become a table at the end.

Without the option nothing of this is imported and the executor is unchanged. With it every op is a separate job, so a
token takes a few microseconds per op longer. The table shows for each group of ops (phase, place in the layer, kernel)
calls, seconds, bytes of weights read, and the multiplications and additions of matrix products. Bytes are those that a
kernel must touch: of experts only the chosen ones.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.run_device import Observer
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.graph import Node, Rows

_MIN_SHARE = 0.001  # smaller groups are summed up in one line
_HEAD = f"{'op':<34} {'kernel':<34} {'count':>8} {'ms':>10} {'share':>6} {'us each':>9} {'GB/s':>7} {'GOP/s':>8}"


@dataclass(slots=True)
class OpSums:
    """Sums over the calls of one kind of op."""

    count: int = 0
    seconds: float = 0.0
    n_bytes: int = 0
    n_ops: int = 0

    def add(self, other: OpSums) -> None:
        """Add the calls of another group."""
        self.count += other.count
        self.seconds += other.seconds
        self.n_bytes += other.n_bytes
        self.n_ops += other.n_ops


@dataclass(slots=True)
class Phase:
    """Prompt or generation: passes, tokens, wall time and the groups by (op, kernel)."""

    n_passes: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    groups: dict[tuple[str, str], OpSums] = field(default_factory=dict)


class Profile:
    """Times programs; `lines` is the report."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self.clear()

    def clear(self) -> None:
        """Drop all measurements (after warming up)."""
        self.phases = {"prompt": Phase(), "generation": Phase()}

    def run(
        self,
        runner: Runner,
        program: DividedProgram,
        n_threads: int,
        state: StepBlock,
        observer: Observer | None = None,
    ) -> None:
        """Execute a bound program; the observer sees every output, outside of the measured time."""
        n_tokens = state.rows[Rows.TOKENS]
        phase = self.phases["generation" if n_tokens == state.n_segments else "prompt"]
        started, outside = time.perf_counter(), 0.0
        seen: set[Node] = set()
        for op in runner.timed(program, n_threads, state, observer is not None):
            group = phase.groups.setdefault((_place(op.node), op.kernel), OpSums())
            group.add(OpSums(1, op.seconds, op.n_bytes, op.n_ops))
            if observer is not None and op.value is not None and op.node not in seen:
                begin = time.perf_counter()
                seen.add(op.node)
                observer(op.node, op.value)
                outside += time.perf_counter() - begin
        phase.n_passes += 1
        phase.n_tokens += n_tokens
        phase.seconds += time.perf_counter() - started - outside

    def lines(self) -> list[str]:
        """Return the tables, slowest groups first; none if nothing was computed."""
        return [line for name, phase in self.phases.items() if phase.n_passes for line in _table(name, phase)]


def _place(node: Node) -> str:
    """Return the name of a node without its layer, and its op where the name does not imply it."""
    name = re.sub(r"[-.]\d+(?=[-.]|$)", "", node.name)
    return name if node.op.name in name else f"{name} ({node.op.name})"


def _table(name: str, phase: Phase) -> list[str]:
    total = OpSums()
    for group in phase.groups.values():
        total.add(group)
    tokens = f"{phase.n_tokens} tokens in {phase.n_passes} {'pass' if phase.n_passes == 1 else 'passes'}"
    lines = ["", f"profile of {name}: {tokens}, {1e3 * phase.seconds:.2f} ms (op by op, which takes longer)", _HEAD]
    ordered = sorted(phase.groups.items(), key=lambda item: -item[1].seconds)
    rest = OpSums()
    n_rest = 0
    for (place, kernel), group in ordered:
        if group.seconds < _MIN_SHARE * total.seconds and len(ordered) > 1:
            rest.add(group)
            n_rest += 1
        else:
            lines.append(_row(place, kernel, group, total.seconds))
    if n_rest:
        lines.append(_row(f"{n_rest} others", "", rest, total.seconds))
    return [*lines, _row("all", "", total, total.seconds)]


def _row(place: str, kernel: str, group: OpSums, total: float) -> str:
    share = 100 * group.seconds / total if total > 0 else 0.0
    each = 1e6 * group.seconds / max(1, group.count)
    rates = [f"{n / group.seconds / 1e9:.2f}" if n and group.seconds > 0 else "-" for n in (group.n_bytes, group.n_ops)]
    return (
        f"{place:<34} {kernel:<34} {group.count:8d} {1e3 * group.seconds:10.3f} {share:5.1f}% {each:9.1f} "
        f"{rates[0]:>7} {rates[1]:>8}"
    )
