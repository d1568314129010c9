"""Operations of single architectures: factors, gates, activations, other norms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikcli.graph.activations import UNARY, sigmoid
from ikcli.graph.core import Array, Node, Place, Run, SameSize, Weight


@dataclass(frozen=True, slots=True)
class Scale(SameSize):
    """x times a number."""

    name = "scale"
    light = True

    x: Node
    factor: float

    def compute(self, run: Run) -> Array:
        out: Array = run.value(self.x) * run.dtype(self.factor)
        return out


@dataclass(frozen=True, slots=True)
class SoftCap(SameSize):
    """cap * tanh(x / cap)."""

    name = "softcap"

    x: Node
    cap: float

    def compute(self, run: Run) -> Array:
        cap = run.dtype(self.cap)
        out: Array = cap * np.tanh(run.value(self.x) / cap)
        return out


@dataclass(frozen=True, slots=True)
class Gate(SameSize):
    """x times sigmoid(gate); a gate has one column for a whole row, one per head or one per column of x.

    `kind` "softplus": times ln(1 + exp(gate)); "product": times the gate itself.
    """

    name = "gate"

    x: Node
    gate: Node
    kind: str = "sigmoid"

    def __post_init__(self) -> None:
        if self.kind not in ("sigmoid", "softplus", "product"):
            raise ValueError(f"gate {self.kind} is none of sigmoid, softplus, product")
        if self.x.cols % self.gate.cols:
            raise ValueError("the columns of a gate do not divide those of the value")

    def compute(self, run: Run) -> Array:
        x, gate = run.value(self.x), run.value(self.gate)
        if self.kind != "product":
            gate = sigmoid(gate) if self.kind == "sigmoid" else np.logaddexp(gate, 0)
        out: Array = (x.reshape(len(x), gate.shape[1], -1) * gate[:, :, None]).reshape(x.shape)
        return out


@dataclass(frozen=True, slots=True)
class PosScale(SameSize):
    """x times 1 + scale * ln(1 + floor((position + shift) / length)), position by position (Llama 4, Mistral 3)."""

    name = "pos_scale"
    light = True

    x: Node
    scale: float
    length: int
    shift: int = 0

    def compute(self, run: Run) -> Array:
        steps = (run.state.pos.astype(np.int64) + self.shift) // self.length
        factors: Array = (1 + np.float64(self.scale) * np.log1p(steps)).astype(run.dtype)
        out: Array = run.value(self.x) * factors[:, None]
        return out


@dataclass(frozen=True, slots=True)
class Clamp(SameSize):
    """x clamped to -limit..limit."""

    name = "clamp"
    light = True

    x: Node
    limit: float

    def compute(self, run: Run) -> Array:
        out: Array = np.clip(run.value(self.x), -self.limit, self.limit)
        return out


@dataclass(frozen=True, slots=True)
class Activate(SameSize):
    """An activation function applied to every element (`activations.UNARY`)."""

    name = "unary"

    x: Node
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in UNARY:
            raise ValueError(f"activation {self.kind} is none of {', '.join(UNARY)}")

    def compute(self, run: Run) -> Array:
        return UNARY[self.kind](run.value(self.x))


@dataclass(frozen=True, slots=True)
class Norm(SameSize):
    """Norm of groups of `width` columns of x, times w, plus b (each absent, of one group, or of the whole row).

    "layer": deviation from the mean over the standard deviation. "rms": x over the root mean square. "l2": x over the
    root of the sum of squares. "none": x as it is. eps is added under the root; for "l2" it is the smallest divisor.
    """

    name = "norm"
    place = Place.WEIGHT

    x: Node
    w: Weight | None
    b: Weight | None
    kind: str
    eps: float
    width: int

    def __post_init__(self) -> None:
        if self.kind not in ("layer", "rms", "l2", "none"):
            raise ValueError(f"norm {self.kind} is none of layer, rms, l2, none")
        if self.x.cols % self.width:
            raise ValueError(f"{self.x.cols} columns are not a multiple of the width {self.width} of a norm")
        for w in (self.w, self.b):
            if w is not None and w.ne0 * w.ne1 not in (self.width, self.x.cols):
                raise ValueError(f"{w.name}: {w.ne0 * w.ne1} values for {self.x.cols} columns normed by {self.width}")

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        groups = x.reshape(len(x), -1, self.width)
        if self.kind == "layer":
            groups = groups - groups.mean(axis=-1, keepdims=True, dtype=np.float64)
        squares = np.square(groups, dtype=np.float64)
        if self.kind == "l2":
            root = np.maximum(np.sqrt(squares.sum(axis=-1, keepdims=True)), self.eps)
        elif self.kind == "none":
            root = np.ones_like(squares[..., :1])
        else:
            root = np.sqrt(squares.mean(axis=-1, keepdims=True) + self.eps)
        out: Array = (groups / root).astype(run.dtype)
        if self.w is not None:
            out = out * run.weight(self.w).reshape(-1, self.width)
        if self.b is not None:
            out = out + run.weight(self.b).reshape(-1, self.width)
        return out.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class Cut(SameSize):
    """How far x exceeds a threshold, the mean of its row plus `z` standard deviations; 0 below it."""

    name = "cut"

    x: Node
    z: float

    def compute(self, run: Run) -> Array:
        x = run.value(self.x)
        mean, spread = (f(x, axis=1, keepdims=True, dtype=np.float64) for f in (np.mean, np.std))
        return np.maximum(x - (mean + self.z * spread), 0).astype(run.dtype)
