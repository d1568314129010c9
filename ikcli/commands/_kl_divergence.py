"""`ik perplexity --kl-divergence`: a line per chunk, then the statistics, as in llama.cpp; logs on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing

import numpy as np

from ikcli.cli.parser import ModelRun
from ikcli.commands._chunk_lines import eta_text
from ikcli.errors import FormatError, UsageError
from ikcli.fleet.model import HeaderSession
from ikcli.log import log, warn
from ikcli.measure import fleet as fleet_windows
from ikcli.measure import kl_divergence
from ikcli.measure.kl_divergence import KlChunk, KlParams, KlResult, windows_of
from ikcli.measure.kld_file import BaseReader
from ikcli.measure.perplexity import bos_of, open_window_session
from ikcli.measure.stats import F64, safe_exp

MIN_COUNT_FOR_STATISTICS = 100

CHUNK_HEADER = (
    "\nchunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
    "              Δp RMS            Same top p\n"
)

_KLD_HIGH = (99.9, 99.0, 95.0, 90.0)
_KLD_LOW = (10.0, 5.0, 1.0, 0.1)
_P_HIGH = (99.9, 99.0, 95.0, 90.0, 75.0)
_P_LOW = (25.0, 10.0, 5.0, 1.0, 0.1)


def run(run: ModelRun) -> int:
    """Compare and print; return 130 after Ctrl-C."""
    config = run.config
    path = config.perplexity.logits_file
    if path is None:
        raise UsageError("--kl-divergence needs the file to compare with: --kl-divergence-base FILE")
    base = BaseReader(path)
    if config.n_ctx and config.n_ctx < base.n_ctx:
        raise FormatError(
            f"{path} was made with a context of {base.n_ctx}, more than -c {config.n_ctx}; use -c {base.n_ctx}"
        )
    params = KlParams(
        n_batch=config.n_batch,
        chunks=config.perplexity.chunks,
        fail_on_nan=config.perplexity.fail_on_nan,
        n_threads=max(1, config.n_threads_batch or config.n_threads),
    )

    def show(chunk: KlChunk) -> None:
        if chunk.index == 0:
            windows = windows_of(base, params, None)
            n_seq = windows.n_seq * config.fleet.n_workers
            log(f"kl_divergence: {eta_text(chunk.pass_seconds, windows.n_chunk, n_seq)}")
            sys.stdout.write(CHUNK_HEADER)
        sys.stdout.write(chunk_line(chunk))
        sys.stdout.flush()

    try:
        result = _divided(run, base, params, show) if config.fleet.wanted else _here(run, base, params, show)
    except KeyboardInterrupt:
        return 130
    print(flush=True)
    if result.summary.count < MIN_COUNT_FOR_STATISTICS:
        warn(f"{result.summary.count} positions are too few for statistics; evaluate more chunks")
        return 0
    sys.stdout.write(statistics(result))
    sys.stdout.flush()
    return 0


def _here(run: ModelRun, base: BaseReader, params: KlParams, show: Callable[[KlChunk], None]) -> KlResult:
    with closing(open_window_session(run.config, base.n_ctx, params.n_batch, planner=run.planner)) as session:
        return kl_divergence.run(session, base, params, on_chunk=show)


def _divided(run: ModelRun, base: BaseReader, params: KlParams, show: Callable[[KlChunk], None]) -> KlResult:
    header = HeaderSession(run.planner)
    kl_divergence.check_vocabulary(base, header.n_vocab)
    windows = windows_of(base, params, bos_of(header))
    found = fleet_windows.measure(run.config, header, windows, base=base)
    return kl_divergence.gather(found, base, windows, params, show)


def chunk_line(chunk: KlChunk) -> str:
    """Return the running values after a chunk, with a newline."""
    s = chunk.summary
    if s is None:
        return f"{chunk.index + 1:4d}    {np.nan:9.4f}\n"
    return (
        f"{chunk.index + 1:4d}"
        f"    {s.ppl[0]:9.4f} ± {s.ppl[1]:9.4f}"
        f"    {s.log_ratio[0]:10.5f} ± {s.log_ratio[1]:10.5f}"
        f"    {s.kld[0]:10.5f} ± {s.kld[1]:10.5f}"
        f"    {100 * s.p_diff_rms[0]:6.3f} ± {100 * s.p_diff_rms[1]:6.3f} %"
        f"    {100 * s.same_top[0]:6.3f} ± {100 * s.same_top[1]:6.3f} %\n"
    )


def statistics(result: KlResult) -> str:
    """Return the three blocks that follow the table."""
    return "\n".join([*_perplexity_lines(result), "", *_kld_lines(result), "", *_probability_lines(result), ""])


def _perplexity_lines(result: KlResult) -> list[str]:
    s = result.summary
    ratio = safe_exp(s.log_ratio[0])
    rows = [
        ("Mean PPL(Q)                   ", s.ppl),
        ("Mean PPL(base)                ", s.ppl_base),
        ("Mean ln(PPL(Q)/PPL(base))     ", s.log_ratio),
        ("Mean PPL(Q)/PPL(base)         ", (ratio, ratio * s.log_ratio[1])),
        ("Mean PPL(Q)-PPL(base)         ", s.ppl_diff),
    ]
    lines = [f"{name}: {value:10.6f} ± {error:10.6f}" for name, (value, error) in rows]
    lines.insert(2, f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * s.correlation:6.2f}%")
    return ["====== Perplexity statistics ======", *lines]


def _kld_lines(result: KlResult) -> list[str]:
    values = result.positions.kld
    mean, error = result.summary.kld

    def line(name: str, value: float) -> str:
        return f"{name:<7} KLD: {value:10.6f}"

    return [
        "====== KL divergence statistics ======",
        f"Mean    KLD: {mean:10.6f} ± {error:10.6f}",
        line("Maximum", values.max()),
        *(line(name, value) for name, value in _quantiles(values, _KLD_HIGH)),
        line("Median", float(np.median(values))),
        *(line(name, value) for name, value in _quantiles(values, _KLD_LOW)),
        line("Minimum", values.min()),
    ]


def _probability_lines(result: KlResult) -> list[str]:
    values, s = result.positions.p_diff, result.summary

    def line(name: str, value: float) -> str:
        return f"{name:<7} Δp: {100 * value:6.3f}%"

    def with_error(name: str, pair: tuple[float, float]) -> str:
        return f"{name}: {100 * pair[0]:6.3f} ± {100 * pair[1]:5.3f} %"

    return [
        "====== Token probability statistics ======",
        with_error("Mean    Δp", s.p_diff),
        line("Maximum", values.max()),
        *(line(name, value) for name, value in _quantiles(values, _P_HIGH)),
        line("Median", float(np.median(values))),
        *(line(name, value) for name, value in _quantiles(values, _P_LOW)),
        line("Minimum", values.min()),
        with_error("RMS Δp    ", s.p_diff_rms),
        with_error("Same top p", s.same_top),
    ]


def _quantiles(values: F64, percents: tuple[float, ...]) -> list[tuple[str, float]]:
    found = np.percentile(values, percents)
    return [(f"{percent:4.1f}%", float(value)) for percent, value in zip(percents, found, strict=True)]
