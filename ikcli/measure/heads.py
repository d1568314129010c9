"""Perplexity and acceptance of the heads that predict further tokens (MTP) on a text, beside the model's own.

Head k predicts, from a text up to token p + k + 1, token p + k + 2. It would be accepted where its first choice is the
model's, whose greedy choice for that position is known from the same pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ikcli.engine.run.batch import Batch
from ikcli.engine.run.head_rows import HeadRows
from ikcli.engine.run.mtp import Heads
from ikcli.measure.chunks import Windows
from ikcli.measure.protocol import FloatRows, TokenIds
from ikcli.measure.stats import RunningNll, token_nll


@dataclass(frozen=True, slots=True)
class HeadResult:
    """The values of a head (from 1): perplexity with its error over n tokens, and the share of accepted guesses."""

    head: int
    ppl: float
    error: float
    n: int
    accepted: float


class HeadScores:
    """Scores heads where the windows are scored; call it with every batch that the session decoded."""

    def __init__(self, heads: Heads, windows: Windows, n_threads: int = 1) -> None:
        self._rows = HeadRows(heads, self._score)
        self._n_heads, self._n_threads = heads.n_heads, n_threads
        self._span = windows.first, windows.last
        self._running = [RunningNll() for _ in range(heads.n_heads)]
        self._accepted = np.zeros(heads.n_heads, np.int64)
        self._best: dict[int, npt.NDArray[np.int32]] = {}  # by sequence: the model's choice for every position
        self._guesses: list[tuple[int, int, npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []

    def __call__(self, batch: Batch, logits: FloatRows) -> None:
        """Take the logits of a batch."""
        choice = logits.argmax(axis=1).astype(np.int32)
        wanted = np.flatnonzero(batch.logits)
        for seq in {*batch.seq.tolist()}:
            if batch.pos[batch.seq == seq][0] == 0:
                self._best[seq] = np.full(self._span[1] + 2, -1, np.int32)
            mine = batch.seq[wanted] == seq
            self._best[seq][batch.pos[wanted][mine] + 1] = choice[mine]
        self._rows.run()
        self._compare()

    def _score(self, seq: int, head: int, pos: int, logits: FloatRows, targets: TokenIds) -> None:
        """Keep the guesses for positions that the model's own choice is scored for."""
        low, high = (max(bound + 1 - (pos + head + 2), 0) for bound in (self._span[0], self._span[1] + 1))
        rows = logits[low:high]
        if len(rows):
            self._running[head].add(token_nll(rows, targets[low:high], self._n_threads))
            places = np.arange(len(rows), dtype=np.int32) + (pos + head + 2 + low)
            self._guesses.append((seq, head, places, rows.argmax(axis=1).astype(np.int32)))

    def _compare(self) -> None:
        for seq, head, places, guesses in self._guesses:
            self._accepted[head] += (self._best[seq][places] == guesses).sum()
        self._guesses.clear()

    def results(self) -> list[HeadResult]:
        """Return the values of all heads."""
        return [
            HeadResult(k + 1, r.ppl, r.ppl * r.mean_error, r.count, float(self._accepted[k]) / max(1, r.count))
            for k, r in enumerate(self._running)
        ]

    def close(self) -> None:
        """Leave the heads as they were."""
        self._rows.close()


def result_line(found: HeadResult) -> str:
    """Return the line that `ik perplexity` prints for a head."""
    return (
        f"MTP head {found.head}: PPL = {found.ppl:.4f} +/- {found.error:.5f}, "
        f"accepted {100 * found.accepted:.2f} % of {found.n} guesses"
    )
