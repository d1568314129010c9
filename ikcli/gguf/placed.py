"""Write a GGUF file from pieces of tensors in any order; the place of every byte is known from the start.

The result is that of `GGUFWriter`. Bytes go to a file beside the target, which is renamed when complete. It is removed
on an error, unless it is kept for a later run that continues it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError
from ikcli.gguf.constants import DEFAULT_ALIGNMENT
from ikcli.gguf.writer import GGUFWriter, NewTensor

Bytes = npt.NDArray[np.uint8]


class PlacedFile:
    """A file in progress. With `keep`, what was written survives an error, in `partial`."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Sequence[NewTensor],
        alignment: int = DEFAULT_ALIGNMENT,
        keep: bool = False,
    ) -> None:
        self.path, self._keep = path, keep
        self.partial = path.with_name(f".{path.name}.partial" if keep else f".{path.name}.{os.getpid()}.tmp")
        self.header, self._at, self.size = GGUFWriter(path, metadata, tensors, alignment).layout()
        self._file: BinaryIO | None = None

    def holds(self, path: Path) -> bool:
        """Return whether a file has the header and the size of this one."""
        try:
            with path.open("rb") as file:
                return path.stat().st_size == self.size and file.read(len(self.header)) == self.header
        except OSError:
            return False

    def crc32(self, path: Path, name: str, start: int, n_bytes: int) -> int:
        """Return the CRC-32 of a part of a tensor in a file of this layout."""
        found, left = 0, n_bytes
        with path.open("rb") as file:
            file.seek(self._at[name] + start)
            while left and (data := file.read(min(left, 1 << 24))):
                found, left = zlib.crc32(data, found), left - len(data)
        return found

    def begin(self) -> None:
        """Open the file; keep its contents if an earlier run began it."""
        try:
            if self._keep and self.holds(self.partial):
                self._file = self.partial.open("r+b")
                return
            self._file = self.partial.open("wb")
            self._file.truncate(self.size)
            self._file.write(self.header)
        except OSError as error:
            raise self._cannot(error) from None

    def write(self, name: str, start: int, data: Bytes) -> None:
        """Write bytes of a tensor from its byte `start` on."""
        assert self._file is not None
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        try:
            self._file.seek(self._at[name] + start)
            self._file.write(raw)
        except OSError as error:
            raise self._cannot(error) from None

    def sync(self) -> None:
        """Flush everything to the disk."""
        assert self._file is not None
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot(error) from None

    def finish(self) -> None:
        """Give the complete file its final name."""
        self.sync()
        assert self._file is not None
        self._file.close()
        self._file = None
        try:
            os.replace(self.partial, self.path)
        except OSError as error:
            raise self._cannot(error) from None

    def close(self) -> None:
        """Clean up after an error; do nothing if the file is finished."""
        if self._file is None:
            return
        with suppress(OSError):  # flushing the rest may fail for the same reason
            self._file.close()
        self._file = None
        if not self._keep:
            self.partial.unlink(missing_ok=True)

    def _cannot(self, error: OSError) -> FormatError:
        return FormatError(f"{self.path}: cannot be written ({error.strerror or error})")
