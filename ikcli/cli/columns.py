"""Print tables and values on the terminal: plain text if stdout is not a terminal, and safe to print in any case."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ikcli.log import shown_size

_MAX_TEXT = 60
MAX_ITEMS = 8


def format_size(n_bytes: int) -> str:
    """Return `226.003 GiB`, or MiB below one GiB."""
    return shown_size(n_bytes, 3, least=2**20)


def printable(text: str) -> str:
    """Escape control characters and undecodable bytes, so that any file can be printed anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def short(value: Any) -> str:
    """Shorten a metadata value to a few words."""
    if isinstance(value, np.ndarray | list):
        items = ", ".join(short(v) for v in value[:MAX_ITEMS])
        return f"[{items}{', ...' if len(value) > MAX_ITEMS else ''}]"
    if isinstance(value, str):
        text = printable(value[: _MAX_TEXT + 1])
        return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
    return f"{value:.7g}" if isinstance(value, float | np.floating) else str(value)


def json_scalar(value: Any) -> Any:
    """Convert a metadata value to JSON: first elements of arrays, NaN and infinities as text."""
    if isinstance(value, list):
        return [json_scalar(v) for v in value[:MAX_ITEMS]]
    if isinstance(value, np.ndarray | np.generic):
        return json_scalar(value[:MAX_ITEMS].tolist() if isinstance(value, np.ndarray) else value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def print_table(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], align: str) -> None:
    """Print a rich table on a terminal, otherwise plain columns that are never wrapped or coloured."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left")
        for name, side in zip(header, align, strict=True):
            table.add_column(name, justify="right" if side == "r" else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}:")
    for row in (header, *rows):
        cells = (c.rjust(w) if side == "r" else c.ljust(w) for c, w, side in zip(row, widths, align, strict=True))
        print(("  " + "  ".join(cells)).rstrip())
