"""Importance matrix of a model on a text: the mean squared input of every weight column (`ik imatrix`).

Consecutive windows of -c tokens (default 512) go through the model one by one; all rows count, in the last layer too.
Models with latent attention run in the absorbed form (-mla 1), which multiplies with both attn_k_b and attn_v_b. Files
and running values correspond to examples/imatrix of ik_llama.cpp.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ikcli.engine.plan.sizes import DEFAULT_WINDOW
from ikcli.engine.run.batch import Batch
from ikcli.engine.run.embedder import states
from ikcli.engine.run.head_rows import HeadRows
from ikcli.errors import IkError, UsageError
from ikcli.gguf.constants import GGUF_MAGIC
from ikcli.graph import Node
from ikcli.hostinfo import available_memory
from ikcli.imatrix.collect import watch
from ikcli.imatrix.covariance import check_memory
from ikcli.imatrix.statistics import LayerSimilarity
from ikcli.imatrix.sums import Sums
from ikcli.log import log
from ikcli.measure.images import MixedWindows, score_window
from ikcli.measure.perplexity import PerplexityResult, bos_of
from ikcli.measure.protocol import TokenIds
from ikcli.measure.stats import F64, RunningNll, token_nll
from ikcli.quant.covariance_file import Moments
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry, read_imatrix, split_matrices, write_gguf, write_legacy
from ikcli.settings.run import RunConfig

if TYPE_CHECKING:
    from ikcli.engine.run.session import Session

_GROUP = 4  # windows; fewer would mean more data to send, more would leave fewer units to distribute


@dataclass(frozen=True, slots=True)
class ImatrixParams:
    """Sizes in tokens; chunks -1 = all from `first_chunk` on; without `ppl` nothing is scored."""

    n_ctx: int = DEFAULT_WINDOW
    chunks: int = -1
    first_chunk: int = 0
    ppl: bool = True
    output_name: str | None = None
    n_threads: int = 1
    covariance_limit: int = 0  # bytes per input; 0: no input covariances
    similarity: bool = False
    stops: tuple[int, ...] = ()  # sums are known after every multiple of these, for files in between


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """State after window `index` (from 0): running perplexity (NaN without ppl) and the seconds of its decode."""

    index: int
    ppl: float
    pass_seconds: float


@dataclass(frozen=True, slots=True)
class ImatrixResult:
    """The collected matrix (counts in rows), the perplexity if requested, and the unchosen experts by weight."""

    imatrix: Imatrix
    perplexity: PerplexityResult | None
    unseen: dict[str, list[int]]
    similarity: dict[tuple[str, int], tuple[float, int]]
    moments: list[tuple[list[str], Moments]] = field(default_factory=list)


def params_of(config: RunConfig) -> ImatrixParams:
    """Return the parameters of the options; without -c the window has 512 tokens."""
    options = config.imatrix
    return ImatrixParams(
        n_ctx=config.n_ctx or DEFAULT_WINDOW,
        chunks=config.perplexity.chunks,
        first_chunk=options.from_chunk,
        ppl=options.ppl,
        output_name=options.output_tensor_name if options.process_output else None,
        n_threads=max(1, config.n_threads_batch),
        covariance_limit=options.covariance_limit << 20 if options.covariance is not None else 0,
        similarity=options.layer_similarity,
        stops=tuple(n for n in (options.output_frequency, options.save_frequency) if n > 0),
    )


def windows(tokens: TokenIds, params: ImatrixParams) -> TokenIds:
    """Return the tokens (n_chunk, n_ctx) of the windows to use; IkError if the text is too short for one."""
    if params.n_ctx < 4:
        raise UsageError(f"-c {params.n_ctx} is too small; give at least 4 tokens, for example -c 512")
    if params.chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to evaluate; give a number above 0, or -1 for all")
    rest = tokens[params.first_chunk * params.n_ctx :]
    n_chunk = len(rest) // params.n_ctx
    if n_chunk == 0:
        after = f" after {params.first_chunk} chunks are left out" if params.first_chunk else ""
        raise IkError(
            f"the text has {len(rest)} tokens{after}, but a chunk needs {params.n_ctx}; use a longer text, a smaller "
            "-c or a smaller --from-chunk"
        )
    if params.chunks >= 0:
        n_chunk = min(n_chunk, params.chunks)
    return np.ascontiguousarray(rest[: n_chunk * params.n_ctx]).reshape(n_chunk, params.n_ctx)


def groups(n_chunk: int, params: ImatrixParams) -> list[range]:
    """Return the groups of windows that are summed together, the same for one process and for workers."""
    ends = {n_chunk, *range(_GROUP, n_chunk, _GROUP), *(n for stop in params.stops for n in range(stop, n_chunk, stop))}
    return [range(a, b) for a, b in pairwise([0, *sorted(ends)])]


class Gathered:
    """Collects results of windows in the order of the text."""

    def __init__(
        self,
        params: ImatrixParams,
        on_chunk: Callable[[ChunkDone], None] | None = None,
        on_sums: Callable[[int, Sums], None] | None = None,
    ) -> None:
        self._params, self._on_chunk, self._on_sums = params, on_chunk, on_sums
        self._running, self._total, self._n = RunningNll(), Sums(), 0

    def window(self, nll: F64, pass_seconds: float) -> None:
        """Take the scores of the next window (none without ppl)."""
        if self._params.ppl:
            self._running.add(nll)
        self._n += 1
        if self._on_chunk is not None:
            ppl = self._running.ppl if self._params.ppl else math.nan
            self._on_chunk(ChunkDone(self._n - 1, ppl, pass_seconds))

    def sums(self, found: Sums) -> None:
        """Add the sums of a group whose windows have been taken."""
        self._total.add(found)
        if self._on_sums is not None:
            self._on_sums(self._n, self._total)

    def result(self) -> ImatrixResult:
        """Return the result once all windows have been taken."""
        n_ctx, r = self._params.n_ctx, self._running
        ppl = PerplexityResult(r.ppl, r.ppl * r.mean_error, r.mean, self._n, n_ctx, r.count, ())
        total = self._total
        imatrix = total.imatrix(self._n, n_ctx)
        return ImatrixResult(imatrix, ppl if self._params.ppl else None, total.unseen_experts(), total.similarity)


class Measurer:
    """Collects window by window in a session; NonFiniteError names the input of a weight that is not finite."""

    def __init__(self, session: Session, params: ImatrixParams, bos: int | None) -> None:
        self._session, self._params, self._bos = session, params, bos
        self.collector = watch([graph for graph, _ in session.graphs.values()], output_name=params.output_name)
        self._similarity = LayerSimilarity()
        session.observer = self._observe if params.similarity else self.collector
        self._heads = HeadRows(session.heads) if session.heads is not None else None

    def _observe(self, node: Node, value: npt.NDArray[np.generic]) -> None:
        self.collector(node, value)
        self._similarity(node, value)

    def window(self, row: TokenIds) -> tuple[F64, float]:
        """Decode one window and return its scores (none without ppl) and the seconds."""
        started = time.perf_counter()
        if self._session.outputs.logits:
            nll = _pass(self._session, row, self._bos, self._params)
            if self._heads is not None:
                self._heads.run()
        else:
            nll = _read(self._session, row)
        return nll, time.perf_counter() - started

    def mixed(self, batch: Batch) -> tuple[F64, float]:
        """Do the same for a window with images."""
        started = time.perf_counter()
        nll = score_window(self._session, batch, self._params.n_threads, every=True)
        return nll if self._params.ppl else np.empty(0), time.perf_counter() - started

    def take(self) -> Sums:
        """Return the sums since the last call."""
        found = self.collector.take()
        found.similarity, self._similarity.sums = self._similarity.sums, {}
        return found

    def close(self) -> None:
        """Detach from the session."""
        self._session.observer = None
        if self._heads is not None:
            self._heads.close()


def collect(
    session: Session,
    tokens: TokenIds | MixedWindows,
    params: ImatrixParams,
    *,
    on_chunk: Callable[[ChunkDone], None] | None = None,
    on_sums: Callable[[int, Sums], None] | None = None,
) -> ImatrixResult:
    """Compute the importance matrix of int32 tokens, or of windows with images; on_chunk follows every window, on_sums
    every complete sum.

    NonFiniteError names the input of a weight that is not finite.
    """
    table = tokens.batches if isinstance(tokens, MixedWindows) else windows(tokens, params)
    measurer, gathered = Measurer(session, params, bos_of(session)), Gathered(params, on_chunk, on_sums)
    collector = measurer.collector
    try:
        if params.covariance_limit:
            sizes = collector.product_sizes(params.covariance_limit)
            total = check_memory(sizes, available_memory())
            log(f"imatrix: second moments of {len(sizes)} inputs, {total / 2**20:.0f} MiB of RAM")
            collector.measure_products(params.covariance_limit)
        for group in groups(len(table), params):
            for i in group:
                row = table[i]
                gathered.window(*(measurer.mixed(row) if isinstance(row, Batch) else measurer.window(row)))
            gathered.sums(measurer.take())
    finally:
        measurer.close()
    return replace(gathered.result(), moments=collector.moments())


def _read(session: Session, row: TokenIds) -> F64:
    """Encode one window as a text, between the tokens that the encoder expects around one; there are no scores."""
    tokenizer, fed = session.tokenizer, row.copy()
    ids = tokenizer.special_ids
    if tokenizer.add_bos and ids.bos is not None:
        fed[0] = ids.bos
    end = ids.sep if tokenizer.kind == "wpm" else ids.eos
    if tokenizer.add_eos and end is not None:
        fed[-1] = end
    session.clear()
    states(session, 0, [fed], np.arange(len(fed)))
    return np.empty(0)


def _pass(session: Session, row: TokenIds, bos: int | None, params: ImatrixParams) -> F64:
    """Decode one window with logits for all rows, so that the last layer sees them all; score its second half.

    An encoder beside a decoder reads the first half.
    """
    session.clear()
    fed = row.copy()
    if bos is not None:
        fed[0] = bos
    n_ctx, first = len(row), len(row) // 2
    step, begin = min(n_ctx, session.n_batch), max(first - 1, 0) if session.encodes else 0
    found: list[F64] = [np.empty(0)]
    for p0 in range(0, n_ctx, step):
        p1 = min(p0 + step, n_ctx)
        pos = np.arange(p0, p1, dtype=np.int32)
        logits = session.decode(Batch(fed[p0:p1], pos, np.zeros_like(pos), pos >= begin))
        low, high = max(p0, first), min(p1, n_ctx - 1)
        if params.ppl and high > low:
            rows = logits[low - max(p0, begin) : high - max(p0, begin)]
            found.append(token_nll(rows, row[low + 1 : high + 1], params.n_threads))
    return np.concatenate(found)


# --- files ------------------------------------------------------------------------------------------------------------
def is_gguf_name(path: Path, output_format: str = "auto") -> bool:
    """Return whether a matrix written to `path` is GGUF: by option (`dat`, `gguf`), else by suffix."""
    return path.suffix.lower() == ".gguf" if output_format == "auto" else output_format == "gguf"


def save(imatrix: Imatrix, path: Path, *, as_gguf: bool) -> None:
    """Write the matrix; `.dat` has one count for all matrices of an entry, the number of chunks."""
    if as_gguf:
        write_gguf(imatrix, path)
    else:
        write_legacy(in_calls(imatrix), path)


def in_calls(imatrix: Imatrix) -> Imatrix:
    """Return the same means with the number of chunks as every count, as in the `.dat` format."""
    calls = max(1, imatrix.n_chunks)
    entries = {
        name: ImatrixEntry(
            e.values.reshape(e.sums.shape) * np.float32(calls), np.full(len(e.sums), calls, dtype=np.float32)
        )
        for name, e in imatrix.entries.items()
    }
    return replace(imatrix, entries=entries)


def load(path: Path, like: Imatrix | None = None) -> Imatrix:
    """Read a matrix with counts in rows; those of a `.dat` are estimated from its chunks (see `in_rows`)."""
    found = read_imatrix(path)
    return in_rows(found, like) if is_legacy(path) else found


def is_legacy(path: Path) -> bool:
    """Return whether a matrix is in the `.dat` format."""
    with path.open("rb") as f:
        return f.read(4) != GGUF_MAGIC


def in_rows(found: Imatrix, like: Imatrix | None = None) -> Imatrix:
    """Convert a matrix of a `.dat` file, which counts chunks, to counts in rows.

    `like` is a matrix of the same model that tells how many rows a chunk contributes to each entry (experts see few).
    """
    entries = {}
    for name, e in found.entries.items():
        per_chunk = float(found.chunk_size)
        known = like.entries.get(name) if like is not None else None
        if known is not None and like is not None and known.sums.size == e.sums.size:
            per_chunk, e = float(known.counts.mean()) / max(1, like.n_chunks), split_matrices(e, len(known.sums))
        scale = np.float32(per_chunk)
        entries[name] = ImatrixEntry(e.sums * scale, e.counts * scale)
    return replace(found, entries=entries)
