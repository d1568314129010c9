"""The IQ*_K family: errors against the reference's files and against ceilings, edge inputs, exact rows, threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ikcli.gguf.constants import GGMLType
from ikcli.quant import tables
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows
from ikcli.quant.encoders.iqk import SEARCHES
from ikcli.quant.encoders.iqk_pack import PACKERS
from ikcli.quant.formats import row_size

Floats = npt.NDArray[np.float32]

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


@pytest.mark.parametrize("type", [GGMLType.IQ2_K, GGMLType.IQ2_KS, GGMLType.IQ2_KL, GGMLType.IQ3_K, GGMLType.IQ3_KS])
def test_rows_of_few_bits_keep_their_norm(type: GGMLType, rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    y = decoded(quantize_rows(x, type), type, x)
    assert np.linalg.norm(y) == pytest.approx(np.linalg.norm(x), rel=2e-3)
    assert np.vdot(x, y) < 0.995 * np.vdot(x, x)  # so it is not exact, merely as long


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_layout_of_any_codes(type: GGMLType, rng: np.random.Generator) -> None:
    search = SEARCHES[type]
    n_rows, ne0 = 3, 512
    n_units = n_rows if search.per_row else n_rows * ne0 // 256
    n_subs = n_rows * ne0 // n_units // search.n
    d = np.float32(2.0) ** rng.integers(-3, 3, n_units).astype(np.float32)
    m = rng.integers(search.low, search.high + 1, (n_units, n_subs)).astype(np.int8)
    m = m | np.int8(1) if search.odd else m
    t = rng.integers(0, search.n_rows, (n_units, n_subs)).astype(np.uint8)
    if type == GGMLType.IQ2_KL:
        codes = rng.integers(0, 32, (n_units, n_subs, 16)).astype(np.uint8)
        values = tables.IQ2_KL_VALUES[codes].reshape(n_units, n_subs, 32)
    else:
        table = {"iq2": tables.IQ2_VALUES, "iq3": tables.IQ3_VALUES, "iq5": tables.IQ5_VALUES, "iq6": tables.IQ6_VALUES}
        rows = table.get(search.table, tables.IQ4_VALUES)
        codes = rng.integers(0, rows.shape[1], (n_units, n_subs, search.n)).astype(np.uint8)
        if type == GGMLType.IQ4_KSS:  # even parity in groups of four; code 1 is the odd neighbour of 0
            bits = np.unpackbits(codes[..., None], axis=-1).sum(-1).reshape(n_units, n_subs, 2, 8, 2)
            codes.reshape(n_units, n_subs, 2, 8, 2)[:, :, 0, :, 0] ^= (bits.sum((2, 4)) % 2).astype(np.uint8)
        values = rows[t[..., None], codes]
    data = PACKERS[type](d, m, t, codes, n_rows)
    assert data.shape == (n_rows, row_size(type, ne0))
    expected = (d[:, None] * m.astype(np.float32))[..., None] * values
    assert np.array_equal(dequantize(data, type, (ne0, n_rows)), expected.reshape(n_rows, ne0))


def test_slow_search_of_iq2_ks_finds_more(rng: np.random.Generator) -> None:
    x = rng.standard_normal((16, 1024)).astype(np.float32)
    slow = quantize_rows(x, GGMLType.IQ2_KS, options=EncodeOptions(slow_iq2ks=True))
    fast = quantize_rows(x, GGMLType.IQ2_KS)
    error, usual = (squared_error(x, decoded(data, GGMLType.IQ2_KS, x)) for data in (slow, fast))
    assert error < usual
