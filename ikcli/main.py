"""The `ik` program: it picks the command, sets up the streams, and turns errors into one line and an exit code.

`ik --help` and `ik COMMAND --help` are answered before anything heavy is imported.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ikcli import log
from ikcli.errors import IkError

COMPLETION = "_IK_COMPLETE"
"""Set by the completion scripts that Typer installs."""

_COMPLETION_OPTIONS = ("--show-completion", "--install-completion")
_HELP = ("-h", "--help", "--usage")
_LLAMA_NAMES = {"cli": "chat", "server": "serve", "main": "chat"}


def main(argv: list[str] | None = None) -> int:
    """Run `ik` (or a `llama-NAME` link to it) and return the exit code."""
    log.utf8_streams()
    log.forget_notices()
    arguments = _with_program_name(list(sys.argv[1:] if argv is None else argv), sys.argv[0])
    try:
        log.outlive_reader(not _is_run(arguments))
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except IkError as problem:
        log.error(str(problem))
        return problem.exit_code
    except KeyboardInterrupt:
        return 130
    except log.ReaderGone:
        return 141
    except MemoryError as problem:
        log.error(f"out of memory{f' ({problem})' if str(problem) else ''}; lower -c, -ub or -b, or keep mmap on")
        return 1
    except OSError as problem:
        if problem.filename is None:
            raise
        log.error(f"cannot open {problem.filename}: {problem.strerror}")
        return 1


def _is_run(argv: list[str]) -> bool:
    """Return whether this command runs a model, and so should end with its reader.

    Other commands are short, or are not run for their output.
    """
    from ikcli.cli.table import BY_NAME

    info = BY_NAME.get(argv[0]) if argv else None
    asks = {"--help", "-h", "--usage", "--dry-run"} & set(argv)
    return info is not None and info.runs_model and info.name != "plan" and not asks


def _with_program_name(argv: list[str], program: str) -> list[str]:
    """Translate `llama-perplexity ARGS` to `ik perplexity ARGS`."""
    name = Path(program).stem if program.lower().endswith(".exe") else Path(program).name
    if not name.startswith("llama-"):
        return argv
    command = name.removeprefix("llama-")
    return [_LLAMA_NAMES.get(command, command), *argv]


def _dispatch(argv: list[str]) -> int:
    if COMPLETION in os.environ:  # the shell asks what can follow; there are no arguments
        return _run_typer(argv)
    if argv[0:1] == ["help"] and len(argv) > 1 and _has_options_only(argv[1]):
        argv = [argv[1], "--help"]
    if not argv or argv[0] in _HELP:
        from ikcli.cli.help import main_help

        print(main_help())
        return 0 if argv else 2
    if argv[0] in _COMPLETION_OPTIONS:
        from ikcli.cli.completion import run

        return run(argv)
    if "--version" in argv[:2]:
        from ikcli.commands.version import print_version

        print_version(verbose=bool({"-v", "--verbose"} & set(argv)))
        return 0
    return _run_typer(argv)


def _has_options_only(name: str) -> bool:
    """Return whether this command has no page in the manual."""
    from ikcli.cli.table import BY_NAME
    from ikcli.manual import pages

    return name in BY_NAME and name not in pages()


def _run_typer(argv: list[str]) -> int:
    import typer

    from ikcli.cli.app import run

    try:
        return run(argv, completion=COMPLETION in os.environ)
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return 130
    except Exception as problem:
        # Typer's own usage errors (options before the command) have a message and an exit code.
        message = getattr(problem, "format_message", None)
        if message is None:
            raise
        log.error(message())
        return int(getattr(problem, "exit_code", 2))


if __name__ == "__main__":
    sys.exit(main())
