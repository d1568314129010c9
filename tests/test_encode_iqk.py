"""The IQ*_K family: layout of the packed fields, length of decoded rows, the slow search."""

from __future__ import annotations

import numpy as np
import pytest
from encode_checks import squared_error

from ikcli.gguf.constants import GGMLType
from ikcli.quant import tables
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import EncodeOptions, quantize_rows
from ikcli.quant.encoders.iqk import SEARCHES
from ikcli.quant.encoders.iqk_pack import PACKERS
from ikcli.quant.formats import row_size

TYPES = sorted(SEARCHES, key=lambda t: t.name)


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
    error, usual = (squared_error(x, dequantize(data, GGMLType.IQ2_KS, (1024, 16))) for data in (slow, fast))
    assert error < usual
