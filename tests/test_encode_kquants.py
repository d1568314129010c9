"""Encoders of super-blocks: errors, hostile input, ternary rows, layout of the packed fields."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encode_checks import LEAST_SQUARES, assert_rows_independent, assert_survives, golden_ratios, rel_rmse

from ikcli.gguf.constants import GGMLType as T
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows

# Largest ratio of squared errors to the reference's, over the golden tensors that are not ternary: plain, weighted.
CEILINGS = {
    T.Q2_K: (0.78, 0.86),
    T.Q3_K: (0.93, 0.945),
    T.Q4_K: (0.95, 0.88),
    T.Q5_K: (0.925, 0.87),
    T.Q6_K: (0.915, 0.915),
    T.IQ4_XS: (0.93, 0.91),
    T.Q2_K_R4: (0.78, 0.86),
    T.Q4_K_R4: (0.95, 0.88),
    T.IQ4_XS_R8: (0.93, 0.91),
}
# Relative RMSE on Gaussian rows, without and with weights.
GAUSSIAN = {
    T.Q2_K: (0.25788, 0.21399),
    T.Q3_K: (0.14405, 0.12744),
    T.Q4_K: (0.06943, 0.06051),
    T.Q5_K: (0.03405, 0.03015),
    T.Q6_K: (0.01637, 0.01444),
    T.IQ4_XS: (0.07375, 0.06676),
}
PLAIN_TYPES = tuple(GAUSSIAN)


@pytest.mark.parametrize("mode", ["plain", "imatrix"])
@pytest.mark.parametrize("type", CEILINGS, ids=lambda t: t.name)
def test_no_worse_than_the_reference(shared_dir: Path, type: T, mode: str) -> None:
    ratios = golden_ratios(shared_dir / "golden" / "quant", type, mode)
    assert max(ratios[:3]) <= CEILINGS[type][mode == "imatrix"]
    assert ratios[3] <= 1 + 1e-9  # exactly ternary


@pytest.mark.parametrize("type", PLAIN_TYPES, ids=lambda t: t.name)
def test_error_on_gaussian_rows(rng: np.random.Generator, type: T) -> None:
    x = rng.standard_normal((32, 1024)) * 0.02
    weights = (rng.random(1024) ** 3 + 0.01).astype(np.float32)
    assert rel_rmse(x, type) <= GAUSSIAN[type][0]
    assert rel_rmse(x, type, weights) <= GAUSSIAN[type][1]


@pytest.mark.parametrize("type", PLAIN_TYPES, ids=lambda t: t.name)
def test_hostile_input(rng: np.random.Generator, type: T) -> None:
    assert_survives(rng, type)


@pytest.mark.parametrize("type", PLAIN_TYPES, ids=lambda t: t.name)
def test_rows_are_independent(rng: np.random.Generator, type: T) -> None:
    assert_rows_independent(rng, type, 256)


@pytest.mark.parametrize("type", PLAIN_TYPES, ids=lambda t: t.name)
def test_odd_number_of_super_blocks(rng: np.random.Generator, type: T) -> None:
    x = rng.standard_normal((1, 768)).astype(np.float32)
    whole = quantize_rows(x, type, options=LEAST_SQUARES)
    cut = [np.ascontiguousarray(x[:, i : i + 256]) for i in (0, 256, 512)]
    parts = [quantize_rows(c, type, options=LEAST_SQUARES) for c in cut]
    if type != T.Q2_K:  # (of which whole rows may be ternary)
        np.testing.assert_array_equal(whole, np.concatenate(parts))
    assert rel_rmse(x, type) < 1.1 * GAUSSIAN[type][0]


@pytest.mark.parametrize("type", PLAIN_TYPES, ids=lambda t: t.name)
def test_encoded_values_can_be_encoded_again(rng: np.random.Generator, type: T) -> None:
    x = rng.standard_normal((8, 512)).astype(np.float32)
    once = dequantize(quantize_rows(x, type), type, (512, 8))
    assert rel_rmse(once, type) < 0.4 * GAUSSIAN[type][0]


@pytest.mark.parametrize("type", PLAIN_TYPES, ids=lambda t: t.name)
def test_sub_blocks_of_different_size(rng: np.random.Generator, type: T) -> None:
    """The scale of a small sub-block beside a large one is coarse; its integers are chosen with that in mind."""
    x = rng.standard_normal((16, 256)) * np.repeat([1, 0.1, 0.3, 0.03], 64)
    assert rel_rmse(x, type) <= 1.15 * GAUSSIAN[type][0]


def test_ternary_rows_of_q2_k(rng: np.random.Generator) -> None:
    codes = rng.integers(-1, 2, (4, 512))
    codes[2:] = rng.standard_normal((2, 512)).round(2) * 100
    codes[0, 0], x = 1, codes.astype(np.float32) * np.float32(0.375)
    data = quantize_rows(x, T.Q2_K)
    np.testing.assert_array_equal(dequantize(data, T.Q2_K, (512, 4))[:2], x[:2])
    blocks = data.reshape(4, 2, 84)
    assert (blocks[:2, :, :16] == 0x11).all()
    np.testing.assert_array_equal(blocks[:2, :, 80:].reshape(4, 4).copy().view("<f2"), np.float16(0.375))
    assert not (blocks[2:, :, :16] == 0x11).all()


def test_row_with_an_outlier_is_not_ternary(rng: np.random.Generator) -> None:
    x = (rng.standard_normal((2, 512)) * 0.02).astype(np.float32)
    x[:, 300] = 5  # nine tenths of the square of the row
    decoded = dequantize(quantize_rows(x, T.Q2_K), T.Q2_K, (512, 2))
    assert np.abs(decoded[:, :256]).max() > 0.02
