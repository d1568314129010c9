"""Trellis types: clusters, errors against the reference's files and against ceilings, edge inputs, threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ikcli.gguf.constants import GGMLType
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import quantize_rows
from ikcli.quant.encoders.trellis_clusters import codebook
from ikcli.quant.tables import trellis

Floats = npt.NDArray[np.float32]

# Type -> (relative RMSE of Gaussian rows; highest ratio of squared errors to the reference's: plain, weighted).
CEILINGS: dict[GGMLType, tuple[float, float, float]] = {
    GGMLType.IQ1_KT: (0.373, 0.70, 0.84),
    GGMLType.IQ2_KT: (0.290, 0.74, 0.88),
    GGMLType.IQ3_KT: (0.154, 0.79, 0.91),
    GGMLType.IQ4_KT: (0.0865, 0.92, 0.95),
}
TYPES = sorted(CEILINGS, key=lambda t: t.name)


def decoded(data: npt.NDArray[np.uint8], type: GGMLType, like: Floats) -> Floats:
    return dequantize(data, type, like.shape[::-1])


def squared_error(x: Floats, y: Floats, weights: Floats | None = None) -> float:
    difference = (x.astype(np.float64) - y) ** 2
    return float((difference if weights is None else difference * weights).sum())


def relative_rmse(x: Floats, type: GGMLType) -> float:
    y = decoded(quantize_rows(x, type), type, x)
    return float(np.sqrt(squared_error(x, y) / squared_error(x, np.zeros_like(x))))


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_error_of_gaussian_rows(type: GGMLType, rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 1024)).astype(np.float32)
    assert relative_rmse(x, type) < CEILINGS[type][0]


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("mode", ["plain", "imatrix"])
def test_error_is_below_the_reference(type: GGMLType, mode: str, shared_dir: Path) -> None:
    source = np.load(shared_dir / "golden/quant/source.npz")
    golden = np.load(shared_dir / f"golden/quant/{type.name}.npz")
    for name in [key.removesuffix("/f32") for key in source if key.endswith("/f32")]:
        x, importance = source[f"{name}/f32"], source[f"{name}/imatrix"]
        ours = reference = 0.0
        theirs = decoded(golden[f"{name}/{mode}"], type, x).reshape(-1, *x.shape[-2:])
        for part, their, w in zip(x.reshape(-1, *x.shape[-2:]), theirs, importance, strict=True):
            weights = w if mode == "imatrix" else None
            ours += squared_error(part, decoded(quantize_rows(part, type, weights), type, part), weights)
            reference += squared_error(part, their, weights)
        assert ours <= CEILINGS[type][1 if mode == "plain" else 2] * reference, name


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_bytes_do_not_depend_on_threads_or_neighbours(type: GGMLType, rng: np.random.Generator) -> None:
    x = rng.laplace(size=(13, 768)).astype(np.float32)
    weights = rng.uniform(0, 1, 768).astype(np.float32)
    once = quantize_rows(x, type, weights)
    for n_threads in (2, 3):
        assert np.array_equal(quantize_rows(x, type, weights, n_threads=n_threads), once)
    assert np.array_equal(quantize_rows(x[5:6], type, weights), once.reshape(13, -1)[5])


def hard_rows() -> dict[str, Floats]:
    """Rows that break naive searches."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((2, 512)).astype(np.float32)
    outlier = normal.copy()
    outlier[:, 100] = 1000.0
    sparse = np.zeros((2, 512), np.float32)
    sparse[:, ::37] = normal[:, ::37]
    return {
        "huge": normal * np.float32(1e4),
        "beyond half precision": normal * np.float32(1e9),
        "largest": np.full((2, 512), 3e38, np.float32),
        "tiny": normal * np.float32(1e-8),
        "denormal": normal * np.float32(1e-42),
        "constant": np.full((2, 512), 0.37, np.float32),
        "negative constant": np.full((2, 512), -0.37, np.float32),
        "outlier": outlier,
        "sparse": sparse,
        "heavy": rng.standard_cauchy((2, 512)).astype(np.float32),
        "ternary": rng.integers(-1, 2, (2, 512)).astype(np.float32),
        "zeros": np.zeros((2, 512), np.float32),
    }


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("name", list(hard_rows()))
def test_hard_rows_stay_finite_and_never_worse_than_zero(type: GGMLType, name: str) -> None:
    x = hard_rows()[name]
    for weights in (None, np.zeros(512, np.float32), np.r_[np.full(256, 1e-12), np.full(256, 1e12)].astype(np.float32)):
        y = decoded(quantize_rows(x, type, weights), type, x)
        assert np.isfinite(y).all()
        if name == "zeros":
            assert not y.any()
        if weights is None:
            assert squared_error(x, y) <= squared_error(x, np.zeros_like(x)) * (1 + 1e-6)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_important_columns_are_more_exact(type: GGMLType, rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 512)).astype(np.float32)
    weights = np.where(np.arange(512) % 8 == 0, 1.0, 0.01).astype(np.float32)
    with_, without = (decoded(quantize_rows(x, type, w), type, x) for w in (weights, None))
    assert squared_error(x, with_, weights) < 0.9 * squared_error(x, without, weights)
    flat = np.full(512, 3.0, np.float32)
    assert np.array_equal(quantize_rows(x, type, flat), quantize_rows(x, type))


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_decoded_rows_are_found_again(type: GGMLType, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 512)).astype(np.float32)
    y = decoded(quantize_rows(x, type), type, x)
    again = decoded(quantize_rows(y, type), type, y)
    assert squared_error(y, again) <= 0.3 * squared_error(x, y)


@pytest.mark.parametrize("magnitude", [False, True])
def test_clusters_hold_every_row_once(magnitude: bool) -> None:
    book = codebook(8, 8192, 128, magnitude=magnitude)
    rows = np.abs(trellis(8)[:8192]) if magnitude else trellis(8)[:8192]
    assert np.array_equal(book.rows, rows)
    found = book.members.transpose(0, 2, 1).reshape(-1, 8)
    assert np.array_equal(found, rows[book.indices])
    assert np.array_equal(book.norms, (found.astype(np.float32) ** 2).sum(axis=1))
    vectors = book.indices.reshape(-1, 16)
    owners = [np.unique(vectors[i:j]) for i, j in zip(book.starts[:-1], book.starts[1:], strict=True)]
    assert np.array_equal(np.sort(np.concatenate(owners)), np.arange(8192))
    centers = book.centers.transpose(0, 2, 1).reshape(-1, 8)
    spread = [((rows[owner] - center) ** 2).sum() for owner, center in zip(owners, centers, strict=True)]
    assert sum(spread) < 0.45 * rows.var(axis=0).sum() * len(rows)


def test_outlier_does_not_erase_the_row(rng: np.random.Generator) -> None:
    x = (0.01 * rng.standard_normal((1, 2048))).astype(np.float32)
    x[0, 700] = 0.6
    for type, ceiling in ((GGMLType.IQ2_KT, 0.35), (GGMLType.IQ3_KT, 0.2), (GGMLType.IQ4_KT, 0.1)):
        y = decoded(quantize_rows(x, type), type, x)
        ordinary = np.delete(x - y, slice(672, 704), axis=1)
        assert np.sqrt((ordinary**2).mean()) < ceiling * 0.01, type.name
