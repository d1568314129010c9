"""What every encoder of blocks is checked for: errors against the golden files, hostile input, independence of rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows

TENSORS = ("attn_q", "attn_output", "ffn_up_exps", "ffn_gate")
PLAIN = EncodeOptions()


def roundtrip(values: np.ndarray, type: GGMLType, imatrix: np.ndarray | None = None) -> np.ndarray:
    """Encoded and decoded again."""
    rows = values.astype(np.float32)
    return dequantize(quantize_rows(rows, type, imatrix), type, rows.shape[::-1])


def rel_rmse(values: np.ndarray, type: GGMLType, imatrix: np.ndarray | None = None) -> float:
    """Weighted root mean square error relative to that of zeros."""
    w = np.ones(values.shape[1]) if imatrix is None else imatrix.astype(np.float64)
    error = ((values - roundtrip(values, type, imatrix)) ** 2 * w).sum()
    return float(np.sqrt(error / (values.astype(np.float64) ** 2 * w).sum()))


def golden_ratios(folder: Path, type: GGMLType, mode: str) -> list[float]:
    """Squared error per golden tensor over that of the reference's bytes; `mode` is "plain" or "imatrix"."""
    source, stored = np.load(folder / "source.npz"), np.load(folder / f"{type.name}.npz")
    ratios = []
    for tensor in TENSORS:
        name = f"blk.0.{tensor}.weight"
        x, weights = source[f"{name}/f32"], source[f"{name}/imatrix"]
        matrices = x.reshape(-1, *x.shape[-2:])
        theirs = stored[f"{name}/{mode}"].reshape(len(matrices), -1)
        ours = their = 0.0
        for matrix, w, data in zip(matrices, weights, theirs, strict=True):
            used, metric = (w, w.astype(np.float64)) if mode == "imatrix" else (None, np.float64(1))
            error = (matrix - roundtrip(matrix, type, used).astype(np.float64)) ** 2
            ours += float((error * metric).sum())
            known = dequantize(data, type, matrix.shape[::-1]).astype(np.float64)
            their += float(((matrix - known) ** 2 * metric).sum())
        ratios.append(ours / their if their else float(ours > 0) + 1)
    return ratios


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


def assert_survives(rng: np.random.Generator, type: GGMLType) -> None:
    """Hostile rows decode to finite values of the right size; zeros stay zeros."""
    for name, x in hostile_rows(rng).items():
        for weights in hostile_weights(rng):
            decoded = roundtrip(x, type, weights)
            assert np.isfinite(decoded).all(), name
            assert float(np.abs(decoded).max()) <= 2.1 * float(np.abs(x).max()) + 1e-6, name
            if name == "zeros":
                assert not decoded.any()


def assert_rows_independent(rng: np.random.Generator, type: GGMLType, ne0: int) -> None:
    """The bytes of a row depend neither on its neighbours nor on the number of threads."""
    x = rng.standard_normal((48, ne0)).astype(np.float32)
    weights = rng.random(ne0).astype(np.float32)
    for used in (None, weights):
        whole = quantize_rows(x, type, used)
        for n_threads in (2, 3):
            np.testing.assert_array_equal(whole, quantize_rows(x, type, used, n_threads=n_threads))
        first = quantize_rows(x[16:32], type, used)
        np.testing.assert_array_equal(first, whole.reshape(3, -1)[1])
