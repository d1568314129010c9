"""Messages for people, on stderr: never wrapped, always flushed, UTF-8 with replacement. Results go to stdout.

`progress()` draws a bar only when stderr is a terminal; Rich is imported only then.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ikcli.errors import UsageError

_noticed: set[str] = set()
_hushes: list[None] = []  # one for every reason to be quiet; threads may overlap
_copies: list[TextIO] = []  # the file of --log-file


def utf8_streams() -> None:
    """Make stdout and stderr write UTF-8 and replace what cannot be encoded, whatever the locale is."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="replace")


class ReaderGone(BrokenPipeError):
    """The reader of stdout has gone. It has no errno, since Typer ends with code 1 on one."""


class _Pipe(io.FileIO):
    """Stdout as a pipe whose reader may leave (`| head`): further output is dropped, or the run ends."""

    def __init__(self, goes_on: bool) -> None:
        super().__init__(sys.stdout.fileno(), "wb", closefd=False)
        self._goes_on = goes_on

    def write(self, data: Any) -> int:
        try:
            return int(super().write(data) or 0)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not self._goes_on:
                raise ReaderGone("the reader of stdout has gone") from None
            return len(data)


def outlive_reader(goes_on: bool) -> None:
    """Choose what happens if stdout is a pipe and its reader leaves.

    The run continues silently, or ReaderGone is raised.
    """
    old = sys.stdout
    if not isinstance(old, io.TextIOWrapper) or old is not sys.__stdout__ or old.isatty():
        return
    old.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Pipe(goes_on)), "utf-8", "replace", None, old.line_buffering, old.write_through
    )


def _write(stream: TextIO, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()
    if stream is sys.stderr:
        copy(text)


def copy(text: str) -> None:
    """Copy a line to the log file, if there is one."""
    for file in _copies:
        file.write(text + "\n")
        file.flush()


def copy_to(path: Path | None) -> None:
    """Append all further messages to this file too; None ends that."""
    while _copies:
        _copies.pop().close()
    if path is not None:
        try:
            _copies.append(path.open("a", encoding="utf-8", errors="replace"))
        except OSError as problem:
            raise UsageError(f"--log-file: cannot write {path}: {problem.strerror}") from problem


def log(message: str = "") -> None:
    """Print one log line on stderr."""
    if not _hushes:
        _write(sys.stderr, message)


@contextmanager
def hushed(quiet: bool = True) -> Iterator[None]:
    """Print no log lines in this context, only warnings and errors; without `quiet` nothing changes."""
    if quiet:
        _hushes.append(None)
    try:
        yield
    finally:
        if quiet:
            _hushes.pop()


def warn(message: str) -> None:
    """Print `warning: ...` on stderr."""
    _write(sys.stderr, f"warning: {message}")


def error(message: str) -> None:
    """Print `error: ...` on stderr."""
    _write(sys.stderr, f"error: {message}")


def notice_once(message: str) -> None:
    """Print a log line the first time only, however often it is reported."""
    if message not in _noticed:
        _noticed.add(message)
        log(message)


def forget_notices() -> None:
    """Let notices be printed again (start of a run, tests)."""
    _noticed.clear()


@contextmanager
def progress(
    title: str, total: float, in_bytes: bool = False, lines: bool = False
) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on a terminal; yield `advance(amount)`. `in_bytes` adds size and rate.

    Elsewhere print nothing, or with `lines` a line for every tenth.
    """
    if not sys.stderr.isatty():
        yield _tenths(title, total) if lines else lambda amount: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = [*Progress.get_default_columns()]
    if in_bytes:
        columns[2:2] = [DownloadColumn(binary_units=True), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task: Any = bar.add_task(title, total=total if total >= 0 else None)
        yield lambda amount: bar.advance(task, amount)


def _tenths(title: str, total: float) -> Callable[[float], None]:
    """Return an `advance` that logs `title: 30%` whenever another tenth is done."""
    done, said = 0.0, 0

    def advance(amount: float) -> None:
        nonlocal done, said
        done += amount
        tenth = int(10 * done / total) if total > 0 else 0
        if tenth > said:
            log(f"{title}: {10 * tenth}%")
        said = tenth

    return advance


def shown_size(n: float, digits: int = 2, least: int = 1) -> str:
    """Return `4.58 GiB`, or MiB, KiB, bytes for less than one; `least` is the number of bytes of the smallest unit."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if n >= unit or unit == least:
            return f"{n / unit:.{digits}f} {name}"
    return f"{n:.0f} bytes"
