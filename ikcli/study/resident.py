"""A model that stays in memory while single tensors are replaced, and the effect on its predictions.

Serves `ik study` and `ik quantize --calibrate`. The text is run once unchanged. A trial replaces some tensors, computes
from the first of them on (`engine/run/replay.py`), and is compared with the unchanged model position by position.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ikcli.engine.plan.planner import Planner
from ikcli.engine.plan.sizes import Sizes
from ikcli.engine.run.model import Model
from ikcli.engine.run.replay import ReplayRunner
from ikcli.engine.run.session import Session
from ikcli.engine.run.session_log import Timings
from ikcli.errors import IkError, NonFiniteError
from ikcli.gguf.constants import GGMLType
from ikcli.measure.chunks import Windows, chunk_windows, evaluate
from ikcli.measure.kl_divergence import compare_rows
from ikcli.measure.kld_file import U16, encode_rows
from ikcli.measure.perplexity import bos_of
from ikcli.measure.protocol import FloatRows, TokenIds
from ikcli.measure.stats import F64
from ikcli.measure.text import load_text, tokenize
from ikcli.quant.encoding import Encoding
from ikcli.settings.run import PromptConfig, RunConfig
from ikcli.study.rounding import Replaced, rounded

PREFIX_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class ResidentOptions:
    """The model, a text file, and windows of n_ctx tokens, of which at most `chunks` are run (-1: all).

    `prefix_bytes`: memory for the outputs of layers, so that later layers can be recomputed alone.
    """

    model: Path
    text: Path
    chunks: int = 8
    n_ctx: int = 512
    n_threads: int = 1
    overrides: tuple[str, ...] = ()
    prefix_bytes: int = PREFIX_BYTES


class _EndsAtNaN:
    """Common part of the scorers: a value that is not finite ends the work."""

    def finish(self, chunk: int, pass_seconds: float) -> None:
        """Do nothing per window."""

    def failed(self, chunk: int, error: NonFiniteError) -> None:
        raise error


@dataclass
class _Base(_EndsAtNaN):
    """Collects the log-probabilities of the unchanged model, 16 bits each.

    `own` is the divergence of the model from them caused by this rounding; it is subtracted from that of trials.
    """

    n_threads: int
    rows: list[U16] = field(default_factory=list)
    own: list[F64] = field(default_factory=list)

    def score(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        encoded = encode_rows(logits[: len(targets)], self.n_threads)
        self.rows.append(encoded)
        self.own.append(compare_rows(logits[: len(targets)], encoded, targets, self.n_threads).kld)


@dataclass
class _Trial(_EndsAtNaN):
    """Compares a trial with the base."""

    base: _Base
    at: int
    kld: list[F64] = field(default_factory=list)

    def score(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        i = self.at + len(self.kld)
        found = compare_rows(logits[: len(targets)], self.base.rows[i], targets, self.base.n_threads)
        self.kld.append(found.kld - self.base.own[i])


def _config(o: ResidentOptions) -> RunConfig:
    return RunConfig(
        model=o.model,
        command="perplexity",
        prompt=PromptConfig(file=o.text, escape=False),
        n_ctx=o.n_ctx,
        n_batch=o.n_ctx,
        n_threads=o.n_threads,
        n_threads_batch=o.n_threads,
        override_kv=o.overrides,
        warmup=False,
    )


def used_tensors(options: ResidentOptions) -> frozenset[str]:
    """Return the tensors that a run computes with, from the file's header; models may carry others (NextN layers)."""
    config = _config(options)
    prepared = Planner.of_file(config).prepare(config, Sizes(options.n_ctx))
    sources = prepared.model.derived_from()
    return frozenset(sources.get(w, w) for graph, _ in prepared.graphs.values() for w in graph.weights)


class Resident:
    """The unchanged model in memory on the CPU, and trials on it."""

    def __init__(self, options: ResidentOptions, who: str = "study") -> None:
        """Load the model and run the text; IkError for a text that is too short."""
        self.options = o = options
        config = _config(o)
        text = load_text(config)
        session = Session.plan(config, n_ctx=o.n_ctx)
        tokens = tokenize(session, text, who)
        if len(tokens) < o.n_ctx:
            raise IkError(f"{o.text}: {len(tokens)} tokens are too few, {o.n_ctx} are one chunk; use a longer text")
        self.windows = chunk_windows(tokens, o.n_ctx, o.n_ctx, max_chunks=o.chunks, bos=bos_of(session))
        session.load()
        evaluate(session, self._window(0), _Base(o.n_threads))  # allocates all outputs of a window
        self._base = _Base(o.n_threads)
        self._runner = ReplayRunner(o.n_threads, o.prefix_bytes)
        self.session = session.again(self._runner)
        _quietly_close(session)
        self.session.load()
        started = time.perf_counter()
        self._runner.record(self.windows.n_chunk * -(-o.n_ctx // self.session.n_ubatch))
        for i in range(self.windows.n_chunk):
            evaluate(self.session, self._window(i), self._base)
        self.pass_seconds = time.perf_counter() - started

    @property
    def base_bytes(self) -> int:
        """The memory of the log-probabilities of the unchanged model."""
        return sum(rows.nbytes for rows in self._base.rows)

    @property
    def prefix_bytes(self) -> int:
        """The memory of the layer outputs."""
        return self._runner.n_bytes

    def _window(self, i: int) -> Windows:
        return replace(self.windows, tokens=self.windows.tokens[i : i + 1])

    def trial(self, types: Mapping[str, GGMLType], encoding: Encoding) -> Iterator[F64]:
        """Yield the KL divergence (nats) at the scored positions of each window, with tensors rounded to `types`.

        Windows that are not requested are not computed. FormatError if an importance matrix belongs to another model.
        """
        model, held = self.session.model, {}
        for name, type in types.items():
            t = model.file.tensors[name]
            held[name] = rounded(model.file, t, type, encoding.of(name, t.shape), self.options.n_threads)
        changed = Model.from_file(
            Replaced.of(model.file, held), self.session.graph_config, hp=model.hp, adapters=model.adapters
        )
        sources = model.derived_from()
        used = {w for graph, _ in self.session.graphs.values() for w in graph.weights}
        names = sorted(name for name in used if sources.get(name, name) in held)
        self._runner.change(changed.load(names, mmap=True))
        for i in range(self.windows.n_chunk):
            scorer = _Trial(self._base, i)
            evaluate(self.session, self._window(i), scorer)
            yield np.concatenate(scorer.kld)

    def close(self) -> None:
        """Release the model."""
        _quietly_close(self.session)


def _quietly_close(session: Session) -> None:
    session.timings = Timings()  # nothing to log per trial
    session.close()
