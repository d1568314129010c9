"""`--profile`: show where the time goes. Programs run op by op under a clock, and the times become a table at the end.

Without the option nothing of this is imported and the executor is unchanged. With it every op is a separate job, so a
token takes a few microseconds per op longer. The table shows for each group of ops (phase, place in the layer, kernel)
calls, seconds, bytes of weights read, and the multiplications and additions of matrix products. Bytes are those that a
kernel must touch: of experts only the chosen ones.

Products on the CPU are compared with its roofline, which is measured at the end: no op is faster than reading its
weights from memory, nor than the products of its kind from registers. The last column is the larger of these two times
as a part of the op's own, and which it is. More than 100 % means that weights were still in the processor's cache.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ikcli.backends.step_block import StepBlock
from ikcli.engine.run.run_device import Observer
from ikcli.engine.run.runner import DividedProgram, Runner
from ikcli.engine.run.weight_memory import TRANSPARENT, reserve
from ikcli.graph import Node, Rows
from ikcli.hostinfo import available_memory

_MIN_SHARE = 0.001  # smaller groups are summed up in one line
_READ_BYTES, _READ_S, _PRODUCT_S = 1 << 29, 0.5, 0.1  # of measuring the roofline
_HEAD = (
    f"{'op':<34} {'kernel':<34} {'count':>8} {'ms':>10} {'share':>6} {'us each':>9} {'GB/s':>7} {'GOP/s':>8} "
    f"{'of roof':>10}"
)


@dataclass(slots=True)
class OpSums:
    """Sums over the calls of one kind of op."""

    count: int = 0
    seconds: float = 0.0
    n_bytes: int = 0
    n_ops: int = 0
    kind: str = ""  # of products on the CPU

    def add(self, other: OpSums) -> None:
        """Add the calls of another group."""
        self.count += other.count
        self.seconds += other.seconds
        self.n_bytes += other.n_bytes
        self.n_ops += other.n_ops


@dataclass(slots=True)
class Phase:
    """Prompt or generation: passes, tokens, threads, wall time and the groups by (op, kernel)."""

    n_passes: int = 0
    n_tokens: int = 0
    seconds: float = 0.0
    groups: dict[tuple[str, str], OpSums] = field(default_factory=dict)
    n_threads: int = 1


@dataclass(frozen=True, slots=True)
class Roof:
    """The limits of the CPU: bytes read from memory and products of each kind, per second."""

    read: float = 0.0
    products: Mapping[str, float] = field(default_factory=dict)

    def least(self, group: OpSums) -> tuple[float, str]:
        """Return the seconds that a group takes at least, and what bounds them: `read` or a kind of products."""
        peak = self.products.get(group.kind, 0.0)
        if not peak or not self.read:
            return 0.0, ""
        return max((group.n_bytes / self.read, "read"), (group.n_ops / peak, group.kind))


def measure_roofs(phases: Iterable[Phase]) -> dict[int, Roof]:
    """Measure the roofline by number of threads, each in a second; nothing for phases without products on the CPU."""
    from ikcli.backends.cpu.peaks import product_peak, read_rates

    kinds: dict[int, set[str]] = {}
    for phase in phases:
        found = {group.kind for group in phase.groups.values()} - {""}
        if found:
            kinds.setdefault(phase.n_threads, set()).update(found)
    roofs = {}
    for n, names in kinds.items():
        n_bytes = max(min(_READ_BYTES, (available_memory() or _READ_BYTES) // 8), 1 << 20)
        read = statistics.median(read_rates(reserve(n_bytes, TRANSPARENT), n, seconds=_READ_S))
        roofs[n] = Roof(read, {kind: product_peak(kind, n, repeat=6, seconds=_PRODUCT_S) for kind in names})
    return roofs


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
            group = phase.groups.setdefault((_place(op.node), op.kernel), OpSums(kind=op.kind))
            group.add(OpSums(1, op.seconds, op.n_bytes, op.n_ops))
            if observer is not None and op.value is not None and op.node not in seen:
                begin = time.perf_counter()
                seen.add(op.node)
                observer(op.node, op.value)
                outside += time.perf_counter() - begin
        phase.n_threads = n_threads
        phase.n_passes += 1
        phase.n_tokens += n_tokens
        phase.seconds += time.perf_counter() - started - outside

    def lines(self) -> list[str]:
        """Return the tables, slowest groups first; none if nothing was computed. Measure the roofline for them."""
        computed = {name: phase for name, phase in self.phases.items() if phase.n_passes}
        roofs = measure_roofs(computed.values())
        return [
            line for name, phase in computed.items() for line in _table(name, phase, roofs.get(phase.n_threads, Roof()))
        ]


def _place(node: Node) -> str:
    """Return the name of a node without its layer, and its op where the name does not imply it."""
    name = re.sub(r"[-.]\d+(?=[-.]|$)", "", node.name)
    return name if node.op.name in name else f"{name} ({node.op.name})"


def _table(name: str, phase: Phase, roof: Roof) -> list[str]:
    total = OpSums()
    for group in phase.groups.values():
        total.add(group)
    tokens = f"{phase.n_tokens} tokens in {phase.n_passes} {'pass' if phase.n_passes == 1 else 'passes'}"
    lines = ["", f"profile of {name}: {tokens}, {1e3 * phase.seconds:.2f} ms (op by op, which takes longer)"]
    if roof.read:
        peaks = ", ".join(f"{rate / 1e9:.0f} GOP/s of {kind}" for kind, rate in sorted(roof.products.items()))
        lines.append(f"roof of {phase.n_threads} threads: {roof.read / 1e9:.1f} GB/s read, {peaks}")
    lines.append(_HEAD)
    ordered = sorted(phase.groups.items(), key=lambda item: -item[1].seconds)
    rest, rest_least, all_least, n_rest = OpSums(), 0.0, 0.0, 0
    for (place, kernel), group in ordered:
        least, limit = roof.least(group)
        all_least += least
        if group.seconds < _MIN_SHARE * total.seconds and len(ordered) > 1:
            rest.add(group)
            rest_least += least
            n_rest += 1
        else:
            lines.append(_row(place, kernel, group, total.seconds, least, limit))
    if n_rest:
        lines.append(_row(f"{n_rest} others", "", rest, total.seconds, rest_least))
    return [*lines, _row("all", "", total, total.seconds, all_least)]


def _row(place: str, kernel: str, group: OpSums, total: float, least: float, limit: str = "") -> str:
    share = 100 * group.seconds / total if total > 0 else 0.0
    each = 1e6 * group.seconds / max(1, group.count)
    rates = [f"{n / group.seconds / 1e9:.2f}" if n and group.seconds > 0 else "-" for n in (group.n_bytes, group.n_ops)]
    roof = f"{100 * least / group.seconds:.0f}% {limit}".rstrip() if least and group.seconds > 0 else "-"
    return (
        f"{place:<34} {kernel:<34} {group.count:8d} {1e3 * group.seconds:10.3f} {share:5.1f}% {each:9.1f} "
        f"{rates[0]:>7} {rates[1]:>8} {roof:>10}"
    )
