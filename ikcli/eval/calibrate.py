"""KL divergence that quantizing some tensors of a model causes, measured by running it with their values rounded.

The tensors of a trial are encoded, decoded and stored in their own type again; everything else of the model stays where
the file is mapped, so a trial takes the memory of its tensors and runs the same kernels as the base. What is measured
is the damage by the weights alone, without that of quantized activations. Serves `ik quantize --calibrate`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.config import PromptConfig, RunConfig
from ikcli.engine.model import Model
from ikcli.engine.session import Session
from ikcli.engine.session_log import Timings
from ikcli.errors import IkError, NonFiniteError, UnsupportedError
from ikcli.eval.chunks import Windows, chunk_windows, evaluate
from ikcli.eval.perplexity import bos_of
from ikcli.eval.protocol import FloatRows, TokenIds
from ikcli.eval.stats import log_sum_exp
from ikcli.eval.text import load_text, tokenize
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.log import log, progress
from ikcli.quant.decode import decodable_types, dequantize
from ikcli.quant.encoders import available_types, quantize_rows
from ikcli.quant.encoding import Encoding, TensorEncoding

Bytes = npt.NDArray[np.uint8]
_PIECE = 1 << 20  # weights in work per thread


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What to run: the model, a text file, windows of n_ctx tokens, of which at most `chunks` (-1: all)."""

    model: Path
    text: Path
    chunks: int = 8
    n_ctx: int = 512
    n_threads: int = 1
    overrides: tuple[str, ...] = ()


@dataclass(slots=True)
class Replaced(GGUFFile):
    """A model file of which some tensors have other bytes, in the same type and shape."""

    held: dict[str, Bytes] | None = None

    def data(self, name: str) -> Bytes:
        """Bytes of the replacement, else of the file."""
        found = self.held.get(name) if self.held else None
        return GGUFFile.data(self, name) if found is None else found

    @classmethod
    def of(cls, file: GGUFFile, held: dict[str, Bytes]) -> Replaced:
        """The model `file` with the bytes of `held` in place of its own."""
        return cls(**{f.name: getattr(file, f.name) for f in fields(GGUFFile)}, held=held)


def rounded(file: GGUFFile, t: TensorInfo, type: GGMLType, encoding: TensorEncoding, n_threads: int = 1) -> Bytes:
    """Bytes in the type of `t` of its values after a round trip through `type`.

    UnsupportedError if tensors of that type cannot be read and written.
    """
    if t.type not in decodable_types() or t.type not in available_types():
        raise UnsupportedError(f"--calibrate: tensor {t.name} is {TYPES[t.type].name}; start from a f16 or bf16 model")
    ne0 = t.shape[0]
    ne1 = t.shape[1] if len(t.shape) > 1 else 1
    n_rows = t.n_elements // ne0
    step = max(16, _PIECE // ne0 // 16 * 16)
    source = file.data(t.name).reshape(n_rows, -1)
    out = np.empty_like(source)

    def work(piece: tuple[int, int, int]) -> None:
        matrix, first, stop = piece
        x = dequantize(source[first:stop].reshape(-1), t.type, (ne0, stop - first)).reshape(-1, ne0)
        code = encoding.encode(x, type, matrix)
        y = dequantize(code, type, (ne0, stop - first)).reshape(-1, ne0)
        out[first:stop] = quantize_rows(y, t.type).reshape(stop - first, -1)

    pieces = [(m, m * ne1 + r, m * ne1 + min(r + step, ne1)) for m in range(n_rows // ne1) for r in range(0, ne1, step)]
    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        list(pool.map(work, pieces))
    return out.reshape(-1)


@dataclass(slots=True)
class _Scorer:
    """Log-probabilities of the unchanged model, or with those in `base` the divergence from them."""

    base: list[FloatRows] | None = None
    rows: list[FloatRows] = field(default_factory=list)
    total: float = 0.0
    count: int = 0
    _at: int = 0

    def score(self, chunk: int, row: int, logits: FloatRows, targets: TokenIds) -> None:
        top, lse = log_sum_exp(logits)
        log_p = logits - (top + lse)[:, None].astype(np.float32)
        if self.base is None:
            self.rows.append(log_p)
            return
        base = self.base[self._at]
        self._at += 1
        kld = (np.exp(base) * (base - log_p)).sum(axis=1, dtype=np.float64)
        self.total += float(kld.sum())
        self.count += len(kld)

    def finish(self, chunk: int, pass_seconds: float) -> None:
        """Nothing to do per window."""

    def failed(self, chunk: int, error: NonFiniteError) -> None:
        raise error


@dataclass(slots=True)
class _Prepared:
    """The unchanged model and its results."""

    session: Session
    windows: Windows
    base: list[FloatRows]
    seconds: float


class Calibrator:
    """Measures trials; `measure` is what `ikcli.quant.calibration` wants as `Measure`."""

    def __init__(self, options: CalibrationOptions) -> None:
        self.options = options
        self._prepared: _Prepared | None = None

    def measure(self, trials: Sequence[Mapping[str, GGMLType]], encoding: Encoding) -> list[float]:
        """Mean KL divergence of every trial (tensor name -> type) from the unchanged model, in nats per token."""
        if self._prepared is None:
            self._prepared = self._prepare()
            self._announce(self._prepared, len(trials))
        out = []
        with progress("calibrating", len(trials)) as advance:
            for trial in trials:
                out.append(self._trial(self._prepared, trial, encoding))
                advance(1)
        return out

    def _prepare(self) -> _Prepared:
        o = self.options
        config = RunConfig(
            model=o.model,
            command="perplexity",
            prompt=PromptConfig(file=o.text, escape=False),
            n_ctx=o.n_ctx,
            n_batch=max(2048, o.n_ctx),
            n_threads=o.n_threads,
            n_threads_batch=o.n_threads,
            override_kv=o.overrides,
            warmup=False,
        )
        text = load_text(config)
        n_seq = max(1, config.n_batch // o.n_ctx)
        session = Session.plan(config, n_ctx=n_seq * o.n_ctx, n_seq_max=n_seq)
        tokens = tokenize(session, text, "calibrate")
        if len(tokens) < o.n_ctx:
            raise IkError(f"{o.text}: {len(tokens)} tokens are too few to calibrate with, {o.n_ctx} are one chunk")
        windows = chunk_windows(tokens, o.n_ctx, config.n_batch, max_chunks=o.chunks, bos=bos_of(session))
        scorer = _Scorer()
        seconds = _run(session, windows, scorer)
        return _Prepared(session, windows, scorer.rows, seconds)

    def _trial(self, found: _Prepared, trial: Mapping[str, GGMLType], encoding: Encoding) -> float:
        session, held = found.session, {}
        for name, type in trial.items():
            t = session.model.file.tensors[name]
            mine = encoding.of(name, t.shape)
            held[name] = rounded(session.model.file, t, type, mine, self.options.n_threads)
        model = Model.from_file(
            Replaced.of(session.model.file, held),
            session.graph_config,
            hp=session.model.hp,
            adapters=session.model.adapters,
        )
        scorer = _Scorer(found.base)
        _run(session.again(model), found.windows, scorer)
        return scorer.total / scorer.count

    def _announce(self, found: _Prepared, n_trials: int) -> None:
        mib = sum(rows.nbytes for rows in found.base) / 2**20
        log(
            f"calibrate: {n_trials} passes over {found.windows.n_chunk} chunks of {found.windows.n_ctx} tokens, "
            f"{found.seconds:.2f} seconds per pass - ETA {found.seconds * n_trials / 60:.1f} minutes, and the time "
            f"to encode the weights; {mib:.0f} MiB hold the logits of the unchanged model"
        )


def _run(session: Session, windows: Windows, scorer: _Scorer) -> float:
    """Evaluate and close the session; seconds."""
    started = time.perf_counter()
    with closing(session):
        session.load()
        evaluate(session, windows, scorer)
        session.timings = Timings()  # nothing to log per trial
    return time.perf_counter() - started
