"""Trellis types: clusters of the codebook, rows with an outlier."""

from __future__ import annotations

import numpy as np
import pytest
from encode_checks import roundtrip
from tiers import some

from ikcli.gguf.constants import GGMLType
from ikcli.quant.encoders.trellis_clusters import codebook
from ikcli.quant.tables import trellis


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


@pytest.mark.parametrize(("type", "ceiling"), some(
    [(GGMLType.IQ2_KT, 0.35), (GGMLType.IQ3_KT, 0.2), (GGMLType.IQ4_KT, 0.1)], [(GGMLType.IQ2_KT, 0.35)], unpack=True
))  # fmt: skip
def test_outlier_does_not_erase_the_row(type: GGMLType, ceiling: float, rng: np.random.Generator) -> None:
    x = (0.01 * rng.standard_normal((1, 2048))).astype(np.float32)
    x[0, 700] = 0.6
    y = roundtrip(x, type)
    ordinary = np.delete(x - y, slice(672, 704), axis=1)
    assert np.sqrt((ordinary**2).mean()) < ceiling * 0.01
