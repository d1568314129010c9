"""Writing a GGUF file whose tensors come in any order, in pieces: every byte has its place from the beginning.

The bytes are those of `GGUFWriter`. They go to a file beside the target, which is renamed when complete. It is removed
when anything goes wrong, unless it is to be kept for a later run that goes on with it.
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
    """One file; `keep`: its parts outlive an error, in `partial`."""

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
        """Whether a file begins and ends where this one does."""
        try:
            with path.open("rb") as file:
                return path.stat().st_size == self.size and file.read(len(self.header)) == self.header
        except OSError:
            return False

    def crc32(self, path: Path, name: str, start: int, n_bytes: int) -> int:
        """Of bytes of a tensor in a file of this layout."""
        found, left = 0, n_bytes
        with path.open("rb") as file:
            file.seek(self._at[name] + start)
            while left and (data := file.read(min(left, 1 << 24))):
                found, left = zlib.crc32(data, found), left - len(data)
        return found

    def begin(self) -> None:
        """Open the file, as it is if it was begun by an earlier run."""
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
        """Bytes of a tensor from its byte `start` on."""
        assert self._file is not None
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        try:
            self._file.seek(self._at[name] + start)
            self._file.write(raw)
        except OSError as error:
            raise self._cannot(error) from None

    def sync(self) -> None:
        """Have everything on the disk."""
        assert self._file is not None
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot(error) from None

    def finish(self) -> None:
        """All is written: take the final name."""
        self.sync()
        assert self._file is not None
        self._file.close()
        self._file = None
        try:
            os.replace(self.partial, self.path)
        except OSError as error:
            raise self._cannot(error) from None

    def close(self) -> None:
        """After an error; nothing if it is finished."""
        if self._file is None:
            return
        with suppress(OSError):  # what is still buffered may not fit either
            self._file.close()
        self._file = None
        if not self._keep:
            self.partial.unlink(missing_ok=True)

    def _cannot(self, error: OSError) -> FormatError:
        return FormatError(f"{self.path}: cannot be written ({error.strerror or error})")
