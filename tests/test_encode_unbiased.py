"""Unbiased rows: every type keeps the length of a row, with the codes of least squares, as far as its scales allow."""

from __future__ import annotations

import numpy as np
import pytest
from encode_checks import LEAST_SQUARES, roundtrip

from ikcli.gguf.constants import GGMLType as T
from ikcli.gguf.types import TYPES
from ikcli.quant.encoders import EncodeOptions, available_types, quantize_rows
from ikcli.quant.encoders.unbiased import scales_of, unbias

CLOSED_WITHOUT_WEIGHTS = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1)  # the reference's bytes
ROW_F16 = (T.IQ2_KS, T.IQ3_KS, T.IQ2_KL, T.IQ1_S_R4, T.IQ1_M_R4)
UNBIASED = EncodeOptions()
SCALED = [t for t in TYPES if scales_of(t) is not None and TYPES[t].base is None and t in available_types()]


def rows_of(rng: np.random.Generator, ne0: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (8, ne0) of trained models' size, with outliers, and weights of columns that differ by two orders."""
    x = rng.standard_t(5, (8, ne0)) * 0.02
    return x.astype(np.float32), np.exp(rng.normal(0, 1.2, ne0)).astype(np.float32)


def gains(x: np.ndarray, y: np.ndarray, w: np.ndarray | None) -> np.ndarray:
    """<y, x> / <x, x> of every row, in float64."""
    weighted = x.astype(np.float64) * (1 if w is None else w)
    return (weighted * y).sum(axis=1) / (weighted * x).sum(axis=1)


@pytest.mark.parametrize("weighted", [True, False], ids=["imatrix", "plain"])
@pytest.mark.parametrize("type", SCALED, ids=lambda t: t.name)
def test_rows_keep_their_length(rng: np.random.Generator, type: T, weighted: bool) -> None:
    if type in CLOSED_WITHOUT_WEIGHTS and not weighted:
        pytest.skip("bytes of the reference")
    x, w = rows_of(rng, 768)
    used = w if weighted else None
    before, after = (roundtrip(x, type, used, o) for o in (LEAST_SQUARES, UNBIASED))
    off = np.abs(gains(x, after, used) * TYPES[type].matmul_scale - 1)
    # half a step of an f16 number: of the row's own scale, or of the coarsest block's share of the row
    assert off.max() < (5e-4 if type in ROW_F16 else 4e-3 if type in (T.Q6_K, T.IQ6_K) else 1e-3)
    if TYPES[type].matmul_scale == 1:
        assert off.mean() <= np.abs(gains(x, before, used) - 1).mean() + 1e-7
    if type.name.startswith(("IQ1", "IQ2", "Q2")):
        assert gains(x, before, used).mean() < 0.985


@pytest.mark.parametrize("type", [T.Q4_K, T.IQ2_XXS, T.IQ1_M, T.IQ4_KS, T.IQ2_KT, T.IQ1_S_R4], ids=lambda t: t.name)
def test_codes_are_those_of_least_squares(rng: np.random.Generator, type: T) -> None:
    x, w = rows_of(rng, 512)
    data = quantize_rows(x, type, w, options=LEAST_SQUARES).reshape(8, -1)
    scales = scales_of(type)
    assert scales is not None
    new = quantize_rows(x, type, w).reshape(8, -1)
    assert (scales.read(new)[0] != scales.read(data)[0]).any()
    scales.write(new, scales.read(data))
    np.testing.assert_array_equal(new, data)


@pytest.mark.parametrize("type", SCALED, ids=lambda t: t.name)
def test_fields_are_written_where_they_are_read(rng: np.random.Generator, type: T) -> None:
    x, w = rows_of(rng, 512)
    data = quantize_rows(x, type, w).reshape(8, -1)
    scales, doubled = scales_of(type), data.copy()
    assert scales is not None
    scales.write(doubled, [2 * f for f in scales.read(data)])
    from ikcli.quant.decode import dequantize

    y, y2 = (dequantize(d.reshape(-1), type, (512, 8)) for d in (data, doubled))
    np.testing.assert_array_equal(y2, 2 * y)


def test_rounding_cancels_within_the_row(rng: np.random.Generator) -> None:
    """Scales so small that a step of them is percents: blocks are off, the row is not."""
    x = (rng.standard_normal((8, 4096)) * 2e-4).astype(np.float32)
    y = roundtrip(x, T.Q4_0, np.ones(4096, np.float32), UNBIASED)
    blocks = gains(x.reshape(-1, 32), y.reshape(-1, 32), None)
    assert np.abs(blocks - 1).mean() > 1e-3
    assert np.abs(gains(x, y, None) - 1).max() < 2e-4


def test_rows_that_cannot_be_scaled_stay(rng: np.random.Generator) -> None:
    x, w = rows_of(rng, 256)
    data = quantize_rows(x, T.IQ2_K, w, options=LEAST_SQUARES)
    for values in (-x, np.zeros_like(x), np.full_like(x, 3e38)):  # negative, no, and unbounded products
        np.testing.assert_array_equal(unbias(data.copy(), values, T.IQ2_K, w), data)


def test_q40_limited_on_request_stays(rng: np.random.Generator) -> None:
    x, w = rows_of(rng, 256)
    narrow = [quantize_rows(x, T.Q4_0, w, options=EncodeOptions(True, False, ls)) for ls in (False, True)]
    np.testing.assert_array_equal(*narrow)
