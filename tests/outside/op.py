"""The op: up times the square of the positive part of gate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.backends.cpu.lower import RULES
from ikcli.backends.cpu.program import CpuLowering
from ikcli.graph import Node, Op, RowSpec
from ikcli.graph.core import Array, Run
from ikcli.native.kernel_cache import KernelKey
from outside.params import GluParams


@dataclass(frozen=True, slots=True)
class ReluSquaredGlu(Op):
    """relu(gate)^2 * up + shift."""

    name = "relu_squared_glu"

    gate: Node
    up: Node
    shift: float = 0.0

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.gate.rows, self.gate.cols

    def compute(self, run: Run) -> Array:
        positive = np.maximum(run.value(self.gate), 0)
        out: Array = positive * positive * run.value(self.up) + self.shift
        return out


@RULES.add(ReluSquaredGlu, "gate up")
def lower(low: CpuLowering, node: Node, op: ReluSquaredGlu) -> None:
    """The CPU's rule: the shift stays 0."""
    key = KernelKey("outside.kernels", "make_relu_squared_glu")
    params = GluParams(gate=low.out(op.gate), up=low.out(op.up), out=low.out(node), cols=node.cols)
    low.emit(key, node.rows, params)
