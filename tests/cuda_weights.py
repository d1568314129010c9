"""Stored weights on the emulated CUDA device, and what products with them should give."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from cuda_graphs import LIMITS, GraphRun
from weight_bytes import fitting, stored

from ikcli.backends.cuda import rules_matmul
from ikcli.backends.cuda.lower import DeviceLimits, GpuLowering, all_rules
from ikcli.backends.cuda.upload import convert, device_bytes, is_float
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.graph import Rows, Weight
from ikcli.quant.decode import dequantize

Array = npt.NDArray[Any]


def device_rows(data: Array, w: Weight) -> Array:
    """The bytes of a tensor as the device has them; what `convert` forgets would be NaN."""
    out = np.full(device_bytes(w), 0xFF, np.uint8)
    convert(data, w, out)
    return out


class ProductRun(GraphRun):
    """A graph with weights of any type."""

    def __init__(self, *, spare: int = 3, batch_invariant: bool = False, limits: DeviceLimits = LIMITS) -> None:
        super().__init__(all_rules(), spare=spare)
        self.tensors: dict[str, Weight] = {}
        self.bytes: dict[str, Array] = {}
        self.batch_invariant, self.limits = batch_invariant, limits

    def tensor(self, name: str, type_: GGMLType, shape: tuple[int, ...], seed: int = 1) -> Weight:
        """A random weight of GGUF shape (ne0, ne1, ...)."""
        w = Weight(name, type_, shape)
        data = stored(type_, int(np.prod(shape[1:])), shape[0], seed)
        values = dequantize(data, type_, shape).astype(np.float64) * TYPES[type_].matmul_scale
        self.tensors[name], self.bytes[name], self.weights[name] = w, data, values
        return w

    def stored(self, name: str) -> Array:
        return device_rows(self.bytes[name], self.tensors[name])

    def lowering(self, n_tokens: int, n_outputs: int) -> GpuLowering:
        most = {Rows.TOKENS: n_tokens + self.spare, Rows.OUTPUTS: max(n_outputs, 1), Rows.KV: n_tokens + self.spare}
        return GpuLowering(most, n_tokens + self.spare, self.limits, batch_invariant=self.batch_invariant)


def rounded(x: Array) -> Array:
    """Activations as integer kernels see them: int8 per 32 values."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    scale = (top / np.float32(127)).astype(np.float64)
    return (np.rint(blocks * inverse).astype(np.float64) * scale).reshape(x.shape)


def seen(x: Array, type_: GGMLType) -> Array:
    """Activations as kernels of this weight type see them, in float64."""
    return x.astype(np.float64) if is_float(type_) else rounded(x)


def check(found: Array, w: Array, x: Array, type_: GGMLType, tf32: bool | None = None) -> None:
    """found = x @ w.T up to the rounding of f32 sums; activations of 11 bits where tf32 tensor cores multiply, by
    default from 9 rows on."""
    a = seen(x, type_)
    assert found.shape == (len(x), len(w))
    half = is_float(type_) and type_ != GGMLType.F32 and (len(x) > rules_matmul.MV_ROWS if tf32 is None else tf32)
    limit = (5e-4 if half else 2e-6) * (np.abs(a) @ np.abs(w).T) + 1e-30
    error = np.abs(found - a @ w.T)
    assert (error <= limit).all(), f"{np.nanmax(error / limit)} times the limit"  # NaN fails too
    if half:
        x = x.astype(np.float64)
        assert np.mean((found - x @ w.T) ** 2) <= 3e-4**2 * np.mean(np.square(x) @ np.square(w).T)


def activations(rows: int, cols: int, seed: int = 3) -> Array:
    return np.random.default_rng([seed, rows, cols]).standard_normal((rows, cols)).astype(np.float32)


def product(
    type_: GGMLType, k: int, n_rows: int, n: int, seed: int = 1, limits: DeviceLimits = LIMITS
) -> tuple[Array, Array, Array]:
    """(result, weights, activations) of a mul_mat of n rows."""
    run = ProductRun(limits=limits)
    w = run.tensor("w", type_, (k, fitting(type_, n_rows)))
    x = activations(n, k)
    node = run.graph.mul_mat(w, run.input("x", x), "y")
    (found,) = run.run(node, seed=seed)
    return found, run.weights["w"], x
