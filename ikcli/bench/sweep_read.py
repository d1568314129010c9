"""Find rows of sweep-bench in any text: bare tables, whole logs, quoted mail, wrapped consoles, jsonl.

Columns are found by the names in the table's header, which distinguishes tables of batched-bench (column B; there N_KV
is the sum of tokens). Wrapped lines are joined, decimal commas are read, text between rows is skipped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SWEEP = ("PP", "TG", "N_KV", "T_PPs", "S_PPt/s", "T_TGs", "S_TGt/s", "RSSHWM", "VRAMdelta")
_KNOWN = frozenset({*_SWEEP, "B", "Ts", "St/s"})
_NEEDED = frozenset({"N_KV", "S_PPt/s", "S_TGt/s"})
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_QUOTE = re.compile(r"^\s*(?:>\s?)+")
_SETTINGS = re.compile(r"main:(?:\w+=-?\d+,)*(?:\w+(?:=(?:-?\d*)?,?)?)?")
_CELLS = re.compile(r"[\d.,|\s+-]*")
_MAX_PIECES = 8
_MAX_JSON_PIECES = 400


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One row: tokens per pass, depth, tokens per second (None where the text has no finite number); of batched-bench
    also the number of sequences and the speed of both passes together."""

    pp: int
    tg: int
    n_kv: int
    speed_pp: float | None
    speed_tg: float | None
    n_seq: int = 0
    speed: float | None = None


@dataclass(slots=True)
class SpeedTable:
    """One run as found. `kind` is "sweep" or "batched"; `settings` are those of the `main:` line or the jsonl rows,
    `config` the first line of jsonl-full. `line` is where it begins, from 1.
    """

    kind: str = "sweep"
    settings: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    rows: list[SpeedRow] = field(default_factory=list)
    line: int = 0


def read_file(path: Path) -> list[SpeedTable]:
    """Return the tables of a file; lets OSError pass."""
    return read_lines(file_lines(path))[0]


def read_text(text: str) -> list[SpeedTable]:
    """Return the tables of a text in order, without those that have no rows."""
    return read_lines(clean_lines(text))[0]


def file_lines(path: Path) -> list[str]:
    """Return clean lines of a file in UTF-8, or UTF-16 with a byte order mark; replace bad bytes, let OSError pass."""
    data = path.read_bytes()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return clean_lines(data.decode(encoding, errors="replace"))


def clean_lines(text: str) -> list[str]:
    """Return lines without colours, quotation marks of mail, and surrounding blanks."""
    return [_QUOTE.sub("", _ANSI.sub("", line)).strip() for line in text.splitlines()]


def read_lines(lines: list[str]) -> tuple[list[SpeedTable], set[int]]:
    """Return the tables in clean lines, and the indices of the lines that belong to them."""
    reader = _Reader(lines)
    return [table for table in reader.tables if table.rows], reader.used


class _Reader:
    """Walks over the cleaned lines once."""

    def __init__(self, lines: list[str]) -> None:
        self.tables: list[SpeedTable] = []
        self._lines = lines
        self._columns: tuple[str, ...] = ()
        self._closed = True
        self._settings: dict[str, int] = {}
        self._from_json = False
        self.used: set[int] = set()
        self._at = 0
        while self._at < len(lines):
            taken = self._take(self._at)
            self.used.update(range(self._at, self._at + taken))
            self._at += taken or 1

    def _take(self, at: int) -> int:
        """Parse what starts at a line; return the number of lines used, 0 if it is not a table."""
        line = self._lines[at]
        if line.startswith("{"):
            return self._json(at)
        if line.startswith("main:"):
            return self._main(at)
        if line.startswith("|"):
            return self._header(at) or self._row(at)
        return 0

    def _main(self, at: int) -> int:
        joined, used = "", 0
        for piece in self._lines[at : at + _MAX_PIECES]:
            longer = joined + re.sub(r"\s", "", piece)
            if not piece or not _SETTINGS.fullmatch(longer):
                break
            joined, used = longer, used + 1
        self._settings = {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", joined)}
        return used

    def _header(self, at: int) -> int:
        """Start a table if a header begins here, however it is wrapped."""
        columns: tuple[str, ...] = ()
        joined, used = "", 0
        for count, piece in enumerate(self._lines[at : at + _MAX_PIECES], start=1):
            joined += piece
            names = _names(joined)
            if set(names) >= _NEEDED and (count == 1 or set(names) <= _KNOWN):
                columns, used = names, count
            elif not _may_grow(names, joined):
                break
        if not columns:
            return 0
        self._columns, self._from_json = columns, False
        self._closed = "".join(self._lines[at : at + used]).endswith("|")
        self.tables.append(SpeedTable("batched" if "B" in columns else "sweep", self._settings, line=at + 1))
        self._settings = {}
        return used

    def _row(self, at: int) -> int:
        if not self._columns:
            return 0
        joined = ""
        for count, piece in enumerate(self._lines[at : at + _MAX_PIECES], start=1):
            if not piece:
                break
            joined += piece
            cells = _cells(joined)
            if len(cells) == len(self._columns) and (joined.endswith("|") or not self._closed):
                return count if self._add(dict(zip(self._columns, cells, strict=True))) else 0
            if len(cells) > len(self._columns) or not _CELLS.fullmatch(joined):
                return 0
        return 0

    def _add(self, cells: Mapping[str, str]) -> bool:
        numbers = {name: _number(cell) for name, cell in cells.items()}
        n_kv = numbers["N_KV"]
        if n_kv is None:
            return False
        row = SpeedRow(
            int(numbers.get("PP") or 0), int(numbers.get("TG") or 0),
            int(n_kv), numbers["S_PPt/s"], numbers["S_TGt/s"], int(numbers.get("B") or 0), numbers.get("St/s"),
        )  # fmt: skip
        self.tables[-1].rows.append(row)
        return True

    def _json(self, at: int) -> int:
        joined = ""
        for count, piece in enumerate(self._lines[at : at + _MAX_JSON_PIECES], start=1):
            if count > 1 and (not piece or (piece.startswith("{") and joined.endswith("}"))):
                return 0
            joined += piece
            if piece.endswith("}"):
                try:
                    value = json.loads(joined)
                except (ValueError, RecursionError):
                    continue
                return count if isinstance(value, dict) and self._json_value(value) else 0
        return 0

    def _json_value(self, value: dict[str, Any]) -> bool:
        config = value.get("config")
        if isinstance(config, dict):
            if not (self._from_json and self.tables[-1].config == config):
                self.tables.append(SpeedTable(config=config, line=self._at + 1))
            self._from_json, self._columns = True, ()
            return True
        n_kv = _json_number(value, "n_kv")
        if n_kv is None or not {"speed_pp", "speed_tg"} <= value.keys():
            return False
        pp, tg = _json_number(value, "pp") or 0, _json_number(value, "tg") or 0
        row = SpeedRow(
            int(pp), int(tg), int(n_kv), _json_number(value, "speed_pp"), _json_number(value, "speed_tg"),
            int(_json_number(value, "pl") or 0), _json_number(value, "speed"),
        )  # fmt: skip
        self._json_table(row, {k: v for k, v in value.items() if k.startswith(("n_", "flash")) and k != "n_kv"},
                         "batched" if "pl" in value else "sweep")  # fmt: skip
        self.tables[-1].rows.append(row)
        return True

    def _json_table(self, row: SpeedRow, settings: dict[str, int], kind: str) -> None:
        """Begin a new run if a row without a line of settings changes a setting or does not go deeper."""
        table = self.tables[-1] if self._from_json else None
        if table is not None and not table.rows:
            table.settings, table.kind = settings, kind
        elif (table is None or (kind, settings) != (table.kind, table.settings)
              or (table.config is None and not _continues(table, row))):  # fmt: skip
            self.tables.append(SpeedTable(kind, settings=settings, line=self._at + 1))
        self._from_json, self._columns = True, ()


def _continues(table: SpeedTable, row: SpeedRow) -> bool:
    last = table.rows[-1]
    return row.n_kv > last.n_kv and (row.pp, row.tg) == (last.pp, last.tg)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]


def _names(line: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\s", "", cell) for cell in _cells(line))


def _may_grow(names: tuple[str, ...], joined: str) -> bool:
    """Return whether these may be the first columns of a wrapped header; its last name may be cut."""
    *whole, last = names
    if joined.endswith("|"):
        return set(names) <= _KNOWN
    return set(whole) <= _KNOWN and any(name.startswith(last) for name in _KNOWN)


def _number(cell: str) -> float | None:
    """Parse `133.95`, `133,95`, `1.133,95`; None for anything else."""
    text = cell.replace(" ", "")
    if "," in text:
        comma_last = text.rfind(",") > text.rfind(".")
        text = text.replace(".", "").replace(",", ".") if comma_last else text.replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _json_number(value: Mapping[str, Any], key: str) -> float | None:
    found = value.get(key)
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        return None
    return found if math.isfinite(found) else None
