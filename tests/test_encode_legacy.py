"""Encoders of 32-blocks and of int8 rows: errors, bytes of the closed forms, hostile input."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from encode_checks import assert_golden_bytes, assert_rows_independent, assert_survives, golden_ratios, rel_rmse

from ikcli.gguf.constants import GGMLType as T
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows

# Largest ratio of squared errors to the reference's, over the golden tensors that are not ternary: plain, weighted.
CEILINGS = {
    T.Q4_0: (1.0, 0.92),
    T.Q4_1: (1.0, 0.905),
    T.Q5_0: (1.0, 0.945),
    T.Q5_1: (1.0, 0.935),
    T.Q6_0: (0.945, 0.955),
    T.IQ4_NL: (0.935, 0.94),
    T.MXFP4: (1.0, 0.925),
    T.Q8_0: (1.0, 1.0),
    T.Q4_0_R8: (1.0, 0.92),
    T.IQ4_NL_R4: (0.935, 0.94),
    T.Q8_KV: (1.0, 1.0),
    T.Q8_KV_R8: (1.0, 1.0),
    T.Q8_K_R8: (1.0, 1.0),
}
# Relative RMSE on Gaussian rows, without and with weights.
GAUSSIAN = {
    T.Q4_0: (0.08606, 0.07394),
    T.Q4_1: (0.07842, 0.06000),
    T.Q5_0: (0.04251, 0.03665),
    T.Q5_1: (0.03817, 0.02905),
    T.Q6_0: (0.01950, 0.01795),
    T.IQ4_NL: (0.07332, 0.06627),
    T.MXFP4: (0.11478, 0.11093),
    T.Q8_0: (0.00536, 0.00535),
    T.Q8_KV: (0.00784, 0.00782),
    T.Q8_K_R8: (0.00697, 0.00693),
}
CLOSED = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.MXFP4, T.Q8_KV, T.Q8_KV_R8, T.Q8_K_R8, T.Q4_0_R8, T.MXFP4_R8)


@pytest.mark.parametrize("mode", ["plain", "imatrix"])
@pytest.mark.parametrize("type", CEILINGS, ids=lambda t: t.name)
def test_no_worse_than_the_reference(shared_dir: Path, type: T, mode: str) -> None:
    ratios = golden_ratios(shared_dir / "golden" / "quant", type, mode)
    assert max(ratios[:3]) <= CEILINGS[type][mode == "imatrix"] + 1e-9
    assert ratios[3] <= 1 + 1e-9  # exactly ternary


@pytest.mark.parametrize("type", CLOSED, ids=lambda t: t.name)
def test_closed_forms_are_the_reference_bytes(shared_dir: Path, type: T) -> None:
    assert_golden_bytes(shared_dir / "golden" / "quant", type, "plain")


@pytest.mark.parametrize("type", GAUSSIAN, ids=lambda t: t.name)
def test_error_on_gaussian_rows(rng: np.random.Generator, type: T) -> None:
    x = rng.standard_normal((32, 1024)) * 0.02
    weights = (rng.random(1024) ** 3 + 0.01).astype(np.float32)
    assert rel_rmse(x, type) <= GAUSSIAN[type][0]
    assert rel_rmse(x, type, weights) <= GAUSSIAN[type][1]


@pytest.mark.parametrize("type", GAUSSIAN, ids=lambda t: t.name)
def test_hostile_input(rng: np.random.Generator, type: T) -> None:
    assert_survives(rng, type)


@pytest.mark.parametrize("type", [T.Q4_0, T.Q4_1, T.Q6_0, T.IQ4_NL, T.MXFP4, T.Q8_0, T.Q8_KV], ids=lambda t: t.name)
def test_rows_are_independent(rng: np.random.Generator, type: T) -> None:
    assert_rows_independent(rng, type, 96)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("type", "lowest", "highest"),
    [(T.Q4_0, -8, 7), (T.Q5_0, -16, 15), (T.Q6_0, -32, 31), (T.Q4_1, 0, 15), (T.Q5_1, 0, 31)],
    ids=["q4_0", "q5_0", "q6_0", "q4_1", "q5_1"],
)
def test_representable_rows_come_back(
    rng: np.random.Generator, type: T, lowest: int, highest: int, weighted: bool
) -> None:
    codes = rng.integers(lowest, highest + 1, (16, 64))
    codes[:, ::32], codes[:, 1::32] = lowest, highest
    x = (codes * 0.25 + (0.5 if lowest == 0 else 0)).astype(np.float32)
    weights = rng.random(64).astype(np.float32) + np.float32(0.1)
    data = quantize_rows(x, type, weights if weighted else None)
    np.testing.assert_array_equal(dequantize(data, type, (64, 16)), x)


def test_symmetric_q4_0(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 256)).astype(np.float32)
    weights = rng.random(256).astype(np.float32)
    blocks = quantize_rows(x, T.Q4_0, weights, options=EncodeOptions(symmetric_q40=True)).reshape(-1, 18)
    d = np.abs(x.reshape(-1, 32)).max(axis=1) / np.float32(7)
    np.testing.assert_array_equal(blocks[:, :2].copy().view("<f2")[:, 0], d.astype(np.float16))
    codes = np.concatenate((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), axis=1)
    np.testing.assert_array_equal(codes, np.trunc(x.reshape(-1, 32) / d[:, None] + 8.5))
    assert codes.min() == 1 and codes.max() == 15


@pytest.mark.parametrize("type", [T.Q4_0, T.Q4_1, T.Q6_0, T.IQ4_NL, T.MXFP4], ids=lambda t: t.name)
def test_weights_that_say_nothing(rng: np.random.Generator, type: T) -> None:
    x = rng.standard_normal((4, 256)).astype(np.float32)
    zero = quantize_rows(x, type, np.zeros(256, np.float32))
    np.testing.assert_array_equal(zero, quantize_rows(x, type))


def test_weights_pull_the_error_to_unimportant_columns(rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 256))
    weights = np.where(np.arange(256) % 8 == 0, 100, 1).astype(np.float32)
    for type in (T.Q4_0, T.Q4_1, T.IQ4_NL, T.MXFP4):
        heavy = [
            math.sqrt(
                ((x - dequantize(quantize_rows(x.astype(np.float32), type, w), type, (256, 16)))[:, ::8] ** 2).mean()
            )
            for w in (None, weights)
        ]
        assert heavy[1] < 0.92 * heavy[0]
