"""Encoders of the grid quants: error against golden bytes of the reference, known ceilings, edge inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from encode_checks import LEAST_SQUARES, assert_rows_independent, golden_ratios

from ikcli.errors import UsageError
from ikcli.gguf.constants import GGMLType as T
from ikcli.quant import tables
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows

Floats = npt.NDArray[np.float32]

TYPES = [T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ1_S, T.IQ1_M, T.IQ1_S_R4, T.IQ1_M_R4]

# Squared error / that of the reference over the golden tensors: geometric mean and worst, with and without weights.
GOLDEN_CEILINGS = {
    T.IQ2_XXS: ((0.60, 0.70), None),
    T.IQ2_XS: ((0.70, 0.86), None),
    T.IQ2_S: ((0.58, 0.79), (0.73, 0.83)),
    T.IQ3_XXS: ((0.66, 0.75), (0.63, 0.72)),
    T.IQ3_S: ((0.52, 0.74), (0.53, 0.76)),
    T.IQ1_S: ((0.64, 0.83), None),
    T.IQ1_M: ((0.74, 0.88), (0.43, 0.64)),
    T.IQ1_S_R4: ((0.73, 0.90), (0.80, 0.93)),
    T.IQ1_M_R4: ((0.83, 0.91), (0.90, 0.95)),
}
# Relative RMSE of Gaussian rows without weights, and weighted with weights u^2 of uniform u.
GAUSSIAN_CEILINGS = {
    T.IQ2_XXS: (0.327, 0.267),
    T.IQ2_XS: (0.284, 0.229),
    T.IQ2_S: (0.239, 0.206),
    T.IQ3_XXS: (0.175, 0.138),
    T.IQ3_S: (0.131, 0.108),
    T.IQ1_S: (0.448, 0.405),
    T.IQ1_M: (0.415, 0.359),
    T.IQ1_S_R4: (0.449, 0.405),
    T.IQ1_M_R4: (0.413, 0.357),
}


def decoded(values: Floats, type: T, imatrix: Floats | None = None, n_threads: int = 1) -> Floats:
    data = quantize_rows(values, type, imatrix, n_threads=n_threads, options=LEAST_SQUARES)
    return dequantize(data, type, values.shape[::-1])


def relative_error(x: Floats, y: Floats, w: Floats | None = None) -> float:
    weights = np.ones(x.shape[-1]) if w is None else w.astype(np.float64)
    error = (weights * (x.astype(np.float64) - y) ** 2).sum()
    return float(np.sqrt(error / (weights * x.astype(np.float64) ** 2).sum()))


def weights_for(n: int) -> Floats:
    return np.random.default_rng(7).random(n, np.float32) ** 2 + np.float32(0.001)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("weighted", [True, False], ids=["imatrix", "plain"])
def test_error_against_reference(type: T, weighted: bool, shared_dir: Path) -> None:
    ceilings = GOLDEN_CEILINGS[type][0 if weighted else 1]
    if ceilings is None:
        pytest.skip("the reference refuses this type without importance weights")
    ratios = golden_ratios(shared_dir / "golden" / "quant", type, "imatrix" if weighted else "plain")
    assert np.exp(np.mean(np.log(ratios))) <= ceilings[0]
    assert max(ratios) <= ceilings[1]


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_gaussian_error(type: T, rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 512)).astype(np.float32)
    w = weights_for(512)
    plain, weighted = GAUSSIAN_CEILINGS[type]
    assert relative_error(x, decoded(x, type)) <= plain
    assert relative_error(x, decoded(x, type, w), w) <= weighted


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_weights_of_one_are_no_weights(type: T, rng: np.random.Generator) -> None:
    x = rng.laplace(size=(4, 256)).astype(np.float32)
    ones = np.full(256, 3.0, np.float32)
    assert (quantize_rows(x, type) == quantize_rows(x, type, ones)).all()


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_bytes_do_not_depend_on_threads_or_neighbours(type: T, rng: np.random.Generator) -> None:
    assert_rows_independent(rng, type, 256)


def _edge_inputs() -> dict[str, Floats]:
    rng = np.random.default_rng(5)
    g = rng.standard_normal((4, 512)).astype(np.float32)
    zero_block = g.copy()
    zero_block[:, 32:64] = 0
    zero_block[:, 256:] = 0
    return {
        "zeros": np.zeros_like(g),
        "minus zeros": -np.zeros_like(g),
        "zero block": zero_block,
        "1e-8": g * np.float32(1e-8),
        "denormal": g * np.float32(1e-42),
        "1e4": g * np.float32(1e4),
        "1e30": g * np.float32(1e30),
        "outlier": np.eye(4, 512, 7, dtype=np.float32) * 5 + g * np.float32(1e-3),
        "heavy tails": rng.laplace(size=g.shape).astype(np.float32) ** 3,
        "ternary": np.sign(np.round(g)) * np.float32(0.01),
    }


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_edge_inputs(type: T) -> None:
    weights = {
        "none": None,
        "zero": np.zeros(512, np.float32),
        "half": (np.arange(512) % 64 >= 32).astype(np.float32),
        "wide": np.exp(np.random.default_rng(1).standard_normal(512) * 6).astype(np.float32),
        "huge": np.full(512, 1e30, np.float32),
    }
    for name, x in _edge_inputs().items():
        for w_name, w in weights.items():
            y = decoded(x, type, w)
            assert np.isfinite(y).all(), (name, w_name)
            if not x.any():
                assert not y.any(), (name, w_name)
            else:  # never worse than writing zeros
                metric = w if w is not None and w.any() else None
                assert relative_error(x, y, metric) <= 1.0001, (name, w_name)


@pytest.mark.parametrize("type", [t for t in TYPES if t != T.IQ1_S_R4], ids=lambda t: t.name)
def test_scale_does_not_matter(type: T, rng: np.random.Generator) -> None:
    """Powers of two only move the exponent of the stored scale."""
    x = rng.standard_normal((4, 256)).astype(np.float32)
    assert (decoded(x * np.float32(0.125), type) == decoded(x, type) * np.float32(0.125)).all()


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_constant_rows(type: T) -> None:
    x = np.full((4, 256), 0.3, np.float32)
    assert relative_error(x, decoded(x, type)) < 1e-3
    assert relative_error(x, decoded(-x, type)) > 1
    assert relative_error(-x, decoded(-x, type)) < 1e-3


@pytest.mark.parametrize("type", [T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S], ids=lambda t: t.name)
def test_grid_points_survive(type: T, rng: np.random.Generator) -> None:
    """Rows made of grid points of one scale, with an even number of minus signs per 8, are nearly representable."""
    grid = tables.grid(type.name)
    dims = grid.shape[1]
    points = grid[rng.integers(0, len(grid), (4, 512 // dims))].reshape(4, 512)
    signs = tables.sign_table()[tables.sign_bytes(rng.integers(0, 128, (4, 64)))].reshape(4, 512)
    x = (points * signs * 0.01).astype(np.float32)
    assert relative_error(x, decoded(x, type)) < 1e-3


def test_unweighted_columns_are_sacrificed(rng: np.random.Generator) -> None:
    """Outliers in columns without weight must not cost the others their resolution."""
    x = rng.standard_normal((4, 256)).astype(np.float32)
    w = np.ones(256, np.float32)
    w[::32] = 0
    spiked = x.copy()
    spiked[:, ::32] *= 100
    for type in TYPES:
        clean = relative_error(x, decoded(x, type, w), w)
        assert relative_error(spiked, decoded(spiked, type, w), w) <= 1.1 * clean, type.name


@pytest.mark.parametrize("type", [T.IQ1_S_R4, T.IQ1_M_R4], ids=lambda t: t.name)
@pytest.mark.parametrize("ne0", [32, 96, 1120])
def test_rows_of_blocks_of_32(type: T, ne0: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, ne0)).astype(np.float32)
    assert relative_error(x, decoded(x, type, weights_for(ne0)), weights_for(ne0)) < 0.45


def test_group_height(rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 256)).astype(np.float32)
    with pytest.raises(UsageError, match="groups of 4"):
        quantize_rows(x, T.IQ1_S_R4)
    with pytest.raises(UsageError):
        quantize_rows(x[:4, :240], T.IQ2_XXS)
