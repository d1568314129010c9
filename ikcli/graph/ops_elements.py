"""Element-wise operations of single architectures: factors, gates."""

from __future__ import annotations

from dataclasses import dataclass

from ikcli.graph.core import Array, Node, Op, RowSpec, Run
from ikcli.graph.ops_rows import sigmoid


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """x times a number."""

    name = "scale"
    light = True

    x: Node
    factor: float

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        out: Array = run.value(self.x) * run.dtype(self.factor)
        return out


@dataclass(frozen=True, slots=True)
class Gate(Op):
    """x times sigmoid(gate), whose columns are for equal parts of a row: one for all, one per head, one each."""

    name = "gate"

    x: Node
    gate: Node

    def __post_init__(self) -> None:
        if self.x.cols % self.gate.cols:
            raise ValueError("the columns of a gate do not divide those of the value")

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        x, gate = run.value(self.x), sigmoid(run.value(self.gate))
        out: Array = (x.reshape(len(x), gate.shape[1], -1) * gate[:, :, None]).reshape(x.shape)
        return out
