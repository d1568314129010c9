"""sweep-bench: prompt and generation speed at growing depths of the cache, one row per n_ubatch tokens.

Per row, both at depth N_KV: time TG single-token decodes, remove them, then time one prompt batch of PP tokens. That
batch (or an untimed one) fills the cache for the next row. With `mtp`, a head drafts in another pass of TG. Output
corresponds to ik_llama.cpp's sweep-bench.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ikcli.bench import memory
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.mtp import Draft, Heads
from ikcli.measure.protocol import SessionLike, TokenIds
from ikcli.settings.run import RunConfig

WARMUP_TG = 4


@dataclass(frozen=True, slots=True)
class SweepParams:
    """Sizes in tokens. Rows are at depths start_depth, +step, ... up to max_depth (0: to the end of the context)."""

    pp: int
    tg: int
    step: int
    repetitions: int = 1
    stride: int = 1
    start_depth: int = 0
    max_depth: int = 0
    warmup: bool = True
    warmup_batch: bool = False
    memory: bool = False
    seed: int = 1
    mtp: bool = False


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One measured depth: seconds per pass, tokens per second, memory in MiB (None where unknown or not requested)."""

    pp: int
    tg: int
    n_kv: int
    t_pp: float
    t_tg: float
    rss_hwm_mib: float | None = None
    vram_delta_mib: float | None = None
    t_mtp: float | None = None

    @property
    def speed_pp(self) -> float:
        return self.pp / self.t_pp if self.t_pp > 0 else 0.0

    @property
    def speed_tg(self) -> float:
        return self.tg / self.t_tg if self.t_tg > 0 else 0.0

    @property
    def speed_mtp(self) -> float:
        """Return the drafted tokens per second of a head."""
        return self.tg / self.t_mtp if self.t_mtp else 0.0


def depths(params: SweepParams, n_ctx: int) -> list[int]:
    """Return the depths to measure, leaving out windows that would exceed n_ctx."""
    need = max(params.pp, params.tg)
    last = min(n_ctx - need, params.max_depth or n_ctx)
    return list(range(params.start_depth, last + 1, params.step * params.stride))


def run(
    session: SessionLike,
    params: SweepParams,
    *,
    on_row: Callable[[SweepRow], None] | None = None,
    vram_used_mib: Callable[[], float | None] = memory.no_vram,
) -> tuple[SweepRow, ...]:
    """Measure all depths on an empty single-sequence session; on_row gets each row as soon as it is measured."""
    sweep = Sweep(session, params)
    sweep.warm_up()
    rows: list[SweepRow] = []
    for depth in depths(params, session.n_ctx):
        t_pp, t_tg = sweep.measure(depth, params.repetitions if not rows else 1)
        hwm = memory.rss_hwm_mib() if params.memory else None
        vram = vram_used_mib() if params.memory else None
        rows.append(SweepRow(params.pp, params.tg, depth, t_pp, t_tg, hwm, vram, sweep.t_mtp))
        if on_row is not None:
            on_row(rows[-1])
    return tuple(rows)


class Sweep:
    """The cache of sequence 0 and the number of its valid positions."""

    def __init__(self, session: SessionLike, params: SweepParams) -> None:
        self._session = session
        self._params = params
        self._filled = 0
        self.t_mtp: float | None = None  # seconds for the drafts at the depth measured last
        self._rng = np.random.default_rng(params.seed)

    def warm_up(self) -> None:
        """Decode BOS, then a prompt and a few tokens (the first row would be slow otherwise), and empty the cache."""
        params, session = self._params, self._session
        if params.warmup:
            bos = session.tokenizer.bos_id
            self.decode(np.array([bos if bos is not None and bos >= 0 else 0], dtype=np.int32), 0)
            self.generate(1, min(WARMUP_TG, session.n_ctx - 1))
        if params.warmup_batch:
            self.forget(0)
            self.decode(self.tokens(min(session.n_ubatch, session.n_ctx)), 0)
        if params.warmup:
            session.settle_weights()
        session.clear()
        self._filled = 0

    def measure(self, depth: int, repetitions: int) -> tuple[float, float]:
        """Return seconds for PP and TG at a depth, averaged over the repetitions."""
        params = self._params
        self._fill(depth)
        self._session.checkpoint(0)
        started = time.perf_counter()
        for _ in range(repetitions):
            self.forget(depth)
            self.generate(depth, params.tg)
        middle = time.perf_counter()
        if params.mtp:
            self.forget(depth)
            self.t_mtp = self._draft(depth, params.tg)
        drafted = time.perf_counter()
        for _ in range(repetitions):
            self.forget(depth)
            self.decode(self.tokens(params.pp), depth)
        ended = time.perf_counter()
        self._filled = depth + params.pp
        return (ended - drafted) / repetitions, (middle - started) / repetitions

    def _fill(self, depth: int) -> None:
        """Make exactly the positions 0..depth-1 valid."""
        if self._filled < depth:
            self.forget(self._filled)
            self.decode(self.tokens(depth - self._filled), self._filled)
        self._filled = depth

    def tokens(self, n: int) -> TokenIds:
        """Return n random tokens."""
        return self._rng.integers(0, self._session.n_vocab, n, dtype=np.int32)

    def forget(self, depth: int) -> None:
        """Drop the positions from depth on."""
        kept = self._session.truncate(0, depth)
        if kept < depth:  # recurrent states can only be rolled back to checkpoints
            self.decode(self.tokens(depth - kept), kept)

    def generate(self, depth: int, n: int) -> None:
        """Decode n tokens at depth, one by one."""
        for i, token in enumerate(self.tokens(n).tolist()):
            self._session.step_each([token], [depth + i], [0])

    def _draft(self, depth: int, n: int) -> float:
        """Generate n tokens and let the first head guess the one after each; return the seconds of the guesses."""
        heads: Heads | None = getattr(self._session, "heads", None)
        assert heads is not None  # a file without them was refused
        seconds = 0.0
        text = np.zeros(depth + n + 1, np.int32)  # only its end is looked at
        text[depth:] = self.tokens(n + 1)
        if depth:  # rows that the text before is due
            heads.draft([Draft(0, text[: depth + 1], 1, 0.0, [], [])])
        for end in range(depth + 1, depth + n + 1):
            self._session.decode(Batch.single(text[end - 1 : end], end - 1))
            started = time.perf_counter()
            heads.draft([Draft(0, text[: end + 1], 1, 0.0, [], [])])
            seconds += time.perf_counter() - started
        return seconds

    def decode(self, tokens: TokenIds, pos0: int) -> None:
        """Decode tokens at pos0..., in batches, with logits of the last one only."""
        step = self._session.n_batch
        for start in range(0, len(tokens), step):
            last = start + step >= len(tokens)
            part = tokens[start : start + step]
            self._session.decode(Batch.single(part, pos0 + start, logits="last" if last else "none"))


def params_of(config: RunConfig, n_ubatch: int) -> SweepParams:
    """Return the parameters of the options for a session with this physical batch."""
    sweep = config.sweep
    return SweepParams(
        pp=sweep.pp or n_ubatch,
        tg=config.n_predict if config.n_predict > 0 else max(1, n_ubatch // 4),
        step=n_ubatch,
        repetitions=max(1, sweep.repetitions),
        stride=max(1, sweep.stride),
        start_depth=sweep.start_depth,
        max_depth=sweep.max_depth,
        warmup=config.warmup,
        warmup_batch=config.warmup and sweep.warmup_batch,
        memory=sweep.memory,
        mtp=sweep.mtp,
        seed=max(1, config.seed),
    )
