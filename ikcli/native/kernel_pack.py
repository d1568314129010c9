"""Kernels that an installed package brings along: one file per platform and level of processors (`isa.LEVELS`).

A pack begins with a line of magic, the digest of what its kernels were compiled for and with, and the length of the
index. The index has a line for each kernel: its file name in the cache, which says of which sources it was made, the
offset and the size of its compressed contents. So a kernel is found only if sources, level, Numba and llvmlite are
those of its making. `tools/build_kernels.py` writes packs into the wheel; a checkout has none.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

from ikcli.native import isa

FOLDER = Path(__file__).resolve().parents[1] / "data" / "kernels"
_MAGIC = "ik-kernels-1"


class KernelPack:
    """An opened pack. It finds nothing where the file is absent, damaged or of another digest."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._index = b""
        try:
            with path.open("rb") as file:
                magic, found, length = file.readline(200).decode().split()
                if (magic, found) == (_MAGIC, digest):
                    self._index = b"\n" + file.read(int(length))
                    self._start = file.tell()
        except (OSError, ValueError):
            return

    def find(self, name: str) -> bytes | None:
        """Return the contents of the cache file of this name."""
        at = self._index.find(f"\n{name} ".encode())
        if at < 0:
            return None
        try:
            offset, size = self._index[at + len(name) + 2 :].split(b"\n", 1)[0].split()
            with self._path.open("rb") as file:
                file.seek(self._start + int(offset))
                return zlib.decompress(file.read(int(size)))
        except (OSError, ValueError, zlib.error):
            return None

    def __len__(self) -> int:
        return max(0, self._index.count(b"\n") - 1)


def write_pack(path: Path, digest: str, kernels: Mapping[str, bytes]) -> None:
    """Write a pack of kernels by file name."""
    blobs = {name: zlib.compress(kernels[name], 9) for name in sorted(kernels)}
    lines, offset = list[str](), 0
    for name, blob in blobs.items():
        lines.append(f"{name} {offset} {len(blob)}\n")
        offset += len(blob)
    index = "".join(lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(f"{_MAGIC} {digest} {len(index)}\n".encode() + index + b"".join(blobs.values()))


def pack_name(level: str) -> str:
    """Return the name of the pack of a level for an operating system, whose format object files have."""
    return f"{isa.system()}-{isa.level(level).architecture}-{level}.pack"
