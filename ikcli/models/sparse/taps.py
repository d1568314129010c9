"""Derive the taps of Qwen4-Exp's convolutions as the short convolution reads them: float32, one for every token.

The convolution of n-gram values has taps that are some tokens apart (between them come zeros). An indexer's entry is
the mean of keys, a convolution with equal taps, of which only the tokens that complete an entry are read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ikcli.models.hparams import HParams
from ikcli.models.sparse.ngrams import spread_taps

ARCH = "qwen4exp"
_CONV, SPREAD = "ple_conv1d.weight", "ple_conv1d_spread"
_KEYS, MEAN = "indexer.k_proj.weight", "indexer_mean"


def derived_shapes(hp: HParams) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the float32 tensors that `make` returns."""
    found: dict[str, tuple[int, ...]] = {
        f"blk.{il}.{MEAN}": (hp.at(il).pool_ratio, hp.index_head_dim) for il in sorted(hp.index_owners)
    }
    if (table := hp.ngrams) is not None:
        taps = spread_taps(table.taps, len(table.grams.multipliers))
        found[f"blk.{table.layer}.{SPREAD}"] = (taps, hp.n_stream * hp.n_embd)
    return found


def source_of(derived: str) -> str | None:
    """Return the tensor of the file that a tensor of `derived_shapes` belongs to; None: it is none of them."""
    block, _, part = derived.rpartition(".")
    source = {SPREAD: _CONV, MEAN: _KEYS}.get(part)
    return source and f"{block}.{source}"


def make(values: Callable[[str], npt.NDArray[np.float32]], hp: HParams, derived: str) -> npt.NDArray[np.float32]:
    """Return a tensor of `derived_shapes`; `values` returns one of the file."""
    n_taps, cols = derived_shapes(hp)[derived]
    if derived.endswith(MEAN):
        return np.full((cols, n_taps), 1 / n_taps, np.float32)
    assert hp.ngrams is not None
    taps = np.zeros((cols, n_taps), np.float32)
    taps[:, :: len(hp.ngrams.grams.multipliers)] = values(str(source_of(derived))).reshape(cols, -1)
    return taps
