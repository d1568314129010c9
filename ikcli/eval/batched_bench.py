"""batched-bench: speed of B sequences side by side, for all combinations of prompt length, generated tokens and B.

Per test, from an empty cache: the prompts of all sequences (with a shared prompt: of one, whose cache rows are then
copied to the others), then TG steps that compute one token of every sequence. Output answers to llama-batched-bench.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ikcli.config import RunConfig
from ikcli.engine.batch import Batch
from ikcli.engine.bench_cases import BatchedTest, batched_tests
from ikcli.engine.sizes import batched_session
from ikcli.log import warn

if TYPE_CHECKING:
    from ikcli.engine.planner import Planner
    from ikcli.engine.session import Session

WARMUP_TOKENS = 16
_COLUMNS = (("PP", 6), ("TG", 6), ("B", 4), ("N_KV", 6), ("T_PP s", 8), ("S_PP t/s", 8), ("T_TG s", 8),
            ("S_TG t/s", 8), ("T s", 8), ("S t/s", 8))  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchedRow:
    """One measured test; seconds, and tokens of all sequences per second."""

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
    """Measure the tests, which fit the cache of the session; on_row gets each row as soon as it is measured."""
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
    """A short prompt and a step of generation, then an empty cache."""
    session.sequences.divide(1)
    n = max(1, min(WARMUP_TOKENS, session.n_ctx - 1))
    session.decode(Batch.single(np.zeros(n, np.int32)))
    session.clear()


def _prompts(session: Session, test: BatchedTest, rng: np.random.Generator) -> None:
    """Fill the cache of every sequence, in logical batches; logits of the very last token only."""
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
    """One token of every sequence, as many at a time as a logical batch holds."""
    batch = Batch(
        rng.integers(0, session.n_vocab, test.pl, dtype=np.int32),
        np.full(test.pl, pos, np.int32),
        np.arange(test.pl, dtype=np.int32),
        np.ones(test.pl, np.bool_),
    )
    for start in range(0, test.pl, session.n_batch):
        session.generate(batch.slice(start, start + session.n_batch))


# --- the command ------------------------------------------------------------------------------------------------------
class Printer:
    """Writes header and rows to stdout, flushed line by line."""

    def __init__(self, config: RunConfig, n_kv_max: int, n_batch: int, n_ubatch: int) -> None:
        self._json = config.batched.output_format == "jsonl"
        self._settings = {
            "n_kv_max": n_kv_max,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "flash_attn": int(config.flash_attn),
            "is_pp_shared": int(config.batched.shared_prompt),
            "n_gpu_layers": -1 if config.n_gpu_layers is None else config.n_gpu_layers,
            "n_threads": config.n_threads,
            "n_threads_batch": config.n_threads_batch,
        }

    def header(self) -> None:
        """What precedes the rows of a table."""
        if self._json:
            return
        _write("")
        _write("main: " + ", ".join(f"{name} = {value}" for name, value in self._settings.items()))
        _write("")
        _write("|" + " | ".join(f"{name:>{width}}" for name, width in _COLUMNS) + " |")
        _write("|" + "-|-".join("-" * width for _, width in _COLUMNS) + "-|")

    def row(self, row: BatchedRow) -> None:
        """One measured test."""
        t = row.test
        if not self._json:
            _write(
                f"|{t.pp:6d} | {t.tg:6d} | {t.pl:4d} | {t.n_kv:6d} | {row.t_pp:8.3f} | {row.speed_pp:8.2f} | "
                f"{row.t_tg:8.3f} | {row.speed_tg:8.2f} | {row.t:8.3f} | {row.speed:8.2f} |"
            )
            return
        counts = {**self._settings, "pp": t.pp, "tg": t.tg, "pl": t.pl, "n_kv": t.n_kv}
        values = {"t_pp": row.t_pp, "speed_pp": row.speed_pp, "t_tg": row.t_tg, "speed_tg": row.speed_tg, "t": row.t,
                  "speed": row.speed}  # fmt: skip
        fields = [f'"{k}": {v}' for k, v in counts.items()] + [f'"{k}": {v:f}' for k, v in values.items()]
        _write("{" + ", ".join(fields) + " }")


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_command(config: RunConfig, planner: Planner | None = None) -> int:
    """`ik batched-bench`: rows on stdout as they are measured, logs on stderr; 130 after Ctrl-C."""
    from ikcli.engine.session import Session

    tests = batched_tests(config)
    for t in tests.left_out:
        warn(f"PP {t.pp}, TG {t.tg}, B {t.pl} needs {t.n_kv} tokens, -c has {tests.n_kv_max}: left out")
    config, sizes = batched_session(config)
    opened = Session.open(config, n_ctx=sizes.n_ctx, n_seq_max=sizes.n_seq, n_step=sizes.n_step, planner=planner)
    try:
        with closing(opened) as session:
            if config.warmup:
                warm_up(session)
            printer = Printer(session.config, tests.n_kv_max, session.n_batch, session.n_ubatch)
            printer.header()
            run(session, tests.fitting, seed=max(1, config.seed), on_row=printer.row)
    except KeyboardInterrupt:
        return 130
    return 0
