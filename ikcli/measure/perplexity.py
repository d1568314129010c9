"""Perplexity of a text: exp of the mean negative log-likelihood of the second half of each window.

The algorithm corresponds to llama.cpp's `perplexity` tool (with --ppl-stride: its strided variant), so that values are
comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ikcli.engine.plan.sizes import DEFAULT_WINDOW, windows_session
from ikcli.errors import IkError, NonFiniteError, UsageError
from ikcli.measure.chunks import Watcher, WindowCounts, Windows, chunk_windows, evaluate, strided_windows
from ikcli.measure.protocol import FloatRows, HasTokenizer, SessionLike, TokenIds
from ikcli.measure.stats import F64, RunningNll, token_nll
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.plan.planner import Planner
    from ikcli.measure.chunks import WindowValues
    from ikcli.models import MediaConfig


@dataclass(frozen=True, slots=True)
class PerplexityParams:
    """Sizes in tokens; chunks -1 = all; stride 0 = consecutive windows, else n_ctx is the length of each window."""

    n_ctx: int = DEFAULT_WINDOW
    n_batch: int = 2048
    chunks: int = -1
    stride: int = 0
    fail_on_nan: bool = True
    n_threads: int = 1


@dataclass(frozen=True, slots=True)
class ChunkScore:
    """Running values after chunk `index` (from 0), whose text starts at token `start`; NaN for a chunk left out."""

    index: int
    start: int
    ppl: float
    mean_nll: float
    mean_nll_error: float
    pass_seconds: float


@dataclass(frozen=True, slots=True)
class PerplexityResult:
    """The final value and its standard error over n_tokens scored tokens; `chunks` holds the running values."""

    ppl: float
    error: float
    mean_nll: float
    n_chunks: int
    n_ctx: int
    n_tokens: int
    chunks: tuple[ChunkScore, ...]


RowObserver = Callable[[int, int, FloatRows, TokenIds], None]


def plan(tokens: TokenIds, params: PerplexityParams, bos: int | None) -> Windows:
    """Return the windows that `run` evaluates; UsageError for sizes that cannot be scored, IkError for a short text."""
    if params.n_ctx < 4:
        raise UsageError(
            f"-c {params.n_ctx} is too small to score anything; give at least 4 tokens, for example -c 512"
        )
    if params.chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to evaluate; give a number above 0, or -1 for all")
    if params.stride < 0 or params.stride >= params.n_ctx:
        raise UsageError(f"--ppl-stride {params.stride} must be below the window of {params.n_ctx} tokens")
    if len(tokens) < 2 * params.n_ctx:
        raise IkError(
            f"the text has {len(tokens)} tokens, but a context of {params.n_ctx} needs at least {2 * params.n_ctx}; "
            f"use a longer text or a smaller -c"
        )
    if params.stride:
        return strided_windows(tokens, params.n_ctx, params.n_batch, params.stride, max_chunks=params.chunks)
    return chunk_windows(tokens, params.n_ctx, params.n_batch, max_chunks=params.chunks, bos=bos)


def bos_of(session: HasTokenizer) -> int | None:
    """Return the token that starts every window, if the model uses one."""
    return session.tokenizer.bos_id if session.tokenizer.add_bos else None


def run(
    session: SessionLike,
    tokens: TokenIds,
    params: PerplexityParams,
    *,
    on_chunk: Callable[[ChunkScore], None] | None = None,
    on_rows: RowObserver | None = None,
    watcher: Watcher | None = None,
) -> PerplexityResult:
    """Compute the perplexity of int32 tokens; on_chunk gets running values, on_rows the logits of scored positions.

    `watcher` gets every batch with its logits.

    Raises NonFiniteError at the first chunk that is not finite, unless params.fail_on_nan is off: then such chunks are
    left out of the estimate.
    """
    windows = plan(tokens, params, bos_of(session))
    scorer = _Scorer(params, windows, on_chunk, on_rows)
    evaluate(session, windows, scorer, watcher)
    return scorer.result()


def gather(
    found: Iterable[WindowValues],
    windows: WindowCounts,
    params: PerplexityParams,
    on_chunk: Callable[[ChunkScore], None] | None = None,
) -> PerplexityResult:
    """Build the result of `run` from the values of all windows in order."""
    scorer = _Scorer(params, windows, on_chunk, None)
    for window in found:
        if window.values is None:
            scorer.failed(window.chunk, NonFiniteError(window.problem))
        else:
            scorer.add(window.chunk, window.values[0], window.pass_seconds)
    return scorer.result()


def chunk_error(chunk: int, cause: NonFiniteError | None = None) -> NonFiniteError:
    """Return the error that names a chunk (from 1) and the way to find the cause."""
    detail = f" ({cause})" if cause else ""
    return NonFiniteError(
        f"chunk {chunk + 1} gives logits that are not finite{detail}; run again with --check-tensors to find bad "
        f"weights, or with --no-fail-on-nan to leave such chunks out"
    )


class _Scorer:
    """Adds up the negative log-likelihoods of the windows."""

    def __init__(
        self,
        params: PerplexityParams,
        windows: WindowCounts,
        on_chunk: Callable[[ChunkScore], None] | None,
        on_rows: RowObserver | None,
    ) -> None:
        self.running = RunningNll()
        self.chunks: list[ChunkScore] = []
        self.n_left_out = 0
        self._params = params
        self._n_chunk = windows.n_chunk
        self._step = params.stride or params.n_ctx
        self._nll: F64 = np.empty(windows.n_scored, dtype=np.float64)
        self._pending: dict[int, F64] = {}
        self._on_chunk = on_chunk
        self._on_rows = on_rows

    def score(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        nll = self._pending.setdefault(chunk, np.empty_like(self._nll))
        nll[row : row + len(targets)] = token_nll(logits, targets, self._params.n_threads)
        if self._on_rows is not None and np.isfinite(nll[row : row + len(targets)]).all():
            self._on_rows(chunk, row, logits, targets)

    def finish(self, chunk: int, pass_seconds: float) -> None:
        self.add(chunk, self._pending.pop(chunk), pass_seconds)

    def add(self, chunk: int, nll: F64, pass_seconds: float) -> None:
        """Take the values of a whole window."""
        if not np.isfinite(nll).all():
            self._leave_out(chunk, pass_seconds, None)
            return
        self.running.add(nll)
        self._report(chunk, self.running.ppl, self.running.mean, self.running.mean_error, pass_seconds)

    def result(self) -> PerplexityResult:
        """Return the result over what was scored."""
        running = self.running
        return PerplexityResult(
            ppl=running.ppl,
            error=running.ppl * running.mean_error,
            mean_nll=running.mean,
            n_chunks=self._n_chunk - self.n_left_out,
            n_ctx=self._params.n_ctx,
            n_tokens=running.count,
            chunks=tuple(self.chunks),
        )

    def failed(self, chunk: int, error: NonFiniteError) -> None:
        self._pending.pop(chunk, None)
        self._leave_out(chunk, 0.0, error)

    def _leave_out(self, chunk: int, pass_seconds: float, cause: NonFiniteError | None) -> None:
        self._report(chunk, math.nan, math.nan, math.nan, pass_seconds)
        if self._params.fail_on_nan:
            raise chunk_error(chunk, cause)
        self.n_left_out += 1

    def _report(self, chunk: int, ppl: float, mean: float, error: float, pass_seconds: float) -> None:
        score = ChunkScore(chunk, chunk * self._step, ppl, mean, error, pass_seconds)
        self.chunks.append(score)
        if self._on_chunk is not None:
            self._on_chunk(score)


def params_of(config: RunConfig) -> PerplexityParams:
    """Return the parameters of the options; without -c the window has 512 tokens."""
    options = config.perplexity
    return PerplexityParams(
        n_ctx=config.n_ctx or DEFAULT_WINDOW,
        n_batch=config.n_batch,
        chunks=options.chunks,
        stride=options.stride,
        fail_on_nan=options.fail_on_nan,
        n_threads=max(1, config.n_threads_batch or config.n_threads),
    )


def open_window_session(
    config: RunConfig,
    n_ctx: int,
    n_batch: int,
    *,
    stride: int = 0,
    planner: Planner | None = None,
    media: MediaConfig | None = None,
) -> SessionLike:
    """Open a session for max(1, n_batch // n_ctx) parallel windows; with a stride one sequence gets all cells.

    `media`: of images in the windows, which are decoded one by one.
    """
    from ikcli.engine.run.opening import open_session

    settings, sizes = windows_session(replace(config, n_batch=n_batch), n_ctx, stride)
    n_ctx, n_seq = (sizes.n_ctx, sizes.n_seq) if media is None else (n_ctx, 1)
    session: SessionLike = open_session(settings, n_ctx=n_ctx, n_seq_max=n_seq, planner=planner, media=media)
    return session
