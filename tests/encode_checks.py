"""What every encoder of blocks is checked for: errors against the golden files, hostile input, independence of rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows

TENSORS = ("attn_q", "attn_output", "ffn_up_exps", "ffn_gate")
LEAST_SQUARES = EncodeOptions(least_squares=True)  # what searches minimise; scales are made unbiased afterwards


def roundtrip(
    values: np.ndarray,
    type: GGMLType,
    imatrix: np.ndarray | None = None,
    options: EncodeOptions = LEAST_SQUARES,
) -> np.ndarray:
    """Encoded and decoded again."""
    rows = values.astype(np.float32)
    return dequantize(quantize_rows(rows, type, imatrix, options=options), type, rows.shape[::-1])


def rel_rmse(
    values: np.ndarray, type: GGMLType, imatrix: np.ndarray | None = None, options: EncodeOptions = LEAST_SQUARES
) -> float:
    """Weighted root mean square error relative to that of zeros."""
    w = np.ones(values.shape[1]) if imatrix is None else imatrix.astype(np.float64)
    error = ((values - roundtrip(values, type, imatrix, options)) ** 2 * w).sum()
    return float(np.sqrt(error / (values.astype(np.float64) ** 2 * w).sum()))


def squared_error(x: np.ndarray, y: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Sum of squares of the difference, in float64, columns weighted."""
    difference = (x.astype(np.float64) - y) ** 2
    return float((difference if weights is None else difference * weights).sum())


def golden_errors(folder: Path, type: GGMLType, mode: str) -> list[tuple[float, float]]:
    """Squared errors per golden tensor, ours and of the reference's bytes; `mode` is "plain" or "imatrix"."""
    source, stored = np.load(folder / "source.npz"), np.load(folder / f"{type.name}.npz")
    errors = []
    for tensor in TENSORS:
        name = f"blk.0.{tensor}.weight"
        x, weights = source[f"{name}/f32"], source[f"{name}/imatrix"]
        matrices = x.reshape(-1, *x.shape[-2:])
        theirs = stored[f"{name}/{mode}"].reshape(len(matrices), -1)
        ours = their = 0.0
        for matrix, w, data in zip(matrices, weights, theirs, strict=True):
            used = w if mode == "imatrix" else None
            ours += squared_error(matrix, roundtrip(matrix, type, used), used)
            their += squared_error(matrix, dequantize(data, type, matrix.shape[::-1]), used)
        errors.append((ours, their))
    return errors


def golden_ratios(folder: Path, type: GGMLType, mode: str) -> list[float]:
    """Our squared error per golden tensor over the reference's; 1 where both are 0."""
    return [ours / their if their else float(ours > 0) + 1 for ours, their in golden_errors(folder, type, mode)]


def assert_golden_bytes(folder: Path, type: GGMLType, mode: str) -> None:
    source, stored = np.load(folder / "source.npz"), np.load(folder / f"{type.name}.npz")
    for tensor in TENSORS:
        x = source[f"blk.0.{tensor}.weight/f32"]
        ours = quantize_rows(x.reshape(-1, x.shape[-1]), type)
        np.testing.assert_array_equal(ours, stored[f"blk.0.{tensor}.weight/{mode}"], err_msg=tensor)


def hostile_rows(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Rows (8, 512) that searches of scales have tripped over."""
    shape = (8, 512)
    outlier = rng.standard_normal(shape) * 0.02
    outlier[:, 5] = 30
    sparse = rng.standard_normal(shape) * (np.arange(512) % 37 == 0)
    rows = {
        "heavy tails": rng.standard_t(1.2, shape),
        "tiny": rng.standard_normal(shape) * 1e-8,
        "subnormal": rng.standard_normal(shape) * 1e-40,
        "huge": rng.standard_normal(shape) * 1e4,
        "beyond half floats": rng.standard_normal(shape) * 1e30,
        "largest": np.full(shape, 3.4e38),
        "constant": np.full(shape, 0.7),
        "negative constant": np.full(shape, -0.7),
        "positive": rng.random(shape) + 1,
        "zeros": np.zeros(shape),
        "outlier": outlier,
        "sparse": sparse,
        "ternary": rng.integers(-1, 2, shape) * 0.37,
    }
    return {name: x.astype(np.float32) for name, x in rows.items()}


def hostile_weights(rng: np.random.Generator) -> list[np.ndarray | None]:
    """None, wide-spread weights, some zeros, all zeros, one spike, extreme magnitudes."""
    w = (rng.random(512) ** 4).astype(np.float32)
    holes, spike = w.copy(), np.full(512, 1e-3, np.float32)
    holes[:100], holes[::2], spike[9] = 0, 0, 1e6
    scaled = [(w * np.float32(f)).astype(np.float32) for f in (1e30, 1e-30)]
    return [None, w, holes, np.zeros(512, np.float32), spike, *scaled]


def assert_survives(rng: np.random.Generator, type: GGMLType, overshoot: float = 2.1) -> None:
    """Hostile rows decode to finite values, at most `overshoot` times as large; zeros stay zeros."""
    for name, x in hostile_rows(rng).items():
        for weights, options in itertools.product(hostile_weights(rng), (LEAST_SQUARES, EncodeOptions())):
            decoded = roundtrip(x, type, weights, options)
            assert np.isfinite(decoded).all(), name
            assert float(np.abs(decoded).max()) <= overshoot * float(np.abs(x).max()) + 1e-6, name
            if name == "zeros":
                assert not decoded.any()


def assert_no_worse_than_zeros(rng: np.random.Generator, type: GGMLType) -> None:
    """No row, however hostile, is farther from its code than from 0."""
    for name, x in hostile_rows(rng).items():
        assert squared_error(x, roundtrip(x, type)) <= squared_error(x, np.zeros_like(x)) * (1 + 1e-6), name


def assert_rows_independent(rng: np.random.Generator, type: GGMLType, ne0: int) -> None:
    """The bytes of a row (or group of rows) depend neither on its neighbours nor on the number of threads."""
    x = rng.laplace(size=(44, ne0)).astype(np.float32)
    weights = rng.random(ne0).astype(np.float32)
    height = TYPES[type].rows
    for used in (None, weights):
        whole = quantize_rows(x, type, used)
        for n_threads in (2, 3):
            np.testing.assert_array_equal(whole, quantize_rows(x, type, used, n_threads=n_threads))
        for first, stop in ((5 * height, 6 * height), (height, 4 * height)):
            part = quantize_rows(x[first:stop], type, used)
            np.testing.assert_array_equal(part, whole.reshape(44, -1)[first:stop].reshape(-1))


def assert_important_columns_gain(rng: np.random.Generator, type: GGMLType) -> None:
    """Weights lower the weighted error; equal ones change nothing."""
    x = rng.standard_normal((16, 512)).astype(np.float32)
    weights = np.where(np.arange(512) % 8 == 0, 1.0, 0.01).astype(np.float32)
    with_, without = (squared_error(x, roundtrip(x, type, w), weights) for w in (weights, None))
    assert with_ < 0.9 * without
    flat = np.full(512, 3.0, np.float32)
    np.testing.assert_array_equal(quantize_rows(x, type, flat), quantize_rows(x, type))


def assert_found_again(rng: np.random.Generator, type: GGMLType) -> None:
    """Decoded rows are nearly representable."""
    x = rng.standard_normal((4, 512)).astype(np.float32)
    y = roundtrip(x, type)
    assert squared_error(y, roundtrip(y, type)) <= 0.3 * squared_error(x, y)
