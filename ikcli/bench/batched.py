"""batched-bench: speed of B parallel sequences, for all combinations of prompt length, generated tokens and B.

Each test starts from an empty cache: the prompts of all sequences (or one shared prompt, whose cache rows are copied to
the others), then TG steps that compute one token of every sequence. Output corresponds to llama-batched-bench.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ikcli.engine.plan.bench_cases import BatchedTest
from ikcli.engine.run.batch import Batch

if TYPE_CHECKING:
    from ikcli.engine.run.session import Session

WARMUP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class BatchedRow:
    """One measured test; times in seconds, speeds in tokens of all sequences per second."""

    test: BatchedTest
    t_pp: float
    t_tg: float

    @property
    def t(self) -> float:
        return self.t_pp + self.t_tg

    @property
    def speed_pp(self) -> float:
        return _rate(self.test.n_prompt, self.t_pp)

    @property
    def speed_tg(self) -> float:
        return _rate(self.test.pl * self.test.tg, self.t_tg)

    @property
    def speed(self) -> float:
        return _rate(self.test.n_kv, self.t)


def _rate(n: int, seconds: float) -> float:
    return n / seconds if n and seconds > 0 else 0.0


def run(
    session: Session, tests: Iterable[BatchedTest], *, seed: int = 1, on_row: Callable[[BatchedRow], None] | None = None
) -> list[BatchedRow]:
    """Run the tests, which fit the cache of the session; on_row gets each row as soon as it is measured."""
    rng = np.random.default_rng(seed)
    rows = []
    for test in tests:
        session.sequences.divide(test.pl)
        started = time.perf_counter()
        _prompts(session, test, rng)
        middle = time.perf_counter()
        for i in range(test.tg):
            _step(session, test, test.pp + i, rng)
        rows.append(BatchedRow(test, middle - started, time.perf_counter() - middle))
        if on_row is not None:
            on_row(rows[-1])
    return rows


def warm_up(session: Session) -> None:
    """Decode a short prompt and a generation step, then empty the cache."""
    session.sequences.divide(1)
    n = max(1, min(WARMUP_TOKENS, session.n_ctx - 1))
    session.decode(Batch.single(np.zeros(n, np.int32)))
    session.settle_weights()
    session.clear()


def _prompts(session: Session, test: BatchedTest, rng: np.random.Generator) -> None:
    """Fill the cache of every sequence in logical batches, with logits of the very last token only."""
    if not test.pp:
        return
    n_seq = 1 if test.shared else test.pl
    n = n_seq * test.pp
    logits = np.zeros(n, np.bool_)
    logits[-1] = True
    batch = Batch(
        rng.integers(0, session.n_vocab, n, dtype=np.int32),
        np.tile(np.arange(test.pp, dtype=np.int32), n_seq),
        np.repeat(np.arange(n_seq, dtype=np.int32), test.pp),
        logits,
    )
    for start in range(0, n, session.n_batch):
        session.decode(batch.slice(start, start + session.n_batch))
    if test.shared:
        for seq in range(1, test.pl):
            session.sequences.copy(0, seq, 0, test.pp)


def _step(session: Session, test: BatchedTest, pos: int, rng: np.random.Generator) -> None:
    """Compute one token of every sequence, as many at a time as a logical batch holds."""
    batch = Batch(
        rng.integers(0, session.n_vocab, test.pl, dtype=np.int32),
        np.full(test.pl, pos, np.int32),
        np.arange(test.pl, dtype=np.int32),
        np.ones(test.pl, np.bool_),
    )
    for start in range(0, test.pl, session.n_batch):
        session.generate(batch.slice(start, start + session.n_batch))
