"""Run windows of a text through a session and pass on the logits of the scored positions.

Windows of `n_ctx` tokens are decoded side by side, n_batch // n_ctx sequences per decode. A window longer than the
batch is decoded in pieces whose logits are passed on one by one, so memory stays bounded by one batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ikcli.engine.run.batch import Batch
from ikcli.errors import NonFiniteError
from ikcli.measure.protocol import FloatRows, SessionLike, TokenIds
from ikcli.measure.stats import F64


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows to evaluate: tokens int32 (n_chunk, n_ctx); positions first..last predict tokens first+1..last+1.

    `bos` replaces the first token of each window where it is not None. n_seq windows are decoded together.
    """

    tokens: TokenIds
    first: int
    last: int
    n_batch: int
    n_seq: int = 1
    bos: int | None = None

    @property
    def n_chunk(self) -> int:
        return self.tokens.shape[0]

    @property
    def n_ctx(self) -> int:
        return self.tokens.shape[1]

    @property
    def n_scored(self) -> int:
        """The number of scored tokens per window."""
        return self.last - self.first + 1


class WindowCounts(Protocol):
    """How many windows there are, how many of them are decoded together, and the most scored tokens of one."""

    @property
    def n_chunk(self) -> int: ...

    @property
    def n_seq(self) -> int: ...

    @property
    def n_scored(self) -> int: ...


class ChunkScorer(Protocol):
    """Receives what `evaluate` computes, windows in order."""

    def score(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        """Take the logits of the scored positions row, row+1, ... of a window and the tokens they should predict."""

    def finish(self, chunk: int, pass_seconds: float) -> None:
        """Finish a window whose positions were all scored; its decode took pass_seconds."""

    def failed(self, chunk: int, error: NonFiniteError) -> None:
        """Note that the session met a non-finite value in this window."""


def chunk_windows(
    tokens: TokenIds, n_ctx: int, n_batch: int, *, max_chunks: int = -1, bos: int | None = None
) -> Windows:
    """Return consecutive windows whose second half is scored: positions n_ctx/2 .. n_ctx-2."""
    n_chunk = len(tokens) // n_ctx
    if max_chunks >= 0:
        n_chunk = min(n_chunk, max_chunks)
    table = np.ascontiguousarray(tokens[: n_chunk * n_ctx]).reshape(n_chunk, n_ctx)
    return Windows(table, n_ctx // 2, n_ctx - 2, n_batch, max(1, n_batch // n_ctx), bos)


def strided_windows(tokens: TokenIds, n_ctx: int, n_batch: int, stride: int, *, max_chunks: int = -1) -> Windows:
    """Return windows `stride` tokens apart; the last `stride` predictions of each are scored and no BOS is inserted."""
    n_chunk = max(0, -(-(len(tokens) - n_ctx) // stride))
    if max_chunks >= 0:
        n_chunk = min(n_chunk, max_chunks)
    views = np.lib.stride_tricks.sliding_window_view(tokens, n_ctx)[::stride][:n_chunk]
    return Windows(views, n_ctx - stride - 1, n_ctx - 2, n_batch)


Watcher = Callable[[Batch, FloatRows], None]
"""Takes every decoded batch with its logits."""


def evaluate(session: SessionLike, windows: Windows, scorer: ChunkScorer, watcher: Watcher | None = None) -> None:
    """Decode all windows and report to the scorer; if a decode fails, repeat it window by window to find the cause."""
    for start in range(0, windows.n_chunk, windows.n_seq):
        group = range(start, min(start + windows.n_seq, windows.n_chunk))
        try:
            _evaluate_group(session, windows, group, scorer, watcher)
        except _DecodeFailed as failure:
            if len(group) == 1:
                scorer.failed(start, failure.error)
                continue
            _evaluate_each(session, windows, group, scorer, watcher)


class _DecodeFailed(Exception):
    """A non-finite value inside the session, as opposed to one found by the scorer."""

    def __init__(self, error: NonFiniteError) -> None:
        super().__init__(str(error))
        self.error = error


def _evaluate_each(
    session: SessionLike, windows: Windows, group: Iterable[int], scorer: ChunkScorer, watcher: Watcher | None
) -> None:
    for chunk in group:
        try:
            _evaluate_group(session, windows, range(chunk, chunk + 1), scorer, watcher)
        except _DecodeFailed as failure:
            scorer.failed(chunk, failure.error)


def _evaluate_group(
    session: SessionLike, windows: Windows, group: range, scorer: ChunkScorer, watcher: Watcher | None
) -> None:
    session.clear()
    seconds = 0.0
    step = windows.n_ctx if len(group) > 1 else min(windows.n_ctx, windows.n_batch)
    for pos0 in range(0, windows.n_ctx, step):
        pos1 = min(pos0 + step, windows.n_ctx)
        batch = _batch(windows, group, pos0, pos1)
        started = time.perf_counter()
        try:
            logits = session.decode(batch)
        except NonFiniteError as error:
            raise _DecodeFailed(error) from error
        seconds += time.perf_counter() - started
        if watcher is not None:
            logits = logits.copy()  # the watcher may compute with the session, which overwrites them
            watcher(batch, logits)
        _hand_over(windows, group, pos0, pos1, logits, scorer)
    for chunk in group:
        scorer.finish(chunk, seconds)


def _batch(windows: Windows, group: range, pos0: int, pos1: int) -> Batch:
    tokens = windows.tokens[group.start : group.stop, pos0:pos1].copy()
    if pos0 == 0 and windows.bos is not None:
        tokens[:, 0] = windows.bos
    n_seq, n_pos = tokens.shape
    pos = np.tile(np.arange(pos0, pos1, dtype=np.int32), n_seq)
    seq = np.repeat(np.arange(n_seq, dtype=np.int32), n_pos)
    wanted = (pos >= windows.first) & (pos <= windows.last)
    return Batch(tokens.reshape(-1), pos, seq, wanted)


def _hand_over(windows: Windows, group: range, pos0: int, pos1: int, logits: FloatRows, scorer: ChunkScorer) -> None:
    low, high = max(pos0, windows.first), min(pos1 - 1, windows.last)
    n_rows = high - low + 1
    if n_rows <= 0:
        return
    for i, chunk in enumerate(group):
        rows = logits[i * n_rows : (i + 1) * n_rows]
        scorer.score(chunk, low - windows.first, rows, windows.tokens[chunk, low + 1 : high + 2])


@dataclass(frozen=True, slots=True)
class WindowValues:
    """The values (n, n_scored) of a window, or why there are none."""

    chunk: int
    pass_seconds: float
    values: F64 | None
    problem: str = ""
