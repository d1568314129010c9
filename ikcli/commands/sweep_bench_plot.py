"""`ik sweep-bench-plot FILES... [--labels A,B] [-o PREFIX|FILE]`: compare runs of sweep-bench in a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ikcli import log
from ikcli.commands._app import RunCommand
from ikcli.commands._tool_argv import ToolOption, parse_tool, tool_help
from ikcli.errors import FormatError, UsageError

if TYPE_CHECKING:
    from ikcli.eval.sweep_read import SpeedTable

USAGE = "ik sweep-bench-plot [options] FILE..."
OPTIONS = (
    ToolOption(("--labels",), "A,B,...", "names of the curves, one per file or one per table", example="before,after"),
    ToolOption(
        ("-o", "--output"),
        "NAME",
        "prefix of the two files NAME_pp.png and NAME_tg.png (default performance_comparison); "
        "a NAME that ends in .png, .svg or .pdf gets both panels in one figure",
        example="runs",
    ),
)
_NOTES = (
    "Reads the jsonl forms and the tables of sweep-bench (of ik and of llama-sweep-bench) out of bare files and whole "
    "logs, also quoted with > or wrapped by a console. Several tables in one file are separate curves, numbered #1, "
    "#2; curves with the same label are averaged per depth and drawn with their standard deviation.",
    "Tables of batched-bench are left out: their N_KV is the sum of all tokens, not the depth at which was measured.",
)


def run(argv: list[str]) -> int:
    """Read, label, draw, and print the names of the written files."""
    arguments = parse_tool("sweep-bench-plot", OPTIONS, argv)
    if arguments.help:
        print(tool_help(USAGE, "Plot PP and TG of sweep-bench runs over the depth N_KV.", OPTIONS, _NOTES))
        return 0
    for warning in arguments.warnings:
        log.warn(warning)
    if not arguments.positional:
        raise UsageError(f"no file to read; usage: {USAGE}")
    from ikcli.eval import sweep_plot

    output = _output(arguments.one("o"), sweep_plot.DEFAULT_PREFIX)
    single = output.suffix.lower() in sweep_plot.SUFFIXES
    sweep_plot.check_output(output if single else Path(f"{output}_pp.png"))
    paths = [Path(name) for name in arguments.positional]
    runs = [(path, _sweep_tables(path)) for path in paths]
    given = arguments.one("labels")
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
    """The tables of a file that can be drawn; FormatError if there is none."""
    from ikcli.eval.sweep_read import read_file

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
    """File names without suffix, as much of the path as tells files apart, and #N where a file has several tables."""
    names = [path.stem for path, _ in runs]
    if len(set(names)) < len(names):
        names = [str(path) for path, _ in runs]
    return [
        f"{name} #{index}" if len(tables) > 1 else name
        for name, (_, tables) in zip(names, runs, strict=True)
        for index in range(1, len(tables) + 1)
    ]


def _given_labels(runs: Sequence[tuple[Path, list[SpeedTable]]], labels: list[str]) -> list[str]:
    """One label per table; a label per file brings the tables of that file together."""
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


def register(app: typer.Typer) -> None:
    """Add the command `sweep-bench-plot` to `app`."""

    def entry(ctx: typer.Context) -> None:
        raise typer.Exit(run(ctx.obj))

    entry.__annotations__ = {"ctx": typer.Context}
    app.command("sweep-bench-plot", cls=RunCommand, add_help_option=False)(entry)
