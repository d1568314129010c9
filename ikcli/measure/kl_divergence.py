"""KL divergence of a model from the stored log-probabilities of another, usually less quantized one.

Statistics per scored position: D(base || model), change of the probability of the right token, agreement of the most
likely token, as in llama.cpp's `perplexity --kl-divergence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, NonFiniteError
from ikcli.measure.chunks import Windows, evaluate
from ikcli.measure.kld_file import U16, BaseReader, split_rows
from ikcli.measure.perplexity import bos_of, chunk_error
from ikcli.measure.protocol import FloatRows, SessionLike, TokenIds
from ikcli.measure.stats import (
    F64,
    covariance_of_means,
    error_of_difference,
    for_row_blocks,
    log_sum_exp,
    mean_and_error,
    pick,
    safe_exp,
    share_error,
)

if TYPE_CHECKING:
    from ikcli.measure.chunks import WindowValues

MIN_LOG_PROB = np.float32(-16.0)
"""Tokens the base model finds less likely than this are left out of the divergence."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Values per scored position, float64 (n,): negative log-likelihoods, divergence, p - p_base; bool same_top."""

    nll: F64
    nll_base: F64
    kld: F64
    p_diff: F64
    same_top: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls, n: int) -> Positions:
        """Allocate n positions without initializing them."""
        return cls(np.empty(n), np.empty(n), np.empty(n), np.empty(n), np.zeros(n, dtype=bool))

    def slice(self, start: int, stop: int) -> Positions:
        """Return views of positions start..stop-1."""
        s = np.s_[start:stop]
        return Positions(self.nll[s], self.nll_base[s], self.kld[s], self.p_diff[s], self.same_top[s])


@dataclass(frozen=True, slots=True)
class KlSummary:
    """Each value with its standard error. Shares and probabilities are fractions, not percentages."""

    count: int
    ppl: tuple[float, float]
    ppl_base: tuple[float, float]
    correlation: float
    log_ratio: tuple[float, float]
    ppl_diff: tuple[float, float]
    kld: tuple[float, float]
    p_diff: tuple[float, float]
    p_diff_rms: tuple[float, float]
    same_top: tuple[float, float]


@dataclass(frozen=True, slots=True)
class KlParams:
    """Sizes; n_batch in tokens. Several chunks are decoded side by side if they fit."""

    n_batch: int = 2048
    chunks: int = -1
    fail_on_nan: bool = True
    n_threads: int = 1


@dataclass(frozen=True, slots=True)
class KlChunk:
    """The running summary after chunk `index` (from 0); None for a chunk that was left out."""

    index: int
    summary: KlSummary | None
    pass_seconds: float


@dataclass(frozen=True, slots=True)
class KlResult:
    """The summary over all chunks and the values per position from which it was computed."""

    summary: KlSummary
    positions: Positions
    n_chunks: int


def compare_rows(logits: FloatRows, base: U16, targets: TokenIds, n_threads: int = 1) -> Positions:
    """Compare logits (n, n_vocab) with encoded base rows (n, row_width) at positions followed by targets (n,)."""
    n_rows, n_vocab = logits.shape
    result = Positions.empty(n_rows)

    def work(rows: slice) -> None:
        _compare_block(logits[rows], base[rows], targets[rows], result.slice(rows.start, rows.stop))

    for_row_blocks(work, n_rows, n_vocab, n_threads)
    return result


def _compare_block(logits: FloatRows, base: U16, targets: TokenIds, out: Positions) -> None:
    scale, minimum, q = split_rows(base, logits.shape[1])
    top, lse = log_sum_exp(logits)
    log_norm = top + lse
    out.nll[:] = log_norm - pick(logits, targets)
    base_at_target = q[np.arange(len(targets)), targets].astype(np.float32)
    out.nll_base[:] = -(scale * base_at_target + minimum)

    log_base = q.astype(np.float32)
    log_base *= scale[:, None]
    log_base += minimum[:, None]
    p_base = np.exp(log_base)
    p_base *= log_base > MIN_LOG_PROB
    log_base -= logits
    log_base += log_norm.astype(np.float32)[:, None]
    p_base *= log_base
    kld = p_base.sum(axis=1, dtype=np.float64)
    if np.isnan(kld).any():
        # a token that the base hardly ever picks may have an infinite logit here: 0 * inf must not count
        sums = np.nansum(p_base, axis=1, dtype=np.float64)
        kld = np.where(np.isfinite(log_norm), sums, np.nan)
    out.kld[:] = kld
    out.p_diff[:] = np.exp(-out.nll) - np.exp(-out.nll_base)
    out.same_top[:] = logits.argmax(axis=1) == q.argmax(axis=1)


def summarise(p: Positions) -> KlSummary:
    """Compute means, ratios and their errors over scored positions."""
    log_ppl, log_ppl_error = mean_and_error(p.nll)
    log_base, log_base_error = mean_and_error(p.nll_base)
    ppl, ppl_base = safe_exp(log_ppl), safe_exp(log_base)
    covariance = covariance_of_means(p.nll, p.nll_base)
    errors = log_ppl_error * log_base_error
    mse, mse_error = mean_and_error(p.p_diff * p.p_diff)
    rms = math.sqrt(mse)
    same = float(p.same_top.mean()) if len(p.same_top) else math.nan
    return KlSummary(
        count=len(p.nll),
        ppl=(ppl, ppl * log_ppl_error),
        ppl_base=(ppl_base, ppl_base * log_base_error),
        correlation=covariance / errors if errors > 0 else math.nan,
        log_ratio=(log_ppl - log_base, error_of_difference(log_ppl_error, log_base_error, covariance)),
        ppl_diff=(
            ppl - ppl_base,
            error_of_difference(ppl * log_ppl_error, ppl_base * log_base_error, ppl * ppl_base * covariance),
        ),
        kld=mean_and_error(p.kld),
        p_diff=mean_and_error(p.p_diff),
        p_diff_rms=(rms, 0.5 / rms * mse_error if rms > 0 else 0.0),
        same_top=(same, share_error(same, len(p.same_top))),
    )


class _Scorer:
    """Collects the compared positions of all chunks with finite values."""

    def __init__(
        self, base: BaseReader, windows: Windows, params: KlParams, on_chunk: Callable[[KlChunk], None] | None
    ) -> None:
        self._base = base
        self._params = params
        self._on_chunk = on_chunk
        self._n_scored = windows.n_scored
        self._values = Positions.empty(windows.n_chunk * windows.n_scored)
        self._pending: dict[int, Positions] = {}
        self.n_chunks = 0

    @property
    def positions(self) -> Positions:
        return self._values.slice(0, self.n_chunks * self._n_scored)

    def score(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        found = compare_rows(logits, self._base.rows(chunk, row, len(targets)), targets, self._params.n_threads)
        _copy(found, self._pending.setdefault(chunk, Positions.empty(self._n_scored)).slice(row, row + len(targets)))

    def finish(self, chunk: int, pass_seconds: float) -> None:
        self.add(chunk, self._pending.pop(chunk), pass_seconds)

    def add(self, chunk: int, found: Positions, pass_seconds: float) -> None:
        """Take the values of a whole chunk."""
        if not (np.isfinite(found.nll).all() and np.isfinite(found.kld).all()):
            self._leave_out(chunk, pass_seconds, None)
            return
        at = self.n_chunks * self._n_scored
        _copy(found, self._values.slice(at, at + self._n_scored))
        self.n_chunks += 1
        self._report(KlChunk(chunk, summarise(self.positions), pass_seconds))

    def failed(self, chunk: int, error: NonFiniteError) -> None:
        self._pending.pop(chunk, None)
        self._leave_out(chunk, 0.0, error)

    def _leave_out(self, chunk: int, pass_seconds: float, cause: NonFiniteError | None) -> None:
        if self._params.fail_on_nan:
            raise chunk_error(chunk, cause)
        self._report(KlChunk(chunk, None, pass_seconds))

    def _report(self, chunk: KlChunk) -> None:
        if self._on_chunk is not None:
            self._on_chunk(chunk)


def _copy(source: Positions, target: Positions) -> None:
    for name in ("nll", "nll_base", "kld", "p_diff", "same_top"):
        getattr(target, name)[:] = getattr(source, name)


def windows_of(base: BaseReader, params: KlParams, bos: int | None) -> Windows:
    """Return the chunks of the base file as windows to evaluate."""
    n_ctx = base.n_ctx
    tokens = base.tokens if params.chunks < 0 else base.tokens[: params.chunks]
    return Windows(tokens, n_ctx // 2, n_ctx - 2, params.n_batch, max(1, params.n_batch // n_ctx), bos)


def run(
    session: SessionLike, base: BaseReader, params: KlParams, *, on_chunk: Callable[[KlChunk], None] | None = None
) -> KlResult:
    """Evaluate the tokens stored in the base file and compare; on_chunk gets running summaries.

    Raises FormatError if the vocabulary differs, and NonFiniteError like `perplexity.run`.
    """
    check_vocabulary(base, session.n_vocab)
    windows = windows_of(base, params, bos_of(session))
    scorer = _Scorer(base, windows, params, on_chunk)
    evaluate(session, windows, scorer)
    return KlResult(summarise(scorer.positions), scorer.positions, scorer.n_chunks)


def gather(
    found: Iterable[WindowValues],
    base: BaseReader,
    windows: Windows,
    params: KlParams,
    on_chunk: Callable[[KlChunk], None] | None = None,
) -> KlResult:
    """Build the result of `run` from the values of all chunks in order."""
    scorer = _Scorer(base, windows, params, on_chunk)
    for window in found:
        if window.values is None:
            scorer.failed(window.chunk, NonFiniteError(window.problem))
        else:
            nll, nll_base, kld, p_diff, same_top = window.values
            positions = Positions(nll, nll_base, kld, p_diff, same_top.astype(bool))
            scorer.add(window.chunk, positions, window.pass_seconds)
    return KlResult(summarise(scorer.positions), scorer.positions, scorer.n_chunks)


def check_vocabulary(base: BaseReader, n_vocab: int) -> None:
    """Raise FormatError if the base file was made with a model of another vocabulary."""
    if base.n_vocab != n_vocab:
        raise FormatError(
            f"{base.path} was made with a vocabulary of {base.n_vocab} tokens, this model has {n_vocab}; "
            f"use a base file made with a model of the same family"
        )
