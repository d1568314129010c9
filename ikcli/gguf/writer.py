"""Write GGUF files, whole or split, little-endian, as a stream.

Tensor data is written in the announced order to temporary files beside the target. They are renamed when complete and
removed on an error, so a reader never sees half a file. With a `key` an interrupted file is kept, and another writer
with this key continues it (`unfinished.py`). In a split model, part 1 carries all metadata, and every part carries
`split.no` (u16), `split.count` (u16) and `split.tensors.count` (i32), as gguf-split writes them.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, UsageError
from ikcli.gguf.constants import (
    DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGUF_VERSION,
    MAX_DIMS,
    SCALAR_CODES,
    GGMLType,
    GGUFValueType,
)
from ikcli.gguf.types import TYPES, tensor_n_bytes
from ikcli.gguf.unfinished import Unfinished
from ikcli.gguf.values import Typed, infer_item_type, infer_type

SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


@dataclass(frozen=True, slots=True)
class NewTensor:
    """Name, shape in GGUF order (ne0, ne1, ...) and type of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the tensor; raise a FormatError if the row length does not suit the type."""
        try:
            return tensor_n_bytes(self.type, self.shape)
        except ValueError as e:
            raise FormatError(f"tensor {self.name}: {e}") from None


def plan_splits(
    tensors: Sequence[NewTensor], max_tensors: int = 0, max_bytes: int = 0, no_tensor_first: bool = False
) -> list[int]:
    """Return the number of tensors of each part, given limits of tensors and bytes per part (0 = no limit)."""
    parts: list[int] = [0, 0] if no_tensor_first else [0]
    size = 0
    for t in tensors:
        full = (max_tensors and parts[-1] >= max_tensors) or (max_bytes and size + t.n_bytes > max_bytes)
        if full and parts[-1]:
            parts.append(0)
            size = 0
        parts[-1] += 1
        size += t.n_bytes
    return parts


def split_path(path: Path, no: int, count: int) -> Path:
    """Return the file name of part `no` (from 0): `model.gguf` -> `model-00001-of-0000N.gguf`."""
    return path.with_name(f"{path.name.removesuffix('.gguf')}-{no + 1:05d}-of-{count:05d}.gguf")


class GGUFWriter:
    """A writer of one model: a context manager in which `write_tensor` is called once per tensor, in order.

    `metadata` values are plain (types inferred) or `Typed`. `splits` is the number of tensors of each part
    (see `plan_splits`); more than one part makes a split model. `key` identifies the sources of the data: with one, the
    first `n_whole` tensors may exist already when the context begins.
    """

    def __init__(
        self,
        path: str | Path,
        metadata: Mapping[str, Any],
        tensors: Sequence[NewTensor],
        alignment: int = DEFAULT_ALIGNMENT,
        version: int = GGUF_VERSION,
        splits: Sequence[int] | None = None,
        key: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.alignment = alignment
        self.version = version
        self.tensors = list(tensors)
        self._parts = list(splits) if splits else [len(self.tensors)]
        self._check(metadata)
        self._metadata = dict(metadata)
        if alignment != DEFAULT_ALIGNMENT or "general.alignment" in metadata:
            self._metadata["general.alignment"] = Typed(alignment, GGUFValueType.UINT32)
        self._next = 0
        self._file: BinaryIO | None = None
        self._done: list[tuple[Path, Path]] = []  # temporary and final name of every started part
        self._remaining = 0  # remaining tensors of the current part
        self._written = 0  # written bytes of the current tensor
        self._closed = False
        self._key = key
        self._unfinished = Unfinished(self.path) if key is not None and len(self._parts) == 1 else None

    @property
    def n_whole(self) -> int:
        """Return the number of whole tensors left by an interrupted writer with this key; writing continues there."""
        return self._unfinished.n_whole if self._unfinished is not None else 0

    @property
    def discarded(self) -> bool:
        """Return whether leftovers of an interrupted writer with another key were discarded."""
        return self._unfinished is not None and self._unfinished.discarded

    @property
    def paths(self) -> list[Path]:
        """Return the final names of the files."""
        n = len(self._parts)
        return [self.path] if n == 1 else [split_path(self.path, i, n) for i in range(n)]

    def _check(self, metadata: Mapping[str, Any]) -> None:
        if self.alignment <= 0 or self.alignment & (self.alignment - 1):
            raise UsageError(f"alignment {self.alignment} is not a power of two")
        if self.version not in (2, 3):
            raise UsageError(f"GGUF version {self.version} cannot be written (2 and 3 can)")
        if sum(self._parts) != len(self.tensors) or len(self._parts) > 65535:
            raise UsageError(f"cannot split {len(self.tensors)} tensors as {self._parts}")
        names: set[str] = set()
        for t in self.tensors:
            if t.name in names:
                raise FormatError(f"{self.path}: tensor {t.name} is to be written twice")
            if not 1 <= len(t.shape) <= MAX_DIMS or min(t.shape) < 1:
                raise FormatError(f"{self.path}: tensor {t.name} has the impossible shape {list(t.shape)}")
            _ = t.n_bytes
            names.add(t.name)
        if any(not k for k in metadata) or "" in names:
            raise FormatError(f"{self.path}: keys and tensor names must not be empty")

    def write_tensor(self, name: str, data: npt.NDArray[Any] | bytes | Iterable[npt.NDArray[Any] | bytes]) -> None:
        """Write the next tensor: one array, bytes, or chunks of either in order."""
        self.begin_tensor(name)
        for chunk in (data,) if isinstance(data, np.ndarray | bytes) else data:
            self.append(chunk)
        self.end_tensor()

    def begin_tensor(self, name: str) -> None:
        """Start the next tensor; its bytes follow with `append`, then `end_tensor`."""
        if self._next >= len(self.tensors):
            raise FormatError(f"{self.path}: tensor {name} was not announced")
        spec = self.tensors[self._next]
        if spec.name != name:
            raise FormatError(f"{self.path}: tensor {name} is out of order, expected {spec.name}")
        if self._remaining == 0:
            self._next_part()
        self._written = 0

    def append(self, chunk: npt.NDArray[Any] | bytes) -> None:
        """Write more bytes of the current tensor."""
        raw = chunk if isinstance(chunk, bytes) else np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
        self._put_data(raw)
        self._written += len(raw)

    def end_tensor(self) -> None:
        """End the current tensor; raise a FormatError if bytes are missing."""
        spec = self.tensors[self._next]
        if self._written != spec.n_bytes:
            of_type = f"tensor {spec.name} ({TYPES[spec.type].name})"
            raise FormatError(f"{self.path}: {of_type} needs {spec.n_bytes} bytes, got {self._written}")
        self._put_data(bytes(-self._written % self.alignment))
        if self._unfinished is not None:
            assert self._file is not None
            try:
                self._unfinished.tensor_is_whole(self._file)
            except OSError as e:
                raise self._failure(e) from None
        self._next += 1
        self._remaining -= 1

    def close(self) -> None:
        """Check that every announced tensor was written, then give the files their final names."""
        if self._closed:
            return
        if self._next != len(self.tensors):
            self.abort()
            raise FormatError(f"{self.path}: only {self._next} of {len(self.tensors)} tensors were written")
        try:
            while len(self._done) < len(self._parts):
                self._next_part()
            self._finish_part()
            for temporary, final in self._done:
                os.replace(temporary, final)
            if self._unfinished is not None:
                self._unfinished.close(keep=False)
        except OSError as e:
            self.abort()
            raise self._failure(e) from None
        except BaseException:
            self.abort()
            raise
        self._closed = True

    def abort(self, interrupted: bool = False) -> None:
        """Discard what was written so far; with a key, keep it if the run was interrupted."""
        if self._file is not None:
            with suppress(OSError):  # flushing the rest may fail for the same reason
                self._file.close()
            self._file = None
        if self._unfinished is not None:
            self._unfinished.close(keep=interrupted)
        for temporary, _ in self._done if self._unfinished is None else ():
            temporary.unlink(missing_ok=True)
        self._closed = True

    def __enter__(self) -> GGUFWriter:
        if self._unfinished is not None:
            header = self._header(0, self.tensors)
            digest = hashlib.sha256(f"{self._key}\n".encode() + header).hexdigest()
            sizes = [-(-t.n_bytes // self.alignment) * self.alignment for t in self.tensors]
            try:
                self._file = self._unfinished.open(digest, header, sizes)
            except OSError as e:
                self._unfinished.close(keep=True)
                raise self._failure(e) from None
            self._done.append((self._unfinished.part, self.path))
            self._next = self._unfinished.n_whole
            self._remaining = len(self.tensors) - self._next
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort(exc_type is not None and issubclass(exc_type, KeyboardInterrupt))

    def _failure(self, problem: OSError) -> FormatError:
        return FormatError(f"{self.path}: cannot be written ({problem.strerror or problem})")

    def _put_data(self, raw: bytes | memoryview) -> None:
        self._put(raw)
        if self._unfinished is not None:
            self._unfinished.update(raw)

    def _put(self, raw: bytes | memoryview) -> None:
        assert self._file is not None
        try:
            self._file.write(raw)
        except OSError as e:
            raise self._failure(e) from None

    def _next_part(self) -> None:
        """Close the current part and open the next one with tensors; write empty parts on the way."""
        while True:
            self._finish_part()
            no = len(self._done)
            final = self.paths[no]
            temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
            try:
                self._file = temporary.open("wb")
            except OSError as e:
                raise FormatError(f"{final}: cannot be written ({e.strerror or e})") from None
            self._done.append((temporary, final))
            first = sum(self._parts[:no])
            self._remaining = self._parts[no]
            self._put(self._header(no, self.tensors[first : first + self._remaining]))
            if self._remaining or no + 1 == len(self._parts):
                return

    def _finish_part(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def layout(self) -> tuple[bytes, dict[str, int], int]:
        """Return, for a model in one file, the bytes before the data, the offset of each tensor, and the size."""
        header, at = self._header(0, self.tensors), {}
        size = len(header)
        for t in self.tensors:
            at[t.name] = size
            size += -(-t.n_bytes // self.alignment) * self.alignment
        return header, at, size

    def _header(self, no: int, tensors: Sequence[NewTensor]) -> bytes:
        placed: list[tuple[str, tuple[int, ...], GGMLType, int]] = []
        offset = 0
        for t in tensors:
            placed.append((t.name, t.shape, t.type, offset))
            offset += -(-t.n_bytes // self.alignment) * self.alignment
        header = header_bytes(self._part_metadata(no), placed, self.version)
        return header + bytes(-len(header) % self.alignment)

    def _part_metadata(self, no: int) -> dict[str, Any]:
        if len(self._parts) == 1:
            return self._metadata
        keep = {k: v for k, v in self._metadata.items() if no == 0 or k == "general.alignment"}
        for key in SPLIT_KEYS:
            keep.pop(key, None)
        values = (no, len(self._parts), len(self.tensors))
        types = (GGUFValueType.UINT16, GGUFValueType.UINT16, GGUFValueType.INT32)
        return keep | {key: Typed(v, t) for key, v, t in zip(SPLIT_KEYS, values, types, strict=True)}


def header_bytes(
    metadata: Mapping[str, Any], tensors: Iterable[tuple[str, tuple[int, ...], GGMLType, int]], version: int
) -> bytes:
    """Return the header without the padding before the data; tensors are (name, shape, type, offset in the data)."""
    placed = list(tensors)
    out = [GGUF_MAGIC, struct.pack("<IQQ", version, len(placed), len(metadata))]
    for key, value in metadata.items():
        out += [_string(key), _value(value, key)]
    for name, shape, type, offset in placed:
        out += [_string(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape), struct.pack("<IQ", type, offset)]
    return b"".join(out)


def _string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any, key: str) -> bytes:
    """Return the type number and the bytes of a metadata value."""
    typed = value if isinstance(value, Typed) else Typed(value, infer_type(value, key))
    if typed.type == GGUFValueType.ARRAY:
        return struct.pack("<I", typed.type) + _array(typed.value, typed.item_type, key)
    return struct.pack("<I", typed.type) + _scalar(typed.value, typed.type, key)


def _scalar(value: Any, type: GGUFValueType, key: str) -> bytes:
    if type == GGUFValueType.STRING:
        return _string(value)
    try:
        return struct.pack(SCALAR_CODES[type][1], value)
    except (struct.error, OverflowError):
        raise FormatError(f"key {key}: the value {value!r} does not fit type {type.name.lower()}") from None


def _array(value: Any, item_type: GGUFValueType | None, key: str) -> bytes:
    if item_type is None:
        item_type = infer_item_type(value, key)
    head = struct.pack("<IQ", item_type, len(value))
    if item_type == GGUFValueType.STRING:
        return head + b"".join(map(_string, value))
    if item_type == GGUFValueType.ARRAY:
        return head + b"".join(_array(v, None, key) for v in value)
    try:
        return head + np.asarray(value).astype(SCALAR_CODES[item_type][0], casting="same_kind").tobytes()
    except (TypeError, ValueError, OverflowError):
        raise FormatError(f"key {key}: the elements do not fit type {item_type.name.lower()}") from None
