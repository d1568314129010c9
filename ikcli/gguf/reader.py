"""Memory-mapped reader of GGUF files (versions 2 and 3, little-endian), split files included.

Layout: magic, u32 version, u64 n_tensors, u64 n_kv; key-value pairs (string, u32 type, value); tensor infos
(name, u32 n_dims, u64 ne[n_dims], u32 type, u64 offset); padding to `general.alignment`; tensor data.
Strings are u64 length + bytes. Every count is checked against the bytes that remain before anything is allocated,
so a truncated or hostile file ends in a FormatError. Text is decoded with `surrogateescape`: bytes survive.

`GGUFReader` of gguf-py is not used: it trusts counts and offsets of the file, wants the whole file (a header suffices
here to plan a download), reads one part of a split model, and makes arrays of every string, which takes a hundred
times longer for a vocabulary of 150,000 tokens.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError
from ikcli.gguf.constants import DEFAULT_ALIGNMENT, GGUF_MAGIC, INTEGER_TYPES, MAX_DIMS, GGMLType, GGUFValueType
from ikcli.gguf.cursor import Cursor, shown
from ikcli.gguf.overrides import apply_overrides
from ikcli.gguf.types import TYPES, tensor_n_bytes
from ikcli.gguf.values import Typed

_MIN_KV_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_SPLITS = 65535


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a file; `shape` in GGUF order (ne0 is the row length), `offset` from the start of its file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    n_bytes: int
    n_elements: int
    offset: int
    file_index: int = 0


@dataclass(slots=True)
class GGUFFile:
    """A model: metadata of the first part, tensors of all parts, and zero-copy access to their bytes."""

    paths: list[Path]
    version: int
    metadata: dict[str, Any]  # plain scalars, str, list[str], np.ndarray
    value_types: dict[str, GGUFValueType]
    item_types: dict[str, GGUFValueType]  # element type of ARRAY keys
    tensors: dict[str, TensorInfo]
    alignment: int
    _maps: list[npt.NDArray[np.uint8]] = field(repr=False, default_factory=list)
    missing_parts: list[Path] = field(default_factory=list)  # of a split model opened by its header only
    n_announced: int = -1  # tensors of all parts, as a split model states
    data_start: int = 0  # where tensor data begins in the first part

    def get(self, key: str, default: Any = None) -> Any:
        """Return the metadata value of `key`, or `default`."""
        return self.metadata.get(key, default)

    @property
    def arch(self) -> str:
        """Return `general.architecture`; raise a FormatError if it is absent or not a string."""
        arch = self.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise FormatError(f"{self.paths[0]}: no general.architecture; this is not a model file")
        return arch

    @property
    def n_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(t.n_bytes for t in self.tensors.values())

    @property
    def n_elements(self) -> int:
        """Return the number of weights in all tensors."""
        return sum(t.n_elements for t in self.tensors.values())

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a read-only 1-D view of a tensor's bytes in the memory map; an unknown name is a FormatError."""
        t = self.tensors.get(name)
        if t is None:
            raise FormatError(f"{self.paths[0]}: no tensor named {shown(name)}")
        if not self.has_data(name):
            raise FormatError(f"{self.paths[t.file_index]}: the data of tensor {shown(name)} is not in the file")
        return self._maps[t.file_index][t.offset : t.offset + t.n_bytes]

    def part(self, name: str, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Return bytes [start, stop) of a tensor; subclasses without a file compute them."""
        return self.data(name)[start:stop]

    def read_into(self, name: str, start: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out` with the bytes of a tensor from `start` on by reading the file, which maps no page of it."""
        t = self.tensors[name]
        path, at, done = self.paths[t.file_index], t.offset + start, 0
        view = memoryview(out)  # type: ignore[arg-type]
        try:
            with path.open("rb", buffering=0) as f:
                f.seek(at)
                while done < len(out):
                    n = f.readinto(view[done:])
                    if not n:
                        raise FormatError(f"{path}: the file ends within tensor {shown(name)}")
                    done += n
        except OSError as e:
            raise FormatError(f"{path}: cannot be read ({e.strerror or e})") from None

    def has_data(self, name: str) -> bool:
        """Return whether a tensor's bytes are present; only files opened by their header may lack some."""
        t = self.tensors[name]
        return t.file_index < len(self._maps) and t.offset + t.n_bytes <= len(self._maps[t.file_index])

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Release the memory pages within bytes start..stop of a tensor; the system reads them again on demand."""
        t = self.tensors[name]
        buffer = self._maps[t.file_index].base
        buffer = buffer.obj if isinstance(buffer, memoryview) else buffer
        first = -(-(t.offset + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (t.offset + (t.n_bytes if stop is None else min(stop, t.n_bytes))) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and isinstance(buffer, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            buffer.madvise(mmap.MADV_DONTNEED, first, last - first)

    def adopt(self, other: GGUFFile, names: Iterable[str], prefix: str = "") -> None:
        """Add tensors of another file, which stays open; `prefix` is put before their names."""
        first = len(self.paths)
        for name in names:
            t = other.tensors[name]
            self.tensors[prefix + name] = replace(t, name=prefix + name, file_index=first + t.file_index)
        self.paths += other.paths
        self._maps += other._maps

    def typed(self, key: str) -> Typed:
        """Return the value of `key` with its GGUF type, for copying into another file."""
        return Typed(self.metadata[key], self.value_types[key], self.item_types.get(key))

    def typed_metadata(self) -> dict[str, Typed]:
        """Return all key-value pairs with their GGUF types, in file order."""
        return {key: self.typed(key) for key in self.metadata}


def open_gguf(path: str | Path, overrides: Sequence[str] = (), *, header_only: bool = False) -> GGUFFile:
    """Open a GGUF file, or all parts of a split model given its first part.

    `overrides` are `KEY=TYPE:VALUE` strings (TYPE int, float, bool or str; UsageError if malformed). With
    `header_only`, tensor data may be cut off, and parts other than the first may be missing (`missing_parts`).
    Raise a FormatError for a faulty file; it names the file and, if possible, the key or tensor.
    """
    first = Path(path)
    file = _read_part(first, 0, header_only)
    count = _split_int(file, "split.count", 0)
    total = _split_int(file, "split.tensors.count", -1)
    merged = total == len(file.tensors) and "general.architecture" in file.metadata
    if count > 1 and not merged:  # a merged file may keep the keys of the split it came from
        file.n_announced = total
        _add_parts(file, first, count, header_only)
    apply_overrides(file.metadata, file.value_types, file.item_types, overrides, str(first))
    return file


def read_part(path: str | Path, *, header_only: bool = False) -> GGUFFile:
    """Open one part of a split model; raise a FormatError if it is damaged, a TruncatedError if it is cut off."""
    return _read_part(Path(path), 0, header_only)


def _split_int(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if key in file.metadata and (type(value) is not int or not 0 <= value <= 2**31):
        raise FormatError(f"{file.paths[0]}: key {key} must be a small integer")
    return int(value)


def _add_parts(file: GGUFFile, first: Path, count: int, header_only: bool) -> None:
    """Append parts 2..count, found next to the first part by its name."""
    no = _split_int(file, "split.no", 0)
    m = _SPLIT_NAME.fullmatch(first.name)
    if count > _MAX_SPLITS:
        raise FormatError(f"{first}: split.count {count} is not believable")
    if no != 0:
        name = f"{m['prefix']}-00001-of-{count:05d}.gguf" if m else f"*-00001-of-{count:05d}.gguf"
        raise FormatError(f"{first} is part {no + 1} of {count}; open the first part, {first.with_name(name)}")
    if m is None or int(m["no"]) != 1 or int(m["count"]) != count:
        raise FormatError(
            f"{first} is part 1 of {count}, but its name does not end in -00001-of-{count:05d}.gguf; "
            "rename it back so that the other parts can be found"
        )
    for i in range(1, count):
        path = first.with_name(f"{m['prefix']}-{i + 1:05d}-of-{count:05d}.gguf")
        if not path.is_file() and header_only:
            file.missing_parts.append(path)
            continue
        if not path.is_file():
            raise FormatError(f"{first}: part {i + 1} of {count} is missing, expected {path}")
        part = _read_part(path, len(file.paths), header_only)
        found = (_split_int(part, "split.no", 0), _split_int(part, "split.count", 0))
        if found != (i, count):
            raise FormatError(f"{path}: says it is part {found[0] + 1} of {found[1]}, not part {i + 1} of {count}")
        if both := file.tensors.keys() & part.tensors.keys():
            raise FormatError(f"{path}: tensor {shown(min(both))} is also in an earlier part")
        file.paths.append(path)
        file.tensors.update(part.tensors)
        file._maps.extend(part._maps)
    total = file.n_announced
    if total >= 0 and len(file.tensors) != total and not file.missing_parts:
        raise FormatError(f"{first}: the parts hold {len(file.tensors)} tensors, split.tensors.count says {total}")


def _map_file(path: Path) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
    try:
        with path.open("rb") as f:
            buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise FormatError(f"{path}: no such file") from None
    except ValueError:
        raise FormatError(f"{path}: the file is empty") from None
    except OSError as e:
        raise FormatError(f"{path}: cannot be read ({e.strerror or e})") from None
    return buffer, np.frombuffer(buffer, np.uint8)


def _read_part(path: Path, file_index: int, header_only: bool = False) -> GGUFFile:
    buffer, data = _map_file(path)
    cur = Cursor(buffer, len(data), str(path))
    version = _read_version(cur)
    n_tensors, n_kv = cur.u64("the tensor count"), cur.u64("the key count")
    cur.check_count(n_tensors, _MIN_TENSOR_BYTES, "tensors")
    cur.check_count(n_kv, _MIN_KV_BYTES, "key-value pairs")
    metadata, value_types, item_types = _read_metadata(cur, n_kv)
    alignment = _alignment(cur, metadata, value_types)
    infos = _read_tensor_infos(cur, n_tensors)
    start = -(-cur.pos // alignment) * alignment
    tensors = _place_tensors(cur, infos, start, alignment, file_index, header_only)
    return GGUFFile([path], version, metadata, value_types, item_types, tensors, alignment, [data], data_start=start)


def _read_version(cur: Cursor) -> int:
    magic = cur.take(4, "the magic")
    if magic != GGUF_MAGIC:
        cur.fail(f"not a GGUF file (it starts with {magic!r})")
    version = cur.u32("the version")
    if version == 1:
        cur.fail("GGUF version 1 is not supported; rewrite the file with a converter of version 2 or 3")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            cur.fail("big-endian GGUF files are not supported; convert the file to little-endian")
        cur.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    return version


def _read_metadata(cur: Cursor, n_kv: int) -> tuple[dict[str, Any], dict[str, GGUFValueType], dict[str, GGUFValueType]]:
    metadata: dict[str, Any] = {}
    value_types: dict[str, GGUFValueType] = {}
    item_types: dict[str, GGUFValueType] = {}
    for i in range(n_kv):
        key = cur.name(f"the name of key {i}")
        if key in metadata:
            cur.fail(f"key {shown(key)} occurs twice")
        where = f"key {shown(key)}"
        value_type = cur.value_type(where)
        if value_type == GGUFValueType.ARRAY:
            item_types[key], metadata[key] = cur.array(where)
        else:
            metadata[key] = cur.scalar(value_type, where)
        value_types[key] = value_type
    return metadata, value_types, item_types


def _alignment(cur: Cursor, metadata: dict[str, Any], value_types: dict[str, GGUFValueType]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    value_type = value_types.get("general.alignment", GGUFValueType.UINT32)
    if value_type not in INTEGER_TYPES or value <= 0 or value & (value - 1):
        cur.fail(f"key general.alignment is {value!r}, which is not a power of two")
    return int(value)


def _read_tensor_infos(cur: Cursor, n_tensors: int) -> dict[str, tuple[tuple[int, ...], GGMLType, int]]:
    infos: dict[str, tuple[tuple[int, ...], GGMLType, int]] = {}
    for i in range(n_tensors):
        name = cur.name(f"the name of tensor {i}")
        where = f"tensor {shown(name)}"
        if name in infos:
            cur.fail(f"{where} occurs twice")
        n_dims = cur.u32(where)
        if n_dims > MAX_DIMS:
            cur.fail(f"{where} has {n_dims} dimensions; at most {MAX_DIMS} are possible")
        shape = tuple(cur.u64(where) for _ in range(n_dims)) or (1,)  # converters write single numbers without any
        type_id, offset = cur.u32(where), cur.u64(where)
        try:
            type = GGMLType(type_id)
        except ValueError:
            cur.fail(f"{where} has the unknown type id {type_id}")
        infos[name] = (shape, type, offset)
    return infos


def _place_tensors(
    cur: Cursor,
    infos: dict[str, tuple[tuple[int, ...], GGMLType, int]],
    start: int,
    alignment: int,
    file_index: int,
    header_only: bool,
) -> dict[str, TensorInfo]:
    """Make TensorInfo with absolute offsets; refuse tensors that do not fit, are unaligned, or overlap."""
    tensors: dict[str, TensorInfo] = {}
    for name, (shape, type, offset) in infos.items():
        where = f"tensor {shown(name)}"
        n_elements = 1
        for ne in shape:
            n_elements *= ne
        if n_elements <= 0 or n_elements >= 2**63:
            cur.fail(f"{where} has the impossible shape {list(shape)}")
        try:
            n_bytes = tensor_n_bytes(type, shape)
        except ValueError:
            traits = TYPES[type]
            need = f"a multiple of {traits.block_size} as {traits.name} needs"
            cur.fail(f"{where} has rows of {shape[0]} elements, not {need}")
        if offset % alignment:
            cur.fail(f"{where} is at offset {offset}, which is not aligned to {alignment} bytes")
        if start + offset + n_bytes > cur.size and not header_only:
            cur.fail(f"{where} needs bytes up to {start + offset + n_bytes}, but the file ends at {cur.size}")
        tensors[name] = TensorInfo(name, shape, type, n_bytes, n_elements, start + offset, file_index)
    end, previous = 0, ""
    for t in sorted(tensors.values(), key=lambda t: t.offset):
        if t.offset < end:
            cur.fail(f"the data of tensor {shown(t.name)} overlaps that of tensor {shown(previous)}")
        end, previous = t.offset + t.n_bytes, t.name
    return tensors
