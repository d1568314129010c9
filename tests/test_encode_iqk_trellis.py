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
from ikcli.quant.encoders import EncodeOptions

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
# Squared errors of `known_rows` over those of zeros, plain and with weights for columns; what a search finds is neither
# better nor worse, on any processor.
ANSWERS: dict[GGMLType, tuple[float, float]] = {
    GGMLType.IQ2_K: (0.08393637, 0.07560391),
    GGMLType.IQ3_K: (0.01840575, 0.01658838),
    GGMLType.IQ4_K: (0.004236365, 0.00375027),
    GGMLType.IQ5_K: (0.0009458647, 0.0008319087),
    GGMLType.IQ6_K: (0.0002050289, 0.0001799528),
    GGMLType.IQ2_KS: (0.1033747, 0.0947722),
    GGMLType.IQ3_KS: (0.02343884, 0.02149361),
    GGMLType.IQ4_KS: (0.00542012, 0.00501831),
    GGMLType.IQ5_KS: (0.001281156, 0.001186261),
    GGMLType.IQ4_KSS: (0.007746619, 0.006325356),
    GGMLType.IQ2_KL: (0.05664937, 0.04867175),
    GGMLType.IQ1_KT: (0.1586836, 0.113031),
    GGMLType.IQ2_KT: (0.0832545, 0.06261173),
}
TYPES = sorted(CEILINGS, key=lambda t: t.name)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_error_of_gaussian_rows(type: GGMLType, rng: np.random.Generator) -> None:
    assert rel_rmse(rng.standard_normal((8, 1024)), type) < CEILINGS[type][0]


def known_rows() -> np.ndarray:
    """12 rows of 512 values with long tails, without a generator of random numbers."""
    i = np.arange(12 * 512, dtype=np.uint64)
    a, b = (
        ((i * np.uint64(factor) + np.uint64(start)) % np.uint64(1 << 32) >> np.uint64(8)).astype(np.float64) + 0.5
        for factor, start in ((2654435761, 12345), (40503 * 2246822519, 777))
    )
    x = (2 * a / 2**24 - 1) ** 3 + 0.2 * (2 * b / 2**24 - 1)
    return x.astype(np.float32).reshape(12, 512)


@pytest.mark.parametrize("type", [t for t in TYPES if t in ANSWERS], ids=lambda t: t.name)
def test_searches_find_what_they_are_known_to_find(type: GGMLType) -> None:
    rows, weights = known_rows(), (0.05 + np.arange(512) % 7 / 7).astype(np.float32)
    found = [rel_rmse(rows, type, w, EncodeOptions()) ** 2 for w in (None, weights)]
    assert found == pytest.approx(list(ANSWERS[type]), rel=1e-5)


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
