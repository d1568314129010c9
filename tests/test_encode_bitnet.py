"""Ternary types: least-squares scales against an exhaustive search, exact ternary rows, edge inputs, golden errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from encode_checks import assert_rows_independent, golden_errors, roundtrip, squared_error

from ikcli.gguf.constants import GGMLType
from ikcli.quant.encoders import quantize_rows

Floats = npt.NDArray[np.float32]
TYPES = [GGMLType.IQ1_BN, GGMLType.IQ2_BN]


def least_error(x: Floats, weights: Floats) -> float:
    """Error of the best scale of every row: one of the prefixes of the elements sorted by magnitude is not 0."""
    total = 0.0
    for row in np.abs(x.astype(np.float64)):
        order = np.argsort(-row)
        mass, moment = np.cumsum(weights[order].astype(np.float64)), np.cumsum((weights * row)[order])
        total += float((weights * row * row).sum() - (moment * moment / mass).max())
    return total


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("kind", ["normal", "laplace", "standard_cauchy"])
@pytest.mark.parametrize("weighted", [False, True])
def test_scale_is_the_best_one(type: GGMLType, kind: str, weighted: bool, rng: np.random.Generator) -> None:
    x = getattr(rng, kind)(size=(24, 512)).astype(np.float32)
    weights = rng.uniform(0.05, 1, 512).astype(np.float32) if weighted else np.ones(512, np.float32)
    y = roundtrip(x, type, weights if weighted else None)
    assert squared_error(x, y, weights) <= 1.003 * least_error(x, weights)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("scale", [1.0, 0.03125, 1024.0])
def test_ternary_rows_are_exact(type: GGMLType, scale: float, rng: np.random.Generator) -> None:
    x = (rng.integers(-1, 2, (5, 192)) * scale).astype(np.float32)
    x[3] = 0.0
    x[4] = -scale
    assert np.array_equal(roundtrip(x, type), x)
    weights = rng.uniform(0, 1, 192).astype(np.float32)
    assert np.array_equal(quantize_rows(x, type, weights), quantize_rows(x, type))


def test_any_magnitude_is_exact_with_a_wide_scale(rng: np.random.Generator) -> None:
    x = rng.integers(-1, 2, (4, 256)).astype(np.float32) * np.array([[1e-42], [0.0123], [1e9], [3e38]], np.float32)
    assert np.array_equal(roundtrip(x, GGMLType.IQ2_BN), x)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("size", [1e-42, 1e-8, 1e4, 1e9, 1e38])
def test_hard_magnitudes(type: GGMLType, size: float, rng: np.random.Generator) -> None:
    x = rng.uniform(-3, 3, (4, 256)).astype(np.float32) * np.float32(size)
    for weights in (None, np.zeros(256, np.float32), np.r_[np.full(128, 1e-12), np.full(128, 1e12)].astype(np.float32)):
        y = roundtrip(x, type, weights)
        assert np.isfinite(y).all()
        assert squared_error(x, y) <= squared_error(x, np.zeros_like(x)) * (1 + 1e-6)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_bytes_do_not_depend_on_threads_or_neighbours(type: GGMLType, rng: np.random.Generator) -> None:
    assert_rows_independent(rng, type, 320)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("mode", ["plain", "imatrix"])
def test_error_is_below_the_reference(type: GGMLType, mode: str, shared_dir: Path) -> None:
    errors = golden_errors(shared_dir / "golden" / "quant", type, mode)
    for (ours, reference), ceiling in zip(errors, (0.75, 0.75, 0.75, 1.0), strict=True):
        assert ours <= ceiling * reference
