"""Keep a file that a run leaves unfinished, so that another run of the same job continues after the last whole tensor.

`.NAME.part` holds the bytes. `.NAME.part.tensors` holds a line that identifies the job (a digest), then the checksum of
each whole tensor. Only tensors with a matching checksum are kept, so it does not matter how the run ended.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, TextIO

from ikcli.errors import IkError
from ikcli.system_files import lock

_CHUNK = 16 << 20


def part_path(final: Path) -> Path:
    """Return the path of the bytes until the file is complete."""
    return final.with_name(f".{final.name}.part")


class Unfinished:
    """The unfinished part of a file and the list of its whole tensors."""

    def __init__(self, final: Path) -> None:
        self.part = part_path(final)
        self.n_whole = 0  # tensors written by an earlier run
        self.discarded = False  # the part of another job was there
        self._final = final
        self._listed = self.part.with_name(f"{self.part.name}.tensors")
        self._list: TextIO | None = None
        self._sum = 0

    def open(self, digest: str, header: bytes, sizes: Sequence[int]) -> BinaryIO:
        """Open the part after the header and the whole tensors; `sizes` are the tensors' bytes with padding.

        Raise an IkError if another run has it open, an OSError as `open` does.
        """
        self._list = self._listed.open("a+", encoding="ascii", errors="replace")
        self._lock()
        self._list.seek(0)
        first, *sums = self._list.read().splitlines() or [""]
        there = self.part.exists()
        file = self.part.open("r+b" if there else "w+b")
        end = 0
        if there and first == digest:
            end = self._verified(file, header, list(zip(sizes, sums, strict=False)))
        self.discarded = there and not end
        self._list.truncate(0)
        self._list.write("\n".join([digest, *sums[: self.n_whole]]) + "\n")
        self._list.flush()
        file.seek(end)
        file.truncate()
        if not end:
            file.write(header)
        return file

    def _lock(self) -> None:
        assert self._list is not None
        if not lock(self._list, wait=False):
            self._list.close()
            raise IkError(f"{self._final}: another run is writing it; wait for its end or name another file")

    def _verified(self, file: BinaryIO, header: bytes, tensors: Sequence[tuple[int, str]]) -> int:
        """Return the offset after the whole tensors, or 0 if the header does not match."""
        if file.read(len(header)) != header:
            return 0
        end = len(header)
        for size, wanted in tensors:
            found, left = 0, size
            while left and (data := file.read(min(left, _CHUNK))):
                found, left = zlib.crc32(data, found), left - len(data)
            if left or f"{found:08x}" != wanted:
                break
            end += size
            self.n_whole += 1
        return end

    def update(self, raw: bytes | memoryview) -> None:
        """Add bytes of the tensor being written, padding included."""
        self._sum = zlib.crc32(raw, self._sum)

    def tensor_is_whole(self, file: BinaryIO) -> None:
        """Record that all bytes of the tensor were written to `file`."""
        assert self._list is not None
        file.flush()
        self._list.write(f"{self._sum:08x}\n")
        self._list.flush()
        self._sum = 0

    def close(self, keep: bool) -> None:
        """Close the list; remove both files unless they are kept for another run (the part may be renamed already)."""
        if not keep:
            self.part.unlink(missing_ok=True)
            self._listed.unlink(missing_ok=True)
        if self._list is not None:
            self._list.close()
            self._list = None
