"""`ik sweep-bench-plot FILES... [--labels A,B] [-o PREFIX|FILE]`: compare runs of sweep-bench in a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ikcli import log
from ikcli.bench import sweep_plot
from ikcli.bench.sweep_read import SpeedTable, read_file
from ikcli.cli.parser import usage
from ikcli.errors import FormatError, UsageError
from ikcli.settings.tools import SweepPlotConfig


def run(config: SweepPlotConfig) -> int:
    """Read, label, draw, and print the names of the written files."""
    if not config.args:
        raise UsageError(f"no file to read; usage: {usage('sweep-bench-plot')}")
    output = _output(config.output, sweep_plot.DEFAULT_PREFIX)
    single = output.suffix.lower() in sweep_plot.SUFFIXES
    sweep_plot.check_output(output if single else Path(f"{output}_pp.png"))
    runs = [(path, _sweep_tables(path)) for path in map(Path, config.args)]
    given = config.labels
    labels = _default_labels(runs) if given is None else _given_labels(runs, [x.strip() for x in given.split(",")])
    tables = [table for _, found in runs for table in found]
    series = sweep_plot.group((label, table.rows) for label, table in zip(labels, tables, strict=True))
    if single:
        sweep_plot.draw(series, output)
        print(output)
    else:
        for path in sweep_plot.draw_pair(series, str(output)):
            print(path)
    return 0


def _output(name: str | None, default: str) -> Path:
    output = Path(name or default)
    return output / default if output.is_dir() else output


def _sweep_tables(path: Path) -> list[SpeedTable]:
    """Return the tables of a file that can be drawn; raise FormatError if there are none."""
    found = read_file(path)
    tables = [table for table in found if table.kind == "sweep"]
    batched = len(found) - len(tables)
    reason = "N_KV of batched-bench is the sum of all tokens, not the depth"
    if not tables and batched:
        raise FormatError(f"{path}: only tables of batched-bench; {reason}, so run sweep-bench instead")
    if not tables:
        raise FormatError(
            f"{path}: no rows of sweep-bench; expected a table with N_KV, S_PP t/s and S_TG t/s, or jsonl"
        )
    if batched:
        log.warn(f"{path}: {batched} tables of batched-bench left out; {reason}")
    return tables


def _default_labels(runs: Sequence[tuple[Path, list[SpeedTable]]]) -> list[str]:
    """Return default labels: file names without suffix and as much of the path as is unique.

    A file with several tables also gets #N.
    """
    names = [path.stem for path, _ in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path, _ in runs]
    return [
        f"{name} #{index}" if len(tables) > 1 else name
        for name, (_, tables) in zip(names, runs, strict=True)
        for index in range(1, len(tables) + 1)
    ]


def _given_labels(runs: Sequence[tuple[Path, list[SpeedTable]]], labels: list[str]) -> list[str]:
    """Return one label per table; with a label per file, its tables share that label."""
    counts = [len(tables) for _, tables in runs]
    if not all(labels):
        raise UsageError("--labels: a name is empty; example: --labels before,after")
    if len(labels) == sum(counts):
        return labels
    if len(labels) != len(runs):
        need = f"{len(runs)} files" + (f" with {sum(counts)} tables" if sum(counts) != len(runs) else "")
        raise UsageError(f"--labels: {len(labels)} names for {need}; give one per file or one per table")
    for (path, _), label, count in zip(runs, labels, counts, strict=True):
        if count > 1:
            log.log(f"{path}: mean of {count} tables under the label {label}")
    return [label for label, count in zip(labels, counts, strict=True) for _ in range(count)]
