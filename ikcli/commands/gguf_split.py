"""`ik gguf-split [--split|--merge] IN OUT`: split a model into parts, or merge parts into one file."""

from __future__ import annotations

import typer

from ikcli import log
from ikcli.commands._app import RunCommand
from ikcli.commands._tool_argv import ToolOption, parse_tool, tool_help, whole_number
from ikcli.errors import UsageError

USAGE = "ik gguf-split [options] IN OUT"
OPTIONS = (
    ToolOption(("--split",), "", "split IN into OUT-00001-of-0000N.gguf ... (the default)"),
    ToolOption(("--merge",), "", "merge all parts of IN, given its first part, into the file OUT"),
    ToolOption(("--split-max-tensors",), "N", "tensors per part at most, default 128", example="128"),
    ToolOption(("--split-max-size",), "N(M|G)", "bytes of tensors per part at most", example="2G"),
    ToolOption(("--no-tensor-first-split",), "", "the first part holds metadata only"),
    ToolOption(("--dry-run",), "", "print the parts and write nothing"),
)
_MAX_TENSORS = 128


def run(argv: list[str]) -> int:
    """Split or merge as the arguments say and return the exit code."""
    arguments = parse_tool("gguf-split", OPTIONS, argv)
    if arguments.help:
        print(tool_help(USAGE, "Split a GGUF file into parts or merge parts into one file.", OPTIONS))
        return 0
    for warning in arguments.warnings:
        log.warn(warning)
    if arguments.has("split") and arguments.has("merge"):
        raise UsageError("--split and --merge exclude each other")
    if len(arguments.positional) != 2:
        raise UsageError(f"expected IN and OUT; usage: {USAGE}")
    source, out = arguments.positional
    from ikcli.gguf.reader import open_gguf
    from ikcli.gguf.split import merge, parse_size, split

    dry_run = arguments.has("dry_run")
    with log.progress("copying", open_gguf(source).n_bytes, in_bytes=True) as advance:
        if arguments.has("merge"):
            parts = merge(source, out, dry_run, advance)
        else:
            size, count = arguments.one("split_max_size"), arguments.one("split_max_tensors")
            if size is not None and count is not None:
                raise UsageError("--split-max-tensors and --split-max-size exclude each other")
            max_bytes = parse_size(size) if size is not None else 0
            max_tensors = whole_number("--split-max-tensors", count) if count is not None else _MAX_TENSORS
            first = arguments.has("no_tensor_first_split")
            parts = split(source, out, 0 if max_bytes else max_tensors, max_bytes, first, dry_run, advance)
    for part in parts:
        print(f"{part.path}: {part.n_tensors} tensors, {part.n_bytes / 1e6:.1f} MB")
    return 0


def register(app: typer.Typer) -> None:
    """Add the command `gguf-split` to `app`."""

    def entry(ctx: typer.Context) -> None:
        raise typer.Exit(run(ctx.obj))

    entry.__annotations__ = {"ctx": typer.Context}
    app.command("gguf-split", cls=RunCommand, add_help_option=False)(entry)
