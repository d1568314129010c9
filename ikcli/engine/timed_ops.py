"""Ops under a clock, for `--profile`: what each took, which weights it read and how much it multiplied.

Bytes are those a kernel has to touch: of experts only the ones that were chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.backend import CpuBackend, State
from ikcli.backends.cpu.program import Program
from ikcli.graph import Node, Rows
from ikcli.graph.ops_experts import ExpertProduct, sort_of
from ikcli.graph.ops_rows import Embed, Product
from ikcli.quant.formats import row_size


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One kernel call of `node` under a clock; `n_bytes` of weights it read, `n_ops` multiplications and additions.

    `value` is the node's output, with its last op, if it was asked for.
    """

    node: Node
    kernel: str
    seconds: float
    n_bytes: int
    n_ops: int
    value: npt.NDArray[np.generic] | None = None


def timed_ops(
    backend: CpuBackend, program: Program, span: tuple[int, int], n_threads: int, state: State, show: bool
) -> Iterator[TimedOp]:
    """Execute some ops of a bound CPU program one by one."""
    for node, first, stop in program.node_ops():
        for i in range(first, stop) if span[0] <= first < span[1] else ():
            begin = time.perf_counter()
            backend.run_ops(program, i, i + 1, n_threads)
            seconds = time.perf_counter() - begin
            op = program.ops[i]
            n_bytes, n_ops = work_of(node, state, lambda plan: _expert_rows(backend, program, plan))
            if op.kernel.module not in ("matmul", "embed"):
                n_bytes, n_ops = 0, 0
            value = None
            if show and i == stop - 1 and program.has_output(node):
                value = program.view(backend.arena, node, state.rows[node.rows.symbol] * node.rows.factor)
            yield TimedOp(node, op.kernel.text, seconds, n_bytes, n_ops, value)


def _expert_rows(backend: CpuBackend, program: Program, plan: Node) -> tuple[int, int]:
    ends = program.raw(backend.arena, plan, 8, sort_of(plan).n_expert + 1)
    return int((np.diff(ends) > 0).sum()), int(ends[-1])


def work_of(node: Node, state: State, experts: Callable[[Node], tuple[int, int]]) -> tuple[int, int]:
    """Bytes of weights that a node's kernel reads, and its multiplications and additions if it is a matrix product.

    `experts(plan)`: experts that were chosen, and rows they got.
    """
    op = node.op
    if isinstance(op, Embed):
        return state.rows[Rows.TOKENS] * row_size(op.w.type, op.w.ne0), 0
    if not isinstance(op, Product):
        return 0, 0
    if isinstance(op, ExpertProduct):
        matrices, rows = experts(op.plan)
        n_ops = sum(2 * w.ne0 * w.ne1 * rows for w in op.matrices)
    else:
        matrices, rows = op.n_matrices, state.rows[node.rows.symbol] * node.rows.factor
        n_ops = sum(2 * w.ne0 * w.ne1 * matrices * rows for w in op.matrices)
    return sum(matrices * w.ne1 * row_size(w.type, w.ne0) for w in op.matrices) if rows else 0, n_ops
