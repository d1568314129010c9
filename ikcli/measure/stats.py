"""Arithmetic of the measurements: log-softmax over large vocabularies, means with errors, quantiles.

Rows are processed in blocks that fit the cache, in threads (NumPy releases the GIL); sums are in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]

BLOCK_ELEMENTS = 1 << 18
"""Logits per block: 1 MiB of float32, so that the passes over one block hit the cache."""

MIN_COUNT_FOR_ERROR = 10


def for_row_blocks(work: Callable[[slice], None], n_rows: int, n_cols: int, n_threads: int = 1) -> None:
    """Call work(rows) for consecutive slices that cover n_rows rows of n_cols values, on up to n_threads threads."""
    step = max(1, BLOCK_ELEMENTS // max(1, n_cols))
    blocks = [slice(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]

    def quiet(rows: slice) -> None:
        # non-finite logits are reported by the callers, not as warnings; the state is per thread
        with np.errstate(all="ignore"):
            work(rows)

    if n_threads <= 1 or len(blocks) <= 1:
        for rows in blocks:
            quiet(rows)
        return
    with ThreadPoolExecutor(min(n_threads, len(blocks))) as pool:
        list(pool.map(quiet, blocks))


def log_sum_exp(logits: F32) -> tuple[F32, F64]:
    """Return the maximum (n,) and log(sum(exp(x - maximum))) (n,) of each row of (n, n_vocab) logits."""
    top = logits.max(axis=1)
    work = logits - top[:, None]
    np.exp(work, out=work)
    return top, np.log(work.sum(axis=1, dtype=np.float64))


def pick(logits: F32, targets: npt.NDArray[np.int32]) -> F64:
    """Return the logit of targets[i] in row i, as float64."""
    return logits[np.arange(len(targets)), targets].astype(np.float64)


def token_nll(logits: F32, targets: npt.NDArray[np.int32], n_threads: int = 1) -> F64:
    """Return the negative log-likelihood (n,) of targets[i] in row i of (n, n_vocab) logits, NaN or inf included."""
    nll = np.empty(len(targets), dtype=np.float64)

    def work(rows: slice) -> None:
        top, lse = log_sum_exp(logits[rows])
        nll[rows] = top + lse - pick(logits[rows], targets[rows])

    for_row_blocks(work, len(targets), logits.shape[1], n_threads)
    return nll


def safe_exp(value: float) -> float:
    """Return exp(value), infinity on overflow."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


class RunningNll:
    """Sums over the scored tokens so far; `ppl` is exp of their mean."""

    def __init__(self) -> None:
        self.total = 0.0
        self.total2 = 0.0
        self.count = 0

    def add(self, nll: F64) -> None:
        """Add the values of one chunk."""
        self.total += float(nll.sum())
        self.total2 += float((nll * nll).sum())
        self.count += len(nll)

    @property
    def mean(self) -> float:
        """The mean negative log-likelihood; NaN without tokens."""
        return self.total / self.count if self.count else math.nan

    @property
    def ppl(self) -> float:
        """The perplexity."""
        return safe_exp(self.mean)

    @property
    def mean_error(self) -> float:
        """The standard error of the mean; 0 where the variance is not positive."""
        if self.count < 2:
            return 0.0
        variance = self.total2 / self.count - self.mean * self.mean
        return math.sqrt(variance / (self.count - 1)) if variance > 0 else 0.0


def mean_and_error(values: F64) -> tuple[float, float]:
    """Return the mean and its standard error; the error is 0 for 10 values or fewer."""
    if len(values) == 0:
        return 0.0, 0.0
    mean = float(values.mean())
    variance = float(values.var())
    if len(values) <= MIN_COUNT_FOR_ERROR or variance <= 0:
        return mean, 0.0
    return mean, math.sqrt(variance / (len(values) - 1))


def covariance_of_means(a: F64, b: F64) -> float:
    """Return the covariance of the means of two paired samples; 0 below 10 pairs."""
    if len(a) < MIN_COUNT_FOR_ERROR:
        return 0.0
    return float(((a - a.mean()) * (b - b.mean())).mean()) / (len(a) - 1)


def error_of_difference(error_a: float, error_b: float, covariance: float) -> float:
    """Return the standard error of a - b for correlated a and b."""
    return math.sqrt(max(0.0, error_a * error_a + error_b * error_b - 2.0 * covariance))


def share_error(share: float, count: int) -> float:
    """Return the standard error of a share of `count` trials."""
    return math.sqrt(share * (1.0 - share) / (count - 1)) if count > 1 else 0.0
