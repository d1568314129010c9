"""A journal of work in units: JSON lines, the first of which says what the work is. A run goes on where one ended.

A line is written and flushed to disk when its unit is done, so whatever ends a run costs the units in work only. A last
line that was cut off is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ikcli.errors import FormatError, IkError, UsageError


class Journal:
    """Records by key. `add` keeps them in the file; without a path they are kept in memory only."""

    def __init__(self, path: Path | None, head: Mapping[str, Any]) -> None:
        """Make the file, or read one of the same work.

        UsageError naming the first difference if it is of other work, IkError if it cannot be written.
        """
        self.path, self.head = path, dict(head)
        self.records: dict[str, dict[str, Any]] = {}
        self._file: IO[bytes] | None = None
        if path is None:
            return
        known, end = read(path) if path.exists() and path.stat().st_size else (None, 0)
        try:
            if known is not None:
                self._check(path, known.head)
                self.records = known.records
                os.truncate(path, end)
            self._file = path.open("ab")
            if known is None:
                self._write(self.head)
        except OSError as error:
            raise _cannot_write(path, error) from None

    def _check(self, path: Path, head: Mapping[str, Any]) -> None:
        mine = json.loads(json.dumps(self.head))
        for key in mine | dict(head):
            if mine.get(key) != head.get(key):
                raise UsageError(
                    f"{path}: is a journal of other work: {key} is {head.get(key)!r} there and {mine.get(key)!r} now; "
                    "name another file, or remove this one to begin anew"
                )

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Keep the record of a unit."""
        self.records[key] = dict(record)
        if self._file is not None and self.path is not None:
            try:
                self._write({"key": key, **record})
            except OSError as error:
                raise _cannot_write(self.path, error) from None

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read(path: Path) -> tuple[Journal, int]:
    """What is in a journal, and where its last whole line ends; FormatError naming the line that is none."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IkError(f"cannot read {path}: {error.strerror or error}") from None
    end = data.rfind(b"\n") + 1
    lines = []
    for i, line in enumerate(data[:end].splitlines()):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or (i > 0 and not isinstance(found.get("key"), str)):
            raise FormatError(f"{path}: line {i + 1} is not of a journal")
        lines.append(found)
    if not lines:
        raise FormatError(f"{path}: is not a journal")
    out = Journal(None, lines[0])
    for found in lines[1:]:
        out.records[found.pop("key")] = found
    return out, end


def _cannot_write(path: Path, error: OSError) -> IkError:
    return IkError(f"cannot write the journal {path}: {error.strerror or error}")
