"""`--profile`: where the time goes. Programs are run op by op under a clock, and a table is made of it at the end.

Without the option nothing of this is imported and the executor is the same. With it every op is a job of its own, so
a token takes a few microseconds per op longer. Per group of ops (phase, place in the layer, kernel): calls, seconds,
bytes of weights read, and multiplications and additions of matrix products. Bytes are those a kernel has to touch: of
experts only the ones that were chosen.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.backend import CpuBackend, State
from ikcli.backends.cpu.program import Op, Program
from ikcli.graph import Node, Rows, Weight
from ikcli.quant.formats import row_size

Observer = Callable[[Node, npt.NDArray[np.generic]], None]
_PRODUCTS = ("mul_mat", "mul_mat_heads", "mul_mat_id", "moe_up_gate")
_BY_EXPERT = ("mul_mat_id", "moe_up_gate")
_MIN_SHARE = 0.001  # groups below are summed up in one line
_HEAD = f"{'op':<34} {'kernel':<34} {'count':>8} {'ms':>10} {'share':>6} {'us each':>9} {'GB/s':>7} {'GOP/s':>8}"


@dataclass(slots=True)
class Group:
    """Sums over the calls of one kind of op."""

    count: int = 0
    seconds: float = 0.0
    n_bytes: int = 0
    n_ops: int = 0

    def add(self, other: Group) -> None:
        """Count the calls of another group too."""
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
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)


class Profile:
    """Times programs; `lines` is the report."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what was measured (after warming up)."""
        self.phases = {"prompt": Phase(), "generation": Phase()}

    def run(
        self, backend: CpuBackend, program: Program, n_threads: int, state: State, observer: Observer | None = None
    ) -> None:
        """Execute a bound program; the observer sees every output, outside of the measured time."""
        n_tokens = state.rows[Rows.TOKENS]
        phase = self.phases["generation" if n_tokens == state.n_segments else "prompt"]
        started, outside = time.perf_counter(), 0.0
        for node, first, stop in program.node_ops():
            for i in range(first, stop):
                begin = time.perf_counter()
                backend.run_ops(program, i, i + 1, n_threads)
                seconds = time.perf_counter() - begin
                op = program.ops[i]
                group = phase.groups.setdefault((_place(node), op.kernel.text), Group())
                n_bytes, n_ops = _work(backend, program, op, state)
                group.add(Group(1, seconds, n_bytes, n_ops))
            if observer is not None and program.has_output(node):
                begin = time.perf_counter()
                observer(node, program.view(backend.arena, node, state.rows[node.rows.symbol] * node.rows.factor))
                outside += time.perf_counter() - begin
        phase.n_passes += 1
        phase.n_tokens += n_tokens
        phase.seconds += time.perf_counter() - started - outside

    def lines(self) -> list[str]:
        """The tables, slowest groups first; none if nothing was computed."""
        return [line for name, phase in self.phases.items() if phase.n_passes for line in _table(name, phase)]


def _place(node: Node) -> str:
    """Name of a node without the layer, and its op where the name does not tell it."""
    name = re.sub(r"[-.]\d+(?=[-.]|$)", "", node.name)
    return name if node.op in name else f"{name} ({node.op})"


def _work(backend: CpuBackend, program: Program, op: Op, state: State) -> tuple[int, int]:
    """Bytes of weights that an op reads, and its multiplications and additions if it is a matrix product."""
    node = op.node
    weights = [w for w in node.inputs if isinstance(w, Weight) and len(w.shape) > 1]
    if not weights:
        return 0, 0
    if node.op == "embed":
        return state.rows[Rows.TOKENS] * row_size(weights[0].type, weights[0].ne0), 0
    if node.op not in _PRODUCTS or op.kernel.module != "matmul":
        return 0, 0
    if node.op in _BY_EXPERT:
        plan = node.inputs[-1]
        assert isinstance(plan, Node)
        ends = program.raw(backend.arena, plan, 8, plan.attrs["n_expert"] + 1)
        matrices, rows = int((np.diff(ends) > 0).sum()), int(ends[-1])
        n_ops = sum(2 * w.ne0 * w.ne1 * rows for w in weights)
    else:
        rows = state.rows[node.rows.symbol] * node.rows.factor
        matrices = weights[0].ne2 if node.op == "mul_mat_heads" else 1
        n_ops = 2 * weights[0].ne0 * weights[0].ne1 * matrices * rows
    return sum(matrices * w.ne1 * row_size(w.type, w.ne0) for w in weights) if rows else 0, n_ops


def _table(name: str, phase: Phase) -> list[str]:
    total = Group()
    for group in phase.groups.values():
        total.add(group)
    tokens = f"{phase.n_tokens} tokens in {phase.n_passes} {'pass' if phase.n_passes == 1 else 'passes'}"
    lines = ["", f"profile of {name}: {tokens}, {1e3 * phase.seconds:.2f} ms (op by op, which takes longer)", _HEAD]
    ordered = sorted(phase.groups.items(), key=lambda item: -item[1].seconds)
    rest = Group()
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


def _row(place: str, kernel: str, group: Group, total: float) -> str:
    share = 100 * group.seconds / total if total > 0 else 0.0
    each = 1e6 * group.seconds / max(1, group.count)
    rates = [f"{n / group.seconds / 1e9:.2f}" if n and group.seconds > 0 else "-" for n in (group.n_bytes, group.n_ops)]
    return (
        f"{place:<34} {kernel:<34} {group.count:8d} {1e3 * group.seconds:10.3f} {share:5.1f}% {each:9.1f} "
        f"{rates[0]:>7} {rates[1]:>8}"
    )
