"""Read the header of a model on a server in growing ranges, no further than the reader needs.

Most of a header is the vocabulary, which files of one repository share. Given the header of one of them, arrays that
begin with the same bytes are copied from it instead of downloaded. If tensor sizes then do not add up to the size of
the file, the whole header is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ikcli.errors import FormatError
from ikcli.gguf.constants import GGUFValueType
from ikcli.gguf.cursor import Cursor, TruncatedError
from ikcli.gguf.reader import GGUFFile, read_part

Read = Callable[[int, int], bytes]
"""`read(start, stop)` returns bytes of the file."""

MAX_HEADER = 256 << 20
_FIRST = 256 << 10
_SHARED = 64 << 10  # smaller arrays are not worth a search
_ALIKE = 4096  # bytes that must match


def fetch_header(read: Read, size: int, target: Path, shared: Mapping[str, bytes] | None = None) -> GGUFFile:
    """Write the header of a file of `size` bytes to `target` and open it; raise a FormatError if it has none.

    `shared` is the result of `shared_arrays` for the header of another file of the repository.
    """
    data = _with_shared(read, size, shared) if shared else None
    if data is not None:
        target.write_bytes(data)
        file = read_part(target, header_only=True)
        if _data_ends(file, size):
            return file
    return _whole(read, size, target)


def shared_arrays(header: Path) -> dict[str, bytes]:
    """Return the bytes of a header's large arrays by key."""
    data = header.read_bytes()
    scan = _Scan(data)
    scan.run()
    return {key: data[start:stop] for key, start, stop in scan.values if stop - start >= _SHARED}


def _whole(read: Read, size: int, target: Path) -> GGUFFile:
    limit, step = min(size, MAX_HEADER), _FIRST
    target.write_bytes(b"")
    done = 0
    while True:
        piece = read(done, min(done + step, limit))
        with target.open("ab") as out:
            out.write(piece)
        done += len(piece)
        try:
            return read_part(target, header_only=True)
        except TruncatedError:
            if done >= limit or not piece:
                raise
        step = done  # twice as many bytes


class _Scan:
    """A walk through a header that may be cut off; `pos` is the start of the first incomplete item."""

    def __init__(self, data: bytes) -> None:
        cur = Cursor(data, len(data), "header")
        cur.take(8, "the magic")
        self.n_tensors, self.n_kv = cur.u64("the tensor count"), cur.u64("the key count")
        self.data, self.pos = data, cur.pos
        self.values: list[tuple[str, int, int]] = []  # key, start and stop of complete values

    def run(self) -> tuple[str, int] | None:
        """Advance to the end of the data; return None if the header is complete.

        Otherwise return the key and the start of the value that is cut off; the key is empty if the cut is elsewhere.
        """
        cur = Cursor(self.data, len(self.data), "header")
        cur.pos = self.pos
        key, start = "", 0
        try:
            while self.n_kv:
                key, start = "", 0
                name = cur.name("a key")
                kind = cur.value_type(name)
                key, start = name, cur.pos
                if kind == GGUFValueType.ARRAY:
                    cur.array(key)
                else:
                    cur.scalar(kind, key)
                self.pass_value(key, start, cur.pos)
            key, start = "", 0
            while self.n_tensors:
                cur.name("a tensor")
                cur.take(8 * cur.u32("the dimensions") + 12, "a tensor")
                self.n_tensors, self.pos = self.n_tensors - 1, cur.pos
        except TruncatedError:
            return key, start
        return None

    def pass_value(self, key: str, start: int, stop: int) -> None:
        """Record that the value of a key is complete and ends here."""
        self.values.append((key, start, stop))
        self.n_kv, self.pos = self.n_kv - 1, stop


def _with_shared(read: Read, size: int, shared: Mapping[str, bytes]) -> bytes | None:
    """Return the bytes of a header, with matching arrays from `shared`, or None if this fails."""
    try:
        scan = _Scan(read(0, min(_FIRST, size)))
        while (cut := scan.run()) is not None:
            key, start = cut
            known, there = shared.get(key, b""), len(scan.data) - start
            if _ALIKE <= there < len(known) and known.startswith(scan.data[start:]):
                scan.data = scan.data[:start] + known
                scan.pass_value(key, start, len(scan.data))
            piece = read(len(scan.data), min(len(scan.data) + _FIRST, size))
            if not piece or len(scan.data) > MAX_HEADER:
                return None
            scan.data += piece
    except FormatError:
        return None  # reading the whole header gives the exact error
    return scan.data


def _data_ends(file: GGUFFile, size: int) -> bool:
    """Return whether the tensors of a part end where the file ends."""
    end = max((t.offset + t.n_bytes for t in file.tensors.values()), default=0)
    return end <= size < end + file.alignment
