"""A journal of units of work: JSON lines, of which the first describes the work. A later run resumes where one ended.

A line is written and flushed to disk when its unit ends, so an interrupted run loses only the units in progress. A
truncated last line is dropped. The bytes of a record (under `data`) go to a second file, `<journal>.data`, and the line
stores their position; a record whose bytes are missing or damaged is dropped too.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from ikcli.errors import FormatError, IkError, UsageError
from ikcli.log import warn


class Journal:
    """Records by key; `add` appends them to the file. Without a path they are kept in memory only."""

    def __init__(self, path: Path | str | None, head: Mapping[str, Any]) -> None:
        """Create the file, or read an existing journal of the same work.

        UsageError naming the first difference if it belongs to other work, IkError if it cannot be written.
        """
        path = Path(path) if path else None
        self.path, self.head = path, dict(head)
        self.records: dict[str, dict[str, Any]] = {}
        self._file: IO[bytes] | None = None
        self._data: IO[bytes] | None = None
        if path is None:
            return
        known, end = read(path) if path.exists() and path.stat().st_size else (None, 0)
        try:
            if known is not None:
                self._check(path, known.head)
                self.records = known.records
                os.truncate(path, end)
                self._drop_lost()
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
                    "name another file, or remove this one to start over"
                )

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Store the record of a unit."""
        kept = dict(record)
        if self._file is not None and self.path is not None:
            try:
                if isinstance(kept.get("data"), bytes):
                    kept["data"] = self._put(kept["data"])
                self._write({"key": key, **kept})
            except OSError as error:
                raise _cannot_write(self.path, error) from None
        self.records[key] = kept

    def take(self, key: str) -> dict[str, Any]:
        """Return the record of a unit with its bytes; bytes that are only in memory are returned once."""
        found = self.records[key]
        data = found.get("data")
        if isinstance(data, bytes):
            self.records[key] = {k: v for k, v in found.items() if k != "data"}
        elif data is not None:
            return {**found, "data": self._get(data)}
        return found

    @property
    def data_path(self) -> Path:
        """The file with the bytes of records."""
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}.data")

    def _put(self, data: bytes) -> dict[str, int]:
        if self._data is None:
            self._data = self.data_path.open("ab")
        at = self._data.seek(0, os.SEEK_END)
        self._data.write(data)
        self._data.flush()
        os.fsync(self._data.fileno())
        return {"at": at, "size": len(data), "crc32": zlib.crc32(data)}

    def _get(self, place: Mapping[str, int]) -> bytes:
        try:
            with self.data_path.open("rb") as file:
                file.seek(place["at"])
                data = file.read(place["size"])
        except OSError as error:
            raise IkError(f"cannot read {self.data_path}: {error.strerror or error}") from None
        if len(data) != place["size"] or zlib.crc32(data) != place["crc32"]:
            raise FormatError(f"{self.data_path}: is damaged; remove it and {self.path} to start over")
        return data

    def _drop_lost(self) -> None:
        """Drop records whose bytes are missing or damaged."""
        places = {key: record["data"] for key, record in self.records.items() if "data" in record}
        lost = []
        for key, place in places.items():
            try:
                self._get(place)
            except IkError:
                lost.append(key)
        for key in lost:
            del self.records[key]
        if lost:
            warn(f"{self.data_path}: lacks the results of {len(lost)} units, which are done again")

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def forget(self, key: str) -> None:
        """Drop a record so that its unit is done again; the next record with that key replaces it in the file."""
        self.records.pop(key, None)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in (self._file, self._data):
            if file is not None:
                file.close()
        self._file = self._data = None


def read(path: Path) -> tuple[Journal, int]:
    """Return what a journal holds and where its last complete line ends; FormatError names a line that does not fit."""
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
            raise FormatError(f"{path}: line {i + 1} is not a line of a journal")
        lines.append(found)
    if not lines:
        raise FormatError(f"{path}: is not a journal")
    out = Journal(None, lines[0])
    for found in lines[1:]:
        out.records[found.pop("key")] = found
    return out, end


def _cannot_write(path: Path, error: OSError) -> IkError:
    return IkError(f"cannot write the journal {path}: {error.strerror or error}")
