"""`ik perplexity`: values on stdout, everything else on stderr, in the lines of llama.cpp's `perplexity` tool."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from ikcli.cli.parser import ModelRun
from ikcli.commands import _choices, _kl_divergence
from ikcli.commands._chunk_lines import ChunkPrinter, final_line
from ikcli.engine.run.session import Session
from ikcli.errors import IkError, NonFiniteError, UsageError
from ikcli.fleet.model import HeaderSession
from ikcli.log import log, warn
from ikcli.measure import fleet as fleet_windows
from ikcli.measure import images, moe_trace, perplexity
from ikcli.measure.chunks import WindowCounts, Windows
from ikcli.measure.heads import HeadScores, result_line
from ikcli.measure.kld_file import BaseWriter
from ikcli.measure.perplexity import (
    PerplexityParams,
    PerplexityResult,
    bos_of,
    open_window_session,
    params_of,
)
from ikcli.measure.protocol import SessionLike, TokenIds
from ikcli.measure.text import load_text, text_name, tokenize
from ikcli.settings.run import RunConfig
from ikcli.vision.opening import needed_projector


def run(run: ModelRun) -> int:
    """Evaluate and print; return 130 after Ctrl-C."""
    config = run.config
    fleet_windows.check(config)
    moe_trace.check(config)
    if config.perplexity.mtp and (config.perplexity.scores_choices or config.perplexity.kl_divergence):
        raise UsageError("--mtp scores heads on a text; it goes with neither choice tasks nor --kl-divergence")
    if config.perplexity.mtp and config.vision.images:
        raise UsageError("--mtp scores heads on a text without images; leave out --image")
    if config.vision.images:
        images.check_options(config)
    if config.perplexity.scores_choices:
        return _choices.run(run)
    if config.perplexity.kl_divergence:
        return _kl_divergence.run(run)
    params = params_of(config)
    if config.perplexity.mtp and config.fleet.wanted:
        raise UsageError("--mtp scores heads in one process; leave out --workers and --ray")
    if params.stride and config.perplexity.logits_file:
        raise UsageError(
            "--kl-divergence-base stores consecutive windows and cannot be used together with --ppl-stride"
        )
    text = load_text(config)
    try:
        (_run_with_images if config.vision.images else _run_on_text)(run, params, text)
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    return 0


def _run_on_text(run: ModelRun, params: PerplexityParams, text: str) -> None:
    config = run.config
    if params.stride:
        log(f"perplexity: windows start {params.stride} tokens apart, each fills the whole context")
    with closing(_opened(run, params)) as session:
        if params.stride:
            params = replace(params, n_ctx=session.n_ctx)
        tokens = tokenize(session, text, parse_special=config.prompt.parse_special)
        windows = _plan_named(config, tokens, params, bos_of(session))
        log(
            f"perplexity: calculating perplexity over {windows.n_chunk} chunks, n_ctx={params.n_ctx}, "
            f"batch_size={min(params.n_batch, windows.n_seq * params.n_ctx)}, n_seq={windows.n_seq}"
        )
        recorder = moe_trace.recorder(config, session)
        printer = ChunkPrinter(windows, config.perplexity.output_type, config.fleet.n_workers)
        scores = _head_scores(session, windows, params)
        try:
            result = _run_and_save(config, session, tokens, params, windows, printer, scores)
        finally:
            print(flush=True)
        _print_final(result, windows)
        for found in scores.results() if scores is not None else ():
            print(result_line(found), flush=True)
        if recorder is not None:
            recorder.save(windows.n_ctx)


def _head_scores(session: SessionLike | HeaderSession, windows: Windows, params: PerplexityParams) -> HeadScores | None:
    """Return what scores the heads of the session (--mtp), or None if it has none."""
    heads = session.heads if isinstance(session, Session) else None
    return HeadScores(heads, windows, params.n_threads) if heads is not None else None


def _run_with_images(run: ModelRun, params: PerplexityParams, text: str) -> None:
    config, planner = run.config, run.planner
    with closing(needed_projector(config, planner.hp)) as projector:
        media = projector.media_config
        with closing(open_window_session(config, params.n_ctx, params.n_ctx, planner=planner, media=media)) as session:
            parts = images.parts_of(config, text, session.tokenizer, projector)
            windows = images.windows_of(parts, params.n_ctx, params.chunks, bos_of(session))
            log(
                f"perplexity: calculating perplexity over {windows.n_chunk} chunks, n_ctx={params.n_ctx}: "
                f"{images.described(parts)}"
            )
            printer = ChunkPrinter(windows, config.perplexity.output_type)
            try:
                result = perplexity.gather(
                    images.values_of(session, windows, params.n_threads), windows, params, printer
                )
            finally:
                print(flush=True)
            _print_final(result, windows)


def _print_final(result: PerplexityResult, windows: WindowCounts) -> None:
    if result.n_tokens == 0:
        raise NonFiniteError("no chunk gives finite logits; run again with --check-tensors to find bad weights")
    print(final_line(result), flush=True)
    if result.n_chunks < windows.n_chunk:
        warn(f"{windows.n_chunk - result.n_chunks} chunks were not finite and are left out of the estimate")


def _opened(run: ModelRun, params: PerplexityParams) -> SessionLike | HeaderSession:
    """Open a session, or if workers have sessions, return what is needed to give them work."""
    if not run.config.fleet.wanted:
        return open_window_session(run.config, params.n_ctx, params.n_batch, stride=params.stride, planner=run.planner)
    return HeaderSession(run.planner, run.planner.plan(run.config).graph_config.n_ctx if params.stride else 0)


def _plan_named(config: RunConfig, tokens: TokenIds, params: PerplexityParams, bos: int | None) -> Windows:
    try:
        return perplexity.plan(tokens, params, bos)
    except UsageError:
        raise
    except IkError as error:
        raise IkError(f"{text_name(config)}: {error}") from error


def _run_and_save(
    config: RunConfig,
    session: SessionLike | HeaderSession,
    tokens: TokenIds,
    params: PerplexityParams,
    windows: Windows,
    printer: ChunkPrinter,
    scores: HeadScores | None,
) -> PerplexityResult:
    if isinstance(session, HeaderSession):
        found = fleet_windows.measure(config, session, windows, stride=params.stride)
        return perplexity.gather(found, windows, params, printer)
    path = config.perplexity.logits_file
    if path is None:
        return perplexity.run(session, tokens, params, on_chunk=printer, watcher=scores)
    log(f"perplexity: log-probabilities go to {path}")
    params = replace(params, fail_on_nan=True)
    with BaseWriter(path, windows.tokens, session.n_vocab, params.n_threads) as writer:
        return perplexity.run(session, tokens, params, on_chunk=printer, on_rows=writer.add, watcher=scores)
