"""`ik quantize-stats`: parse the options, print the error table of ikcli.eval.quantize_stats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ikcli import log
from ikcli.commands._app import RunCommand
from ikcli.commands._tool_argv import ToolArguments, ToolOption, parse_tool, tool_help, whole_number
from ikcli.errors import UsageError

if TYPE_CHECKING:
    from ikcli.gguf.constants import GGMLType

USAGE = "ik quantize-stats [-m model.gguf] [options]"
OPTIONS = (
    ToolOption(("-m", "--model"), "FILE", "model to measure; default the bundled demo model", example="model.gguf"),
    ToolOption(
        ("--type", "--types"), "TYPE[,TYPE...]", "tensor types to measure, or all (the default)", repeat=True,
        example="q4_K,iq4_k",
    ),
    ToolOption(("--imatrix",), "FILE", "importance matrix: used by the encoders and for the column `weighted`"),
    ToolOption(
        ("-l", "--include", "--include-layer"), "RE", "measure only tensors whose name matches", repeat=True,
        example="attn",
    ),
    ToolOption(
        ("-L", "--exclude", "--exclude-layer"), "RE", "leave out tensors whose name matches", repeat=True,
        example="exps",
    ),
    ToolOption(("--rows",), "N", "rows measured per tensor, spread evenly; 0 = all (default 256)", example="1024"),
    ToolOption(("--summary",), "", "print only the rows over all tensors"),
    ToolOption(
        ("--output-format",), "md|jsonl", "form of the table; jsonl has the full counts of scales and codes",
        example="jsonl",
    ),
    ToolOption(("-t", "--threads"), "N", "threads; default physical cores", example="8"),
)  # fmt: skip


def run(argv: list[str]) -> int:
    """Measure and print; rows appear as they are ready. Returns the exit code."""
    arguments = parse_tool("quantize-stats", OPTIONS, argv)
    if arguments.help:
        from ikcli.eval.quantize_stats import LEGEND

        summary = (
            "Measure the error of tensor types on the tensors of a model, and how they use their scales and codes."
        )
        print(tool_help(USAGE, summary, OPTIONS, LEGEND))
        return 0
    for warning in arguments.warnings:
        log.warn(warning)
    if arguments.positional:
        raise UsageError(f'unexpected argument "{arguments.positional[0]}"; usage: {USAGE}')
    form = arguments.one("output_format") or "md"
    if form not in ("md", "jsonl"):
        raise UsageError(f"--output-format {form} is unknown; use md or jsonl")
    _print_table(arguments, form)
    return 0


def _print_table(arguments: ToolArguments, form: str) -> None:
    from ikcli.config import default_model
    from ikcli.eval.quantize_stats import (
        HEADER,
        StatsParams,
        json_line,
        markdown_line,
        measure_model,
        measured_tensors,
        notes,
    )
    from ikcli.gguf.reader import open_gguf
    from ikcli.hostinfo import physical_cores
    from ikcli.quant.imatrix_file import read_imatrix

    threads = arguments.one("t")
    params = StatsParams(
        _types(arguments),
        whole_number("--rows", arguments.one("rows") or "256", 0),
        arguments.all("l"),
        arguments.all("L"),
        whole_number("-t", threads) if threads else physical_cores(),
    )
    imatrix_path = arguments.one("imatrix")
    imatrix = read_imatrix(imatrix_path) if imatrix_path else None
    file = open_gguf(Path(arguments.one("m") or default_model()), ())
    for note in notes(measured_tensors(file, params), params):
        log.log(f"quantize-stats: {note}")
    summary, first = arguments.has("summary"), True
    for row in measure_model(file, params, imatrix):
        if summary and row.tensor:
            continue
        if first and form == "md":
            print("\n".join(HEADER))
        first = False
        print(markdown_line(row) if form == "md" else json_line(row), flush=True)


def _types(arguments: ToolArguments) -> tuple[GGMLType, ...]:
    from ikcli.eval.quantize_stats import all_types
    from ikcli.quant.encoders import available_types
    from ikcli.quant.formats import format_by_name

    names = [name.strip() for text in arguments.all("type") for name in text.split(",") if name.strip()]
    if not names or [n.lower() for n in names] == ["all"]:
        return all_types()
    types = {name: format_by_name(name).type for name in names}
    missing = [name for name, type in types.items() if type not in available_types()]
    if missing:
        raise UsageError(f"--type {missing[0]}: this type cannot be written")
    return tuple(dict.fromkeys(types.values()))


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    def entry(ctx: typer.Context) -> None:
        raise typer.Exit(run(ctx.obj))

    entry.__annotations__ = {"ctx": typer.Context}
    app.command("quantize-stats", cls=RunCommand, add_help_option=False)(entry)
