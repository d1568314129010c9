"""Ops under a clock, for `--profile`: the time, weights read, and multiplications of each.

Bytes are those that a kernel must touch: of experts only the chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.backends.cpu.lower import products_of
from ikcli.backends.step_block import StepBlock
from ikcli.graph import Node, Rows
from ikcli.graph.ops_experts import ExpertProduct
from ikcli.graph.ops_ngrams import EmbedIds
from ikcli.graph.ops_rows import Embed, Product
from ikcli.quant.formats import row_size


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One kernel call of `node` under a clock; `n_bytes` of weights it read, `n_ops` multiplications and additions.

    `value` is the node's output, with its last op, if it was requested. `kind` of products (see `kind_of`).
    """

    node: Node
    kernel: str
    seconds: float
    n_bytes: int
    n_ops: int
    value: npt.NDArray[np.generic] | None = None
    kind: str = ""


def kind_of(node: Node) -> str:
    """Return the kind of a node's products on the CPU, one of `peaks.OPS`, or an empty text for other ops."""
    return products_of(node.op.matrices[0].type) if isinstance(node.op, Product) else ""


def work_of(node: Node, state: StepBlock, experts: Callable[[Node], tuple[int, int]]) -> tuple[int, int]:
    """Return the bytes of weights that a node's kernel reads, and its multiplications and additions if it is a product.

    `experts(plan)` returns the number of chosen experts and their rows.
    """
    op = node.op
    if isinstance(op, EmbedIds):
        return state.rows[Rows.TOKENS] * op.ids.cols * row_size(op.w.type, op.w.ne0), 0
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
