"""A bounds-checked cursor over the header of one GGUF file; every failure is a FormatError that names the file."""

from __future__ import annotations

import mmap
import struct
from typing import Any, NoReturn

import numpy as np

from ikcli.errors import FormatError
from ikcli.gguf.constants import SCALAR_CODES, GGUFValueType

MAX_NAME_BYTES = 65535
MAX_ARRAY_DEPTH = 4
_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")


class TruncatedError(FormatError):
    """The file ends too early: it is damaged, or only its beginning exists."""


def shown(name: str) -> str:
    """Return a key or tensor name in a form that is safe and short enough for a message."""
    text = name if name.isprintable() and name else ascii(name)
    return text if len(text) <= 100 else text[:97] + "..."


class Cursor:
    """A reader of little-endian values in a memory map or bytes; `where` arguments name the item for messages."""

    def __init__(self, buffer: mmap.mmap | bytes, size: int, path: str) -> None:
        self.buffer = buffer
        self.size = size
        self.path = path
        self.pos = 0

    def fail(self, message: str) -> NoReturn:
        raise FormatError(f"{self.path}: {message}")

    def fail_short(self, message: str) -> NoReturn:
        raise TruncatedError(f"{self.path}: {message}")

    def take(self, n: int, where: str) -> bytes:
        end = self.pos + n
        if end > self.size:
            self.fail_short(f"the file ends at byte {self.size} in the middle of {where}; it is truncated or damaged")
        out = self.buffer[self.pos : end]
        self.pos = end
        return out

    def u32(self, where: str) -> int:
        return int(_U32.unpack(self.take(4, where))[0])

    def u64(self, where: str) -> int:
        return int(_U64.unpack(self.take(8, where))[0])

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a count of items that cannot fit into the rest of the file."""
        if count * min_bytes > self.size - self.pos:
            left = self.size - self.pos
            self.fail_short(f"the header announces {count} {what}, more than fit in the remaining {left} bytes")

    def name(self, where: str) -> str:
        n = self.u64(where)
        if not 1 <= n <= MAX_NAME_BYTES:
            self.fail(f"{where} has a length of {n} bytes; 1 to {MAX_NAME_BYTES} are possible")
        return self.take(n, where).decode("utf-8", "surrogateescape")

    def string(self, where: str) -> str:
        return self.take(self.u64(where), where).decode("utf-8", "surrogateescape")

    def value_type(self, where: str) -> GGUFValueType:
        number = self.u32(where)
        try:
            return GGUFValueType(number)
        except ValueError:
            self.fail(f"{where} has the unknown value type {number}")

    def scalar(self, type: GGUFValueType, where: str) -> Any:
        if type == GGUFValueType.STRING:
            return self.string(where)
        code = SCALAR_CODES[type][1]
        return struct.unpack(code, self.take(struct.calcsize(code), where))[0]

    def array(self, where: str, depth: int = 1) -> tuple[GGUFValueType, Any]:
        """Return element type and value: an ndarray for numbers, a list for strings and for arrays of arrays."""
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{where} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        item_type = self.value_type(where)
        count = self.u64(where)
        if item_type == GGUFValueType.ARRAY:
            self.check_count(count, 12, f"elements of {where}")
            return item_type, [self.array(where, depth + 1)[1] for _ in range(count)]
        if item_type == GGUFValueType.STRING:
            self.check_count(count, 8, f"elements of {where}")
            return item_type, self._strings(count, where)
        dtype = np.dtype(SCALAR_CODES[item_type][0])
        self.check_count(count, dtype.itemsize, f"elements of {where}")
        raw = np.frombuffer(self.take(count * dtype.itemsize, where), np.uint8)
        if item_type == GGUFValueType.BOOL:
            return item_type, raw != 0
        return item_type, raw.view(dtype).copy()

    def _strings(self, count: int, where: str) -> list[str]:
        """Read strings in a tight loop, as token lists and merges have hundreds of thousands."""
        buffer, size, pos, length = self.buffer, self.size, self.pos, _U64.unpack_from
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                (n,) = length(buffer, pos)
                pos += 8
                end = pos + n
                if end > size:
                    break
                append(buffer[pos:end].decode("utf-8", "surrogateescape"))
                pos = end
        except struct.error:
            pass
        if len(out) != count:
            self.fail_short(f"the file ends at byte {size} in string {len(out)} of {where}; it is truncated or damaged")
        self.pos = pos
        return out
