"""`ik imatrix`: running perplexity and tables on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ikcli.cli.parser import ModelRun
from ikcli.commands._chunk_lines import eta_text, final_line
from ikcli.engine.plan.sizes import DEFAULT_WINDOW, imatrix_session
from ikcli.engine.run.opening import open_session
from ikcli.engine.run.session import Session
from ikcli.errors import UsageError
from ikcli.fleet.model import HeaderSession
from ikcli.imatrix import fleet as fleet_imatrix
from ikcli.imatrix.compare import comparison_lines
from ikcli.imatrix.matrix import (
    ChunkDone,
    ImatrixResult,
    collect,
    in_rows,
    is_gguf_name,
    is_legacy,
    load,
    params_of,
    save,
    windows,
)
from ikcli.imatrix.random_tokens import random_tokens
from ikcli.imatrix.statistics import LayerSimilarity, statistics_lines
from ikcli.imatrix.sums import Sums
from ikcli.log import log, warn
from ikcli.measure import images
from ikcli.measure.images import MixedWindows
from ikcli.measure.perplexity import bos_of
from ikcli.measure.protocol import TokenIds
from ikcli.measure.text import load_text, text_name, tokenize
from ikcli.quant.covariance_file import (
    RANDOM_TOKENS,
    is_covariance,
    merge_covariance,
    open_covariance,
    write_covariance,
)
from ikcli.quant.imatrix_file import Imatrix, merge, read_imatrix
from ikcli.settings.run import RunConfig
from ikcli.text_files import is_text
from ikcli.vision.opening import needed_projector

if TYPE_CHECKING:
    from ikcli.engine.plan.planner import Planner
    from ikcli.models import MediaConfig

_MOST_EXPERTS_NAMED = 8


def run(run: ModelRun) -> int:
    """Collect, merge or explain importance matrices."""
    config = run.config
    if moments := _moments(config):
        _merge_moments(config, moments)
        return 0
    config, earlier = _inputs(config)
    options = config.imatrix
    if options.random_tokens and (config.prompt.file is not None or config.prompt.prompt):
        raise UsageError("--random-tokens takes the place of a text; drop -f and -p, or --random-tokens")
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
    if earlier and config.prompt.file is None and not config.prompt.prompt and not options.random_tokens:
        _save(config, _named(_merged([load(path) for path in earlier]), config), options.output)
        return 0
    fleet_imatrix.check(config)
    if config.vision.images:
        images.check_options(config)
    _collect_text(config, earlier, run.planner)
    return 0


def _moments(config: RunConfig) -> list[Path]:
    """Return the files of second moments among those of --in-file."""
    return [path for path in config.imatrix.in_file if path.is_file() and is_covariance(path)]


def _merge_moments(config: RunConfig, moments: Sequence[Path]) -> None:
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


def _check_output(path: Path, option: str = "-o") -> None:
    """Check that the result can be written, before hours of work."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        why = "is a folder" if path.is_dir() else f"folder {path.absolute().parent} does not exist"
        raise UsageError(f"{option} {path}: {why}")


def _merged(found: Sequence[Imatrix]) -> Imatrix:
    """Merge all matrices, with a warning if some of them lack entries of others."""
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
    """Return the files of --in-file: importance matrices to continue from; any other file is the text, as with -f."""
    found = list(config.imatrix.in_file)
    texts = [path for path in found if path.is_file() and is_text(path)]
    if texts and config.prompt.file is None and not config.prompt.prompt:
        log(f"imatrix: {texts[0]} is not an importance matrix and is read as text")
        config = replace(config, prompt=replace(config.prompt, file=texts.pop(0)))
        found.remove(config.prompt.file)  # type: ignore[arg-type]
    if texts:
        raise UsageError(f"--in-file {texts[0]}: not an importance matrix, and the text is given already")
    for path in found:
        read_imatrix(path)  # raise errors before the model is loaded
    return config, found


def _named(imatrix: Imatrix, config: RunConfig) -> Imatrix:
    return replace(imatrix, datasets=()) if config.imatrix.hide_imatrix else imatrix


def _save(config: RunConfig, imatrix: Imatrix, path: Path) -> None:
    as_gguf = is_gguf_name(config.imatrix.output, config.imatrix.output_format)
    save(imatrix, path, as_gguf=as_gguf)
    log(f"imatrix: {len(imatrix.entries)} entries after {imatrix.n_chunks} chunks in {path}")


def _collect_text(config: RunConfig, earlier: Sequence[Path], planner: Planner) -> None:
    options, params = config.imatrix, params_of(config)
    text = "" if options.random_tokens else load_text(config)
    before = [(read_imatrix(path), is_legacy(path)) for path in earlier]  # once: the output may be one of them

    def write(found: Imatrix, path: Path) -> None:
        parts = [in_rows(m, found) if legacy else m for m, legacy in before]
        _save(config, _named(merge([*parts, found]), config), path)

    with ExitStack() as opened:
        projector = needed_projector(config, planner.hp) if config.vision.images else None
        if projector is not None:
            opened.enter_context(closing(projector))
        media = projector.media_config if projector is not None else None
        session = opened.enter_context(closing(_opened(config, planner, media)))
        tokens: TokenIds | MixedWindows
        if projector is not None:
            parts = images.parts_of(config, text, session.tokenizer, projector)
            log(f"imatrix: {images.described(parts)}")
            tokens = images.windows_of(parts, params.n_ctx, params.chunks, bos_of(session), params.first_chunk)
            n_chunk = tokens.n_chunk
        elif options.random_tokens:
            tokens = random_tokens(session.tokenizer, options.random_tokens)
            n_chunk = len(windows(tokens, params))
        else:
            tokens = tokenize(session, text, "imatrix", parse_special=config.prompt.parse_special)
            n_chunk = len(windows(tokens, params))
        n_batch = min(config.n_batch, params.n_ctx)
        log(f"imatrix: computing over {n_chunk} chunks, n_ctx={params.n_ctx}, batch_size={n_batch}")
        printer = _Printer(config, n_chunk, write, RANDOM_TOKENS if options.random_tokens else text_name(config))
        try:
            if isinstance(session, HeaderSession):
                assert isinstance(tokens, np.ndarray)
                result = fleet_imatrix.collect(config, session, tokens, params, on_chunk=printer, on_sums=printer.save)
            else:
                result = collect(session, tokens, params, on_chunk=printer, on_sums=printer.save)
        finally:
            print(flush=True)
    if result.perplexity is not None:
        print(final_line(result.perplexity), flush=True)
    if params.similarity:
        print("\n".join(LayerSimilarity(result.similarity).lines()))
    output_name = params.output_name
    if output_name and output_name not in result.imatrix.entries:
        warn(f"--process-output: the model multiplies with no tensor {output_name}; see --output-tensor-name")
    _report_unseen(result)
    write(replace(result.imatrix, datasets=printer.datasets), options.output)
    if options.covariance is not None:
        n_chunks = result.imatrix.n_chunks
        datasets = (RANDOM_TOKENS,) if options.random_tokens else printer.datasets
        write_covariance(options.covariance, result.moments, n_chunks=n_chunks, datasets=datasets)
        log(f"imatrix: second moments of {len(result.moments)} inputs in {options.covariance}")


def _opened(config: RunConfig, planner: Planner, media: MediaConfig | None) -> Session | HeaderSession:
    """Open a session for texts, with images if `media` is given, or what is needed to give work to workers."""
    if config.fleet.wanted:
        return HeaderSession(planner)
    settings, sizes = imatrix_session(config)
    return open_session(settings, n_ctx=sizes.n_ctx, outputs=sizes.outputs, planner=planner, media=media)


def _report_unseen(result: ImatrixResult) -> None:
    for name, experts in sorted(result.unseen.items()):
        n_expert = len(result.imatrix.entries[name].counts) if name in result.imatrix.entries else len(experts)
        shown = ", ".join(str(e) for e in experts[:_MOST_EXPERTS_NAMED])
        more = ", ..." if len(experts) > _MOST_EXPERTS_NAMED else ""
        warn(
            f"{name}: {len(experts)} of {n_expert} experts saw no token ({shown}{more}); ik quantize gives them "
            "the mean of the others, use more text"
        )


class _Printer:
    """Prints running perplexity on stdout and estimated time on stderr, and writes the file every few chunks."""

    def __init__(self, config: RunConfig, n_chunk: int, write: Callable[[Imatrix, Path], None], name: str) -> None:
        self.options, self.n_chunk, self.write = config.imatrix, n_chunk, write
        self.datasets = () if config.imatrix.hide_imatrix else (name,)
        self.n_ctx, self.n_workers = config.n_ctx or DEFAULT_WINDOW, config.fleet.n_workers

    def __call__(self, done: ChunkDone) -> None:
        if done.index == 0:
            log(f"imatrix: {eta_text(done.pass_seconds, self.n_chunk, self.n_workers)}")
        if self.options.ppl:
            sys.stdout.write(f"[{done.index + 1}]{done.ppl:.4f},")
            sys.stdout.flush()

    def save(self, n: int, found: Sums) -> None:
        """Write the files that are due after n chunks."""
        every = self.options.save_frequency
        for wanted, path in (
            (n % self.options.output_frequency == 0 and n < self.n_chunk, self.options.output),
            (every > 0 and n % every == 0, Path(f"{self.options.output}.at_{n}")),
        ):
            if wanted:
                self.write(found.imatrix(n, self.n_ctx, self.datasets), path)
