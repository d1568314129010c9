"""Element-wise operations of single architectures: factors, gates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, slots=True)
class PosScale(Op):
    """x times 1 + scale * ln(1 + floor((position + shift) / length)), position by position (Llama 4, Mistral 3)."""

    name = "pos_scale"
    light = True

    x: Node
    scale: float
    length: int
    shift: int = 0

    @property
    def shape(self) -> tuple[RowSpec, int]:
        return self.x.rows, self.x.cols

    def compute(self, run: Run) -> Array:
        steps = (run.state.pos.astype(np.int64) + self.shift) // self.length
        factors: Array = (1 + np.float64(self.scale) * np.log1p(steps)).astype(run.dtype)
        out: Array = run.value(self.x) * factors[:, None]
        return out
