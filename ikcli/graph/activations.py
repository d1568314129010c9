"""Activation functions, alone and with a gate, and the records of them in ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ikcli.graph.core import Array

GELU_SLOPE, GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
QUICK_SLOPE = 1.702


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: Array) -> Array:
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)


def gelu(x: Array) -> Array:
    """Return the tanh approximation of GELU: x/2 * (1 + tanh(u)), which is x * sigmoid(2u)."""
    with np.errstate(over="ignore"):
        return x * sigmoid(GELU_SLOPE * x * (1 + GELU_CUBE * x * x))


def gelu_erf(x: Array) -> Array:
    """Return the exact GELU: x/2 * (1 + erf(x / sqrt(2)))."""
    half = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.ravel().tolist()], x.dtype)
    return x * half.reshape(x.shape)


def gelu_quick(x: Array) -> Array:
    """Return x * sigmoid(1.702 x)."""
    return x * sigmoid(QUICK_SLOPE * x)


def relu(x: Array) -> Array:
    """Return the larger of x and 0."""
    return np.maximum(x, 0)


def relu_sqr(x: Array) -> Array:
    """Return the square of relu."""
    return relu(x) * relu(x)


def elu_rest(x: Array) -> Array:
    """Return exp(y) - 1 - y of y = min(x, 0): what xIELU adds for negative x."""
    y = np.minimum(x, 0)
    return np.expm1(y) - y


UNARY: dict[str, Callable[[Array], Array]] = {
    "silu": silu, "gelu": gelu, "gelu_quick": gelu_quick, "relu": relu, "relu_sqr": relu_sqr,
    "gelu_erf": gelu_erf, "elu_rest": elu_rest,
}  # fmt: skip
GATED = (
    "silu", "gelu", "gelu_quick", "relu", "relu_sqr", "swiglu_oai", "gelu_erf", "elu_rest", "silu_of_capped", "situ",
)  # fmt: skip
"""Kinds of `Glu`; the place in this list is their number in kernels."""


@dataclass(frozen=True, slots=True)
class Glu:
    """How gate and up become one value: f(gate) * up.

    A limit above 0 caps f(gate) from above and clamps up to -limit..limit. "swiglu_oai" is gate * sigmoid(alpha * gate)
    * (up + 1), where gate itself is capped, as in "silu_of_capped". "situ" is sigmoid(gate) times gate and up, each
    squashed by a hyperbolic tangent: gate to -alpha..alpha, up to -limit..limit if there is a limit.
    """

    kind: str = "silu"
    limit: float = 0.0
    alpha: float = QUICK_SLOPE

    def __post_init__(self) -> None:
        if self.kind not in GATED:
            raise ValueError(f"activation {self.kind} is none of {', '.join(GATED)}")

    @property
    def plain(self) -> bool:
        """Return whether this is silu(gate) * up."""
        return self.kind == "silu" and not self.limit

    def __call__(self, gate: Array, up: Array) -> Array:
        """Return the value."""
        if self.kind == "situ":
            up = self.limit * np.tanh(up / self.limit) if self.limit else up
            return self.alpha * np.tanh(gate / self.alpha) * sigmoid(gate) * up
        if self.limit:
            up = np.clip(up, -self.limit, self.limit)
        if self.kind == "swiglu_oai":
            gate = np.minimum(gate, self.limit) if self.limit else gate
            return gate * sigmoid(self.alpha * gate) * (up + 1)
        if self.kind == "silu_of_capped":
            return silu(np.minimum(gate, self.limit) if self.limit else gate) * up
        value = UNARY[self.kind](gate)
        return (np.minimum(value, self.limit) if self.limit else value) * up


SILU = Glu()
