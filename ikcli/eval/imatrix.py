"""Importance matrix of a model on a text: mean squared input of every weight column (`ik imatrix`).

Consecutive windows of -c tokens (default 512) go through the model one by one; all rows count, also in the last layer.
Models with latent attention run in the absorbed form (-mla 1), where both attn_k_b and attn_v_b are multiplied with.
`collect` is the library call; files and running values answer to examples/imatrix of ik_llama.cpp.
"""

from __future__ import annotations

import codecs
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ikcli.config import RunConfig
from ikcli.engine.batch import Batch
from ikcli.engine.devices import available_memory
from ikcli.engine.sizes import DEFAULT_WINDOW, imatrix_session
from ikcli.errors import IkError, UsageError
from ikcli.eval.covariance_collect import check_memory
from ikcli.eval.imatrix_collect import Collector, watch
from ikcli.eval.imatrix_compare import comparison_lines
from ikcli.eval.imatrix_stats import LayerSimilarity, statistics_lines
from ikcli.eval.perplexity import PerplexityResult, bos_of, eta_text, final_line
from ikcli.eval.protocol import FloatRows, SessionLike, TokenIds
from ikcli.eval.stats import RunningNll, token_nll
from ikcli.eval.text import load_text, text_name, tokenize
from ikcli.gguf.constants import GGUF_MAGIC
from ikcli.log import log, warn
from ikcli.quant.covariance_file import Moments, is_covariance, merge_covariance, open_covariance, write_covariance
from ikcli.quant.imatrix_file import (
    Imatrix,
    ImatrixEntry,
    merge,
    read_imatrix,
    split_matrices,
    write_gguf,
    write_legacy,
)

if TYPE_CHECKING:
    from ikcli.engine.planner import Planner
    from ikcli.engine.session import Session

_MOST_EXPERTS_NAMED = 8
_TEXT_PROBE = 1 << 16  # bytes


@dataclass(frozen=True, slots=True)
class ImatrixParams:
    """Sizes in tokens; chunks -1 = all from `first_chunk` on; without `ppl` nothing is scored."""

    n_ctx: int = DEFAULT_WINDOW
    chunks: int = -1
    first_chunk: int = 0
    ppl: bool = True
    output_name: str | None = None
    n_threads: int = 1
    covariance_limit: int = 0  # bytes per input; 0: no second moments


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """After window `index` (from 0): running perplexity (NaN without ppl) and the seconds of its decode."""

    index: int
    ppl: float
    pass_seconds: float
    collector: Collector


@dataclass(frozen=True, slots=True)
class ImatrixResult:
    """The collected matrix (counts in rows), the perplexity if asked for, and experts no token chose, by weight."""

    imatrix: Imatrix
    perplexity: PerplexityResult | None
    unseen: dict[str, list[int]]
    moments: list[tuple[list[str], Moments]]


def windows(tokens: TokenIds, params: ImatrixParams) -> TokenIds:
    """Tokens (n_chunk, n_ctx) of the windows to use; IkError if the text is too short for one."""
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


def collect(
    session: Session,
    tokens: TokenIds,
    params: ImatrixParams,
    *,
    on_chunk: Callable[[ChunkDone], None] | None = None,
    similarity: LayerSimilarity | None = None,
) -> ImatrixResult:
    """Importance matrix of int32 tokens; on_chunk is called after every window.

    NonFiniteError names the input of a weight that is not finite.
    """
    table = windows(tokens, params)
    collector = watch([graph for graph, _ in session.graphs.values()], output_name=params.output_name)
    if params.covariance_limit:
        sizes = collector.product_sizes(params.covariance_limit)
        total = check_memory(sizes, available_memory())
        log(f"imatrix: second moments of {len(sizes)} inputs, {total / 2**20:.0f} MiB of RAM")
        collector.measure_products(params.covariance_limit)

    def observe(node: object, value: object) -> None:
        collector(node, value)  # type: ignore[arg-type]
        if similarity is not None:
            similarity(node, value)  # type: ignore[arg-type]

    running, bos = RunningNll(), bos_of(session)
    session.observer = collector if similarity is None else observe
    try:
        for i, row in enumerate(table):
            started = time.perf_counter()
            _pass(session, row, bos, running if params.ppl else None, params.n_threads)
            if on_chunk is not None:
                ppl = running.ppl if params.ppl else math.nan
                on_chunk(ChunkDone(i, ppl, time.perf_counter() - started, collector))
    finally:
        session.observer = None
    imatrix = collector.imatrix(len(table), params.n_ctx)
    result = PerplexityResult(
        running.ppl, running.ppl * running.mean_error, running.mean, len(table), params.n_ctx, running.count, ()
    )
    return ImatrixResult(imatrix, result if params.ppl else None, collector.unseen_experts(), collector.moments())


def _pass(session: SessionLike, row: TokenIds, bos: int | None, running: RunningNll | None, n_threads: int) -> None:
    """Decode one window with logits for all rows, so that the last layer sees them all; score its second half."""
    session.clear()
    fed = row.copy()
    if bos is not None:
        fed[0] = bos
    n_ctx, first = len(row), len(row) // 2
    step = min(n_ctx, session.n_batch)
    for p0 in range(0, n_ctx, step):
        p1 = min(p0 + step, n_ctx)
        pos = np.arange(p0, p1, dtype=np.int32)
        logits = session.decode(Batch(fed[p0:p1], pos, np.zeros_like(pos), np.ones(p1 - p0, bool)))
        low, high = max(p0, first), min(p1, n_ctx - 1)
        if running is not None and high > low:
            running.add(_nll(logits[low - p0 : high - p0], row[low + 1 : high + 1], n_threads))


def _nll(logits: FloatRows, targets: TokenIds, n_threads: int) -> np.ndarray:
    return token_nll(logits, targets, n_threads)


# --- files ------------------------------------------------------------------------------------------------------------
def is_gguf_name(path: Path, output_format: str = "auto") -> bool:
    """Whether a matrix written to `path` is GGUF: by option (`dat`, `gguf`), else by suffix."""
    return path.suffix.lower() == ".gguf" if output_format == "auto" else output_format == "gguf"


def save(imatrix: Imatrix, path: Path, *, as_gguf: bool) -> None:
    """Write the matrix; `.dat` has one count for all matrices of an entry, the number of chunks."""
    if as_gguf:
        write_gguf(imatrix, path)
    else:
        write_legacy(in_calls(imatrix), path)


def in_calls(imatrix: Imatrix) -> Imatrix:
    """The same means with the number of chunks as count everywhere, as the `.dat` format means it."""
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
    return in_rows(found, like) if _is_legacy(path) else found


def _is_legacy(path: Path) -> bool:
    with path.open("rb") as f:
        return f.read(4) != GGUF_MAGIC


def in_rows(found: Imatrix, like: Imatrix | None = None) -> Imatrix:
    """A matrix of a `.dat` file, which counts chunks, with counts in rows.

    `like` is a matrix of the same model that tells how many rows a chunk brings to each entry (experts see few).
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


def is_text(path: Path) -> bool:
    """Whether a file begins like text: UTF-8 without NUL, which binary formats are full of."""
    with path.open("rb") as f:
        head = f.read(_TEXT_PROBE)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


# --- the subcommand ---------------------------------------------------------------------------------------------------
class _Printer:
    """Running perplexity on stdout, estimated time on stderr, and the file every few chunks."""

    def __init__(self, config: RunConfig, n_chunk: int, write: Callable[[Imatrix, Path], None], name: str) -> None:
        self.options, self.n_chunk, self.write = config.imatrix, n_chunk, write
        self.datasets = () if config.imatrix.hide_imatrix else (name,)
        self.n_ctx = config.n_ctx or DEFAULT_WINDOW

    def __call__(self, done: ChunkDone) -> None:
        if done.index == 0:
            log(f"imatrix: {eta_text(done.pass_seconds, self.n_chunk, 1)}")
        n = done.index + 1
        if self.options.ppl:
            sys.stdout.write(f"[{n}]{done.ppl:.4f},")
            sys.stdout.flush()
        every = self.options.save_frequency
        for wanted, path in (
            (n % self.options.output_frequency == 0 and n < self.n_chunk, self.options.output),
            (every > 0 and n % every == 0, Path(f"{self.options.output}.at_{n}")),
        ):
            if wanted:
                self.write(done.collector.imatrix(n, self.n_ctx, self.datasets), path)


def run_command(config: RunConfig, planner: Planner | None = None) -> int:
    """`ik imatrix`: running perplexity and tables on stdout, everything else on stderr; returns the exit code."""
    if moments := _moments(config):
        return _merge_moments(config, moments)
    config, earlier = _inputs(config)
    options = config.imatrix
    if options.compare:
        if len(earlier) != 2 or options.show_statistics:
            raise UsageError(
                f"--compare needs two importance matrices and no --show-statistics, {len(earlier)} are given: "
                "--in-file a.dat --in-file b.dat --compare"
            )
        print("\n".join(comparison_lines(*(load(path) for path in earlier))))
        return 0
    if options.show_statistics:
        if not earlier:
            raise UsageError("--show-statistics needs an importance matrix: --in-file imatrix.dat --show-statistics")
        print("\n".join(statistics_lines(_merged([load(path) for path in earlier]))))
        return 0
    _check_output(options.output)
    if options.covariance is not None:
        _check_output(options.covariance, "--covariance")
    if earlier and config.prompt.file is None and not config.prompt.prompt:
        _save(config, _named(_merged([load(path) for path in earlier]), config), options.output)
        return 0
    return _collect_text(config, earlier, planner)


def _moments(config: RunConfig) -> list[Path]:
    """Files of second moments among those of --in-file."""
    return [path for path in config.imatrix.in_file if path.is_file() and is_covariance(path)]


def _merge_moments(config: RunConfig, moments: Sequence[Path]) -> int:
    o = config.imatrix
    alone = len(moments) == len(o.in_file) and not (o.compare or o.show_statistics or o.covariance)
    if not alone or config.prompt.file is not None or config.prompt.prompt:
        raise UsageError(
            f"--in-file {moments[0]}: holds second moments, which can only be merged with others: "
            "--in-file a.gguf --in-file b.gguf -o all.gguf"
        )
    _check_output(o.output)
    files = [open_covariance(path) for path in moments]
    merge_covariance(files, o.output)
    n_chunks = sum(file.n_chunks for file in files)
    log(f"imatrix: second moments of {len(files)} files, {n_chunks} chunks, in {o.output}")
    return 0


def _check_output(path: Path, option: str = "-o") -> None:
    """Complain before hours of work that the result could not be written."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "is a folder" if path.is_dir() else f"cannot be written: there is no folder {path.absolute().parent}"
        raise UsageError(f"{option} {path}: {why}")


def _merged(found: Sequence[Imatrix]) -> Imatrix:
    """All matrices as one, with a warning if some of them lack entries of others."""
    merged = merge(found)
    for m in found:
        missing = [name for name in merged.entries if name not in m.entries]
        if missing:
            warn(
                f"{m.path}: lacks {len(missing)} of {len(merged.entries)} entries ({missing[0]}); "
                "if this is not another -mla mode, the files belong to different models"
            )
    return merged


def _inputs(config: RunConfig) -> tuple[RunConfig, list[Path]]:
    """Files of --in-file: importance matrices to go on from; one that is none is the text, as with -f."""
    found = list(config.imatrix.in_file)
    texts = [path for path in found if path.is_file() and is_text(path)]
    if texts and config.prompt.file is None and not config.prompt.prompt:
        log(f"imatrix: {texts[0]} is not an importance matrix and is read as text")
        config = replace(config, prompt=replace(config.prompt, file=texts.pop(0)))
        found.remove(config.prompt.file)  # type: ignore[arg-type]
    if texts:
        raise UsageError(f"--in-file {texts[0]}: not an importance matrix, and the text is given already")
    for path in found:
        read_imatrix(path)  # complain before the model is loaded
    return config, found


def _named(imatrix: Imatrix, config: RunConfig) -> Imatrix:
    return replace(imatrix, datasets=()) if config.imatrix.hide_imatrix else imatrix


def _save(config: RunConfig, imatrix: Imatrix, path: Path) -> None:
    as_gguf = is_gguf_name(config.imatrix.output, config.imatrix.output_format)
    save(imatrix, path, as_gguf=as_gguf)
    log(f"imatrix: {len(imatrix.entries)} entries after {imatrix.n_chunks} chunks in {path}")


def _collect_text(config: RunConfig, earlier: Sequence[Path], planner: Planner | None) -> int:
    from ikcli.engine.session import Session

    options, text = config.imatrix, load_text(config)
    n_ctx = config.n_ctx or DEFAULT_WINDOW
    output_name = options.output_tensor_name if options.process_output else None
    limit = options.covariance_limit << 20 if options.covariance is not None else 0
    threads = max(1, config.n_threads_batch)
    params = ImatrixParams(
        n_ctx, config.perplexity.chunks, options.from_chunk, options.ppl, output_name, threads, limit
    )

    before = [(read_imatrix(path), _is_legacy(path)) for path in earlier]  # once: the output may be one of them

    def write(found: Imatrix, path: Path) -> None:
        parts = [in_rows(m, found) if legacy else m for m, legacy in before]
        _save(config, _named(merge([*parts, found]), config), path)

    settings, sizes = imatrix_session(config)
    with closing(Session.open(settings, n_ctx=sizes.n_ctx, planner=planner)) as session:
        tokens = tokenize(session, text, "imatrix")
        n_chunk = len(windows(tokens, params))
        log(f"imatrix: computing over {n_chunk} chunks, n_ctx={n_ctx}, batch_size={session.n_batch}")
        similarity = LayerSimilarity() if options.layer_similarity else None
        printer = _Printer(config, n_chunk, write, text_name(config))
        try:
            result = collect(session, tokens, params, on_chunk=printer, similarity=similarity)
        finally:
            print(flush=True)
    if result.perplexity is not None:
        print(final_line(result.perplexity), flush=True)
    if similarity is not None:
        print("\n".join(similarity.lines()))
    if output_name and output_name not in result.imatrix.entries:
        warn(f"--process-output: the model multiplies with no tensor {output_name}; see --output-tensor-name")
    _report_unseen(result)
    write(replace(result.imatrix, datasets=printer.datasets), options.output)
    if options.covariance is not None:
        n_chunks = result.imatrix.n_chunks
        write_covariance(options.covariance, result.moments, n_chunks=n_chunks, datasets=printer.datasets)
        log(f"imatrix: second moments of {len(result.moments)} inputs in {options.covariance}")
    return 0


def _report_unseen(result: ImatrixResult) -> None:
    for name, experts in sorted(result.unseen.items()):
        n_expert = len(result.imatrix.entries[name].counts) if name in result.imatrix.entries else len(experts)
        shown = ", ".join(str(e) for e in experts[:_MOST_EXPERTS_NAMED])
        more = ", ..." if len(experts) > _MOST_EXPERTS_NAMED else ""
        warn(
            f"{name}: {len(experts)} of {n_expert} experts saw no token ({shown}{more}); ik quantize gives them "
            "the mean of the others, use more text"
        )
