"""`ik sweep-bench`: rows on stdout as they are measured, logs on stderr."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from ikcli.bench import memory, sweep_plot
from ikcli.bench import sweep as sweep_bench
from ikcli.bench.environment import describe
from ikcli.bench.sweep import SweepRow, depths, params_of
from ikcli.bench.sweep_read import SpeedRow
from ikcli.cli.parser import ModelRun
from ikcli.commands._sweep_table import RunInfo, SweepPrinter, settings_dict
from ikcli.engine.run.opening import open_session
from ikcli.errors import UsageError
from ikcli.log import log, warn
from ikcli.measure.protocol import SessionLike
from ikcli.settings.run import RunConfig


def run(run: ModelRun) -> int:
    """Measure and print; return 130 after Ctrl-C, with the rows so far."""
    config, sweep = run.config, run.config.sweep
    if sweep.pp < 0 or sweep.start_depth < 0 or sweep.max_depth < 0:
        raise UsageError("--pp, --start-depth and --max-depth take token counts of 0 or more, for example --pp 512")
    if sweep.plot is not None:
        sweep_plot.check_output(sweep.plot)
    rows: list[SweepRow] = []
    code = 0
    try:
        with closing(open_session(config, planner=run.planner)) as session:
            _measure(session, config, rows)
    except KeyboardInterrupt:
        code = 130
    if sweep.plot is not None and rows:
        _plot(config, sweep.plot, rows)
    return code


def _measure(session: SessionLike, config: RunConfig, rows: list[SweepRow]) -> None:
    """Print header and rows, and keep the rows, so that an interrupted run also has them."""
    params = params_of(config, session.n_ubatch)
    # the session has the settings that were left to the model file
    resolved = getattr(session, "config", config)
    printer = SweepPrinter(config, RunInfo(session.n_ctx, session.n_batch, session.n_ubatch))
    printer.header(lambda: {**settings_dict(resolved), **describe(session)})
    if not depths(params, session.n_ctx):
        warn(
            f"nothing to measure: {max(params.pp, params.tg)} tokens from depth {params.start_depth} do not "
            f"fit into a context of {session.n_ctx}; raise -c or lower -ub"
        )

    def on_row(row: SweepRow) -> None:
        rows.append(row)
        printer.row(row)

    # a session with a GPU reports the GPU memory it took; others report nothing
    sweep_bench.run(session, params, on_row=on_row, vram_used_mib=getattr(session, "vram_used_mib", memory.no_vram))


def _plot(config: RunConfig, path: Path, rows: list[SweepRow]) -> None:
    measured = [SpeedRow(row.pp, row.tg, row.n_kv, row.speed_pp, row.speed_tg) for row in rows]
    label = config.model.stem if config.model is not None else "model"
    sweep_plot.draw(sweep_plot.group([(label, measured)]), path)
    log(f"plot written to {path}")
