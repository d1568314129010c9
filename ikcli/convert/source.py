"""Sources of checkpoint tensors: the protocol that conversions read from, and the safetensors files of a directory.

A safetensors file consists of the size of its header (u64), the header (JSON: name -> dtype, shape, offsets) and the
data. Headers are not trusted. Data is read with `pread` into the caller's memory, so no mapping grows the process.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, IkError, UnsupportedError
from ikcli.system_files import read_at
from ikcli.text_files import read_text

Array = npt.NDArray[Any]

_MAX_HEADER = 100 << 20
_MAX_DIMS = 8
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

# dtype of a header -> NumPy type; types that NumPy lacks are returned as unsigned integers of the same size.
NUMPY_TYPES: dict[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}


class CheckpointSource(Protocol):
    """Tensors by name; shapes are those of the checkpoint, outermost dimension first."""

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all tensors, in the order of the files."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape; () for a scalar."""
        ...

    def dtype(self, name: str) -> str:
        """Return the type under its name in safetensors: BF16, F16, F32, F8_E4M3, I32, U8, ..."""
        ...

    def read(self, name: str) -> Array:
        """Return a copy of all values: BF16 as uint16, 8-bit floats as uint8."""
        ...

    def rows(self, name: str, first: int, last: int) -> Array:
        """Return rows [first, last) of the tensor as a matrix (last - first, shape[-1])."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    file: int
    dtype: str
    shape: tuple[int, ...]
    start: int


class SafetensorsSource:
    """The safetensors files of a directory: the shards of its index, `model.safetensors`, all others, or `files`.

    Tensors in `model.safetensors` of the subdirectories `modules` are called `<subdirectory>/<name>`.
    """

    def __init__(self, directory: Path, files: Sequence[Path] | None = None, modules: Sequence[str] = ()) -> None:
        own = _files(directory) if files is None else list(files)
        self.paths = own + [directory / module / _SINGLE for module in modules]
        prefixes = [""] * len(own) + [f"{module}/" for module in modules]
        self._handles: list[int] = []
        self._entries: dict[str, _Entry] = {}
        weakref.finalize(self, _close, self._handles)
        for number, path in enumerate(self.paths):
            try:
                self._handles.append(os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
            except OSError as problem:
                raise IkError(f"{path}: {problem.strerror or problem}") from None
            for bare, entry in _read_header(path, self._handles[-1], number).items():
                name = prefixes[number] + bare
                if name in self._entries:
                    raise FormatError(f"{path}: tensor {name} is in {self.paths[self._entries[name].file].name}, too")
                self._entries[name] = entry
        if files is None:
            _check_index(directory, self._entries, self.paths)

    @property
    def names(self) -> Sequence[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        return self._entries[name].dtype

    def read(self, name: str) -> Array:
        entry = self._entries[name]
        return self._read(name, 0, math.prod(entry.shape)).reshape(entry.shape)

    def rows(self, name: str, first: int, last: int) -> Array:
        width = self._entries[name].shape[-1] if self._entries[name].shape else 1
        return self._read(name, first * width, last * width).reshape(last - first, width)

    def _read(self, name: str, first: int, last: int) -> Array:
        """Return elements [first, last)."""
        entry = self._entries[name]
        out = np.empty(last - first, NUMPY_TYPES[entry.dtype])
        view = out.view(np.uint8)
        position = entry.start + first * out.itemsize
        while len(view):
            try:
                piece = read_at(self._handles[entry.file], min(len(view), 16 << 20), position)
            except OSError as problem:
                raise IkError(f"{self.paths[entry.file]}: {problem.strerror or problem}") from None
            if not piece:
                raise FormatError(f"{self.paths[entry.file]}: the file became shorter while tensor {name} was read")
            view[: len(piece)] = np.frombuffer(piece, np.uint8)
            view, position = view[len(piece) :], position + len(piece)
        return out


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)


def _files(directory: Path) -> list[Path]:
    """Return the files with tensors; raise an IkError that names other weight files in the directory."""
    if not directory.is_dir():
        raise IkError(f"{directory}: {'is not a directory' if directory.exists() else 'no such directory'}")
    index = directory / _INDEX
    if index.is_file():
        names = list(dict.fromkeys(_weight_map(index).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise FormatError(f"{directory}: files of {_INDEX} are missing: {missing[0]}{more}")
        return [directory / name for name in sorted(names)]
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    found = sorted(p for p in directory.glob("model*.safetensors") if p.is_file())
    if not found:
        other = sorted(p.name for pattern in ("*.bin", "*.pth", "*.safetensors") for p in directory.glob(pattern))
        kind = f"; {other[0]} is not read" if other else ""
        raise UnsupportedError(f"{directory}: no {_SINGLE} or {_INDEX}{kind}; save the model as safetensors first")
    return found


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(read_text(index, error=FormatError))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FormatError(f"{index}: is not an index of safetensors files (JSON with a weight_map)") from None
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise FormatError(f"{index}: weight_map does not map names to files")
    for name in found.values():
        if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
            raise FormatError(f"{index}: {name!r} is not the name of a file in this directory")
    return found


def _check_index(directory: Path, entries: dict[str, _Entry], paths: list[Path]) -> None:
    index = directory / _INDEX
    if not index.is_file():
        return
    for name, file in _weight_map(index).items():
        if name not in entries:
            raise FormatError(f"{directory / file}: tensor {name} of {_INDEX} is missing")
        if paths[entries[name].file].name != file:
            raise FormatError(f"{index}: tensor {name} is in {paths[entries[name].file].name}, not in {file}")


def _read_header(path: Path, handle: int, number: int) -> dict[str, _Entry]:
    size = os.fstat(handle).st_size
    head = read_at(handle, 8, 0)
    if len(head) < 8:
        raise FormatError(f"{path}: is not a safetensors file: it has {size} bytes")
    n_header = int(struct.unpack("<Q", head)[0])
    if n_header > min(_MAX_HEADER, size - 8):
        raise FormatError(
            f"{path}: is truncated or not a safetensors file: a header of {n_header} bytes, {size} in all"
        )
    try:
        header = json.loads(read_at(handle, n_header, 8).decode("utf-8"))
    except (ValueError, RecursionError):
        raise FormatError(f"{path}: the header is not JSON") from None
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is not a JSON object")
    entries: dict[str, _Entry] = {}
    spans: list[tuple[int, int, str]] = []
    data = 8 + n_header
    for name, info in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, first, last = _checked(path, name, info, size - data)
        entries[name] = _Entry(number, dtype, shape, data + first)
        spans.append((first, last, name))
    spans.sort()
    for (_, end, before), (start, _, name) in itertools.pairwise(spans):
        if start < end:
            raise FormatError(f"{path}: tensors {before} and {name} overlap")
    return dict(sorted(entries.items(), key=lambda item: item[1].start))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _checked(path: Path, name: str, info: object, n_data: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return dtype, shape and offsets of a record, or raise a FormatError that names the tensor."""
    if not isinstance(info, dict):
        raise FormatError(f"{path}: tensor {name}: the record is not a JSON object")
    dtype, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in NUMPY_TYPES:
        raise FormatError(f"{path}: tensor {name}: unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_whole, shape)):
        raise FormatError(f"{path}: tensor {name}: {shape!r} is not a shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_whole, offsets)):
        raise FormatError(f"{path}: tensor {name}: {offsets!r} are not offsets")
    first, last = offsets
    expected = math.prod(shape) * np.dtype(NUMPY_TYPES[dtype]).itemsize
    if last - first != expected:
        raise FormatError(f"{path}: tensor {name}: {last - first} bytes for {shape} of {dtype}, which needs {expected}")
    if last > n_data:
        raise FormatError(f"{path}: truncated: tensor {name} ends at {last}, the data at {n_data}")
    return dtype, tuple(shape), first, last
