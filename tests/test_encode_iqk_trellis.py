"""What the IQ*_K and the trellis types have in common: errors, hostile input, threads, weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encode_checks import (
    assert_found_again,
    assert_important_columns_gain,
    assert_no_worse_than_zeros,
    assert_rows_independent,
    assert_survives,
    golden_errors,
    rel_rmse,
)

from ikcli.gguf.constants import GGMLType

TRELLIS = (GGMLType.IQ1_KT, GGMLType.IQ2_KT, GGMLType.IQ3_KT, GGMLType.IQ4_KT)
# Type -> (relative RMSE of Gaussian rows; highest ratio of squared errors to the reference's: plain, weighted).
CEILINGS: dict[GGMLType, tuple[float, float, float]] = {
    GGMLType.IQ2_K: (0.278, 0.85, 0.95),
    GGMLType.IQ3_K: (0.132, 0.93, 0.92),
    GGMLType.IQ4_K: (0.0622, 0.88, 0.88),
    GGMLType.IQ5_K: (0.0304, 0.86, 0.78),
    GGMLType.IQ6_K: (0.0142, 0.88, 0.90),
    GGMLType.IQ2_KS: (0.309, 0.87, 0.96),
    GGMLType.IQ3_KS: (0.151, 0.93, 0.94),
    GGMLType.IQ4_KS: (0.0725, 0.93, 0.94),
    GGMLType.IQ5_KS: (0.0356, 0.995, 0.995),
    GGMLType.IQ4_KSS: (0.088, 0.69, 0.84),
    GGMLType.IQ2_KL: (0.227, 0.90, 0.92),
    GGMLType.IQ1_KT: (0.373, 0.70, 0.84),
    GGMLType.IQ2_KT: (0.290, 0.74, 0.89),
    GGMLType.IQ3_KT: (0.154, 0.79, 0.91),
    GGMLType.IQ4_KT: (0.0865, 0.92, 0.95),
}
TYPES = sorted(CEILINGS, key=lambda t: t.name)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_error_of_gaussian_rows(type: GGMLType, rng: np.random.Generator) -> None:
    assert rel_rmse(rng.standard_normal((8, 1024)), type) < CEILINGS[type][0]


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("mode", ["plain", "imatrix"])
def test_error_is_below_the_reference(type: GGMLType, mode: str, shared_dir: Path) -> None:
    for ours, reference in golden_errors(shared_dir / "golden" / "quant", type, mode):
        assert ours <= CEILINGS[type][1 if mode == "plain" else 2] * reference


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_bytes_do_not_depend_on_threads_or_neighbours(type: GGMLType, rng: np.random.Generator) -> None:
    assert_rows_independent(rng, type, 768)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_hostile_input(type: GGMLType, rng: np.random.Generator) -> None:
    assert_survives(rng, type, overshoot=5 if type in TRELLIS else 2.1)
    assert_no_worse_than_zeros(rng, type)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_important_columns_are_more_exact(type: GGMLType, rng: np.random.Generator) -> None:
    assert_important_columns_gain(rng, type)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_decoded_rows_are_found_again(type: GGMLType, rng: np.random.Generator) -> None:
    assert_found_again(rng, type)
