"""Read, write and merge importance matrices: mean squared activations per input column (and expert).

Legacy `.dat` (little-endian): i32 n_entries; per entry i32 name length, name, i32 n_calls, i32 n_values, f32 sums; then
optionally i32 number of chunks, i32 length and name of the dataset. GGUF: `general.type` = "imatrix",
`imatrix.datasets`, `imatrix.chunk_count`, `imatrix.chunk_size`, and per entry tensors `<name>.in_sum2` (ne0, n_mat) and
`<name>.counts` (1, n_mat), F32. Corresponds to examples/imatrix of ik_llama.cpp and tools/imatrix of llama.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, NonFiniteError
from ikcli.files import written_whole
from ikcli.gguf.constants import GGUF_MAGIC, GGMLType, GGUFValueType
from ikcli.gguf.cursor import shown
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.imatrix_lookup import (
    count_experts,
    expert_weights,
    is_experts,
    layer_mean,
    reference_relatives,
    relatives,
    without_data,
)

Floats = npt.NDArray[np.float32]
_SUMS, _COUNTS = ".in_sum2", ".counts"
_MIN_ENTRY_BYTES = 4 + 4 + 4 + 4


@dataclass(frozen=True, slots=True)
class ImatrixEntry:
    """Sums of squares `sums` (n_mat, ne0) and the number of rows behind them `counts` (n_mat,), both float32."""

    sums: Floats
    counts: Floats

    @property
    def values(self) -> Floats:
        """Return the mean squares, flat (n_mat * ne0,); a matrix that saw no input counts as 1 everywhere."""
        counts = self.counts[:, None]
        seen = counts > 0
        return np.where(seen, self.sums / np.where(seen, counts, np.float32(1)), np.float32(1)).reshape(-1)


@dataclass(slots=True)
class Imatrix:
    """Entries by tensor name, and their origin."""

    entries: dict[str, ImatrixEntry] = field(default_factory=dict)
    datasets: tuple[str, ...] = ()
    n_chunks: int = 0
    chunk_size: int = 512
    path: str = ""
    dropped: frozenset[str] = frozenset()  # names of entries that were filtered out
    borrowed: dict[str, str] = field(default_factory=dict)  # tensor -> entry of another block, of the same size

    def find(self, name: str, shape: tuple[int, ...] | None = None) -> str | None:
        """Return the entry that serves a tensor: its own, else that of a tensor with the same input, else None.

        With `shape`, entries of another size are passed over where the reference would not look for them. A tensor
        whose own entry was filtered out is served as the reference does it.
        """
        known = reference_relatives(name)
        for other in (name, *(known if name in self.dropped else relatives(name))):
            entry = self.entries.get(other)
            if entry is None:
                continue
            if other == name or other in known or shape is None or entry.sums.size == _n_values(shape):
                return other
        return self.borrowed.get(name)

    def fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether an entry serves a tensor of this shape; raise FormatError if its size differs.

        For the token embedding an entry of another size is ignored.
        """
        found = self.find(name, shape)
        if found is None:
            return False
        size, need = self.entries[found].sums.size, _n_values(shape)
        if size == need or found == self.borrowed.get(name) or _joins_heads(name, found, size, shape):
            return True
        if name == "token_embd.weight":
            return False
        raise FormatError(
            f"{self.path}: the entry {found} has {size} values, but tensor {name} needs {need}; the importance matrix "
            "belongs to another model"
        )

    def weights(self, name: str, shape: tuple[int, ...]) -> Floats | None:
        """Return the weights (n_mat, ne0) of a tensor, or None without entry; raise FormatError if the size differs.

        Experts with few rows are drawn towards the mean of their layer (`imatrix_lookup`).
        """
        found = self.find(name, shape) if self.fits(name, shape) else None
        if found is None:
            return None
        n_mat, entry = _n_matrices(shape), self.entries[found]
        if is_experts(name) and n_mat > 1:
            if found == self.borrowed.get(name):  # experts of another layer have nothing but their number in common
                return np.broadcast_to(layer_mean(entry.sums, entry.counts, n_mat), (n_mat, shape[0]))
            return expert_weights(entry.sums, entry.counts, n_mat)
        if entry.sums.size == _n_values(shape):
            return entry.values.reshape(n_mat, shape[0])
        # attn_kv_b is one matrix; attn_k_b and attn_v_b are one per head, or stored as one
        return np.broadcast_to(entry.values.reshape(-1, shape[0]).mean(axis=0), (n_mat, shape[0]))

    def filtered(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Imatrix:
        """Keep only entries whose name contains one of `include` (if any) and none of `exclude`."""
        keep = {
            name: entry
            for name, entry in self.entries.items()
            if (not include or any(part in name for part in include)) and not any(part in name for part in exclude)
        }
        dropped = self.dropped | (self.entries.keys() - keep.keys())
        return replace(self, entries=keep, dropped=frozenset(dropped))


def _n_matrices(shape: tuple[int, ...]) -> int:
    return shape[2] if len(shape) > 2 else 1


def _n_values(shape: tuple[int, ...]) -> int:
    return shape[0] * _n_matrices(shape)


def _joins_heads(name: str, found: str, size: int, shape: tuple[int, ...]) -> bool:
    """Return whether entry or tensor has a row per head of latent attention while the other has a single row."""
    mla = found != name or name.endswith((".attn_k_b.weight", ".attn_v_b.weight"))
    return mla and "attn_" in name and size % shape[0] == 0 and 1 in (_n_matrices(shape), size // shape[0])


def read_imatrix(path: str | Path) -> Imatrix:
    """Read a legacy or GGUF file, told apart by the magic.

    Raises FormatError if it is damaged or not an importance matrix, NonFiniteError if a value is NaN or Inf.
    """
    path = Path(path)
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise FormatError(f"{path}: cannot be read ({e.strerror or e})") from None
    found = _read_gguf(path) if magic == GGUF_MAGIC else _read_legacy(path)
    for name, entry in found.entries.items():
        if not (np.isfinite(entry.sums).all() and np.isfinite(entry.counts).all()):
            raise NonFiniteError(f"{path}: the entry {shown(name)} holds NaN or Inf; collect the matrix again")
        if entry.sums.min(initial=0) < 0 or entry.counts.min(initial=0) < 0:
            raise FormatError(f"{path}: the entry {shown(name)} holds negative values; the file is damaged")
    return found


class _Bytes:
    """Reads the bytes of a legacy file; raises FormatError at a premature end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data = memoryview(path.read_bytes())
        self.pos = 0

    def take(self, n: int, where: str) -> memoryview:
        if n < 0 or self.pos + n > len(self.data):
            raise FormatError(f"{self.path}: {where} is damaged or cut short; this is not a complete importance matrix")
        self.pos += n
        return self.data[self.pos - n : self.pos]

    def i32(self, where: str) -> int:
        return int(struct.unpack("<i", self.take(4, where))[0])


def _read_legacy(path: Path) -> Imatrix:
    data = _Bytes(path)
    n_entries = data.i32("the number of entries")
    if not 0 < n_entries <= len(data.data) // _MIN_ENTRY_BYTES:
        raise FormatError(f"{path}: not an importance matrix (neither GGUF nor the legacy format)")
    out = Imatrix(path=str(path))
    for i in range(n_entries):
        where = f"entry {i + 1} of {n_entries}"
        name = bytes(data.take(data.i32(where), where)).decode("utf-8", "surrogateescape")
        n_calls, n_values = data.i32(where), data.i32(where)
        if n_values < 1:
            raise FormatError(f"{path}: {where} has {n_values} values; the file is damaged")
        sums = np.frombuffer(data.take(4 * n_values, where), "<f4").astype(np.float32)[None]
        out.entries[name] = ImatrixEntry(sums, np.array([max(n_calls, 1)], np.float32))
    if data.pos < len(data.data):
        out.n_chunks = data.i32("the number of chunks")
        text = bytes(data.take(data.i32("the dataset name"), "the dataset name"))
        out.datasets = tuple(text.decode("utf-8", "surrogateescape").split(",")) if text else ()
    return out


def _read_gguf(path: Path) -> Imatrix:
    file = open_gguf(path)
    names = [name.removesuffix(_SUMS) for name in file.tensors if name.endswith(_SUMS)]
    if not names:
        kind = file.get("general.type", "model")
        raise FormatError(f"{path}: holds no importance matrix (general.type is {kind})")
    out = Imatrix(path=str(path))
    for name in names:
        sums, counts = _matrix(file, name + _SUMS), _matrix(file, name + _COUNTS).reshape(-1)
        if len(counts) != len(sums):
            raise FormatError(f"{path}: {shown(name)} has sums of {len(sums)} matrices, but {len(counts)} counts")
        out.entries[name] = ImatrixEntry(sums, counts)
    datasets = file.get("imatrix.datasets", [])
    out.datasets = tuple(datasets) if isinstance(datasets, list) else (str(datasets),)
    out.n_chunks = int(file.get("imatrix.chunk_count", 0))
    out.chunk_size = int(file.get("imatrix.chunk_size", 512))
    return out


def _matrix(file: GGUFFile, name: str) -> Floats:
    t = file.tensors.get(name)
    if t is None or t.type != GGMLType.F32:
        raise FormatError(f"{file.paths[0]}: tensor {shown(name)} is missing or not f32")
    return file.data(name).view("<f4").astype(np.float32).reshape(-1, t.shape[0])


def write_legacy(imatrix: Imatrix, path: str | Path) -> None:
    """Write the `.dat` format; it has one count per entry, to which the sums of several matrices are scaled."""
    out = [struct.pack("<i", len(imatrix.entries))]
    for name, entry in imatrix.entries.items():
        n_calls = max(1, round(float(entry.counts.max())))
        sums = entry.sums if len(entry.counts) == 1 else entry.values.reshape(entry.sums.shape) * np.float32(n_calls)
        raw = name.encode("utf-8", "surrogateescape")
        out += [struct.pack("<i", len(raw)), raw, struct.pack("<ii", n_calls, sums.size), sums.astype("<f4").tobytes()]
    text = ",".join(imatrix.datasets).encode("utf-8", "surrogateescape")
    out += [struct.pack("<ii", imatrix.n_chunks, len(text)), text]
    _replace(Path(path), b"".join(out))


def _replace(path: Path, data: bytes) -> None:
    try:
        with written_whole(path) as temporary:
            temporary.write_bytes(data)
    except OSError as e:
        raise FormatError(f"{path}: cannot be written ({e.strerror or e})") from None


def write_gguf(imatrix: Imatrix, path: str | Path) -> None:
    """Write the GGUF format, entries sorted by name."""
    metadata = {
        "general.type": "imatrix",
        "imatrix.datasets": Typed(list(imatrix.datasets), GGUFValueType.ARRAY, GGUFValueType.STRING),
        "imatrix.chunk_count": Typed(imatrix.n_chunks, GGUFValueType.UINT32),
        "imatrix.chunk_size": Typed(imatrix.chunk_size, GGUFValueType.UINT32),
    }
    names = sorted(imatrix.entries)
    specs: list[NewTensor] = []
    for name in names:
        n_mat, ne0 = imatrix.entries[name].sums.shape
        specs.append(NewTensor(name + _SUMS, (ne0, n_mat), GGMLType.F32))
        specs.append(NewTensor(name + _COUNTS, (1, n_mat), GGMLType.F32))
    with GGUFWriter(path, metadata, specs) as writer:
        for name in names:
            writer.write_tensor(name + _SUMS, imatrix.entries[name].sums.astype("<f4"))
            writer.write_tensor(name + _COUNTS, imatrix.entries[name].counts.astype("<f4"))


def merge(matrices: Sequence[Imatrix]) -> Imatrix:
    """Merge matrices as if one run had seen all inputs; raise FormatError if entries of one name differ in size."""
    out = Imatrix(
        datasets=tuple(dict.fromkeys(d for m in matrices for d in m.datasets)),
        n_chunks=sum(m.n_chunks for m in matrices),
        chunk_size=matrices[0].chunk_size if matrices else 512,
        path=", ".join(m.path for m in matrices),
    )
    sizes = {name: entry.sums.size for m in matrices for name, entry in m.entries.items()}
    for m in matrices:
        for name, entry in m.entries.items():
            old = out.entries.get(name)
            out.entries[name] = entry if old is None else _add(old, entry, name, m.path, count_experts(name, sizes))
    return out


def _add(a: ImatrixEntry, b: ImatrixEntry, name: str, path: str, n_experts: int) -> ImatrixEntry:
    if a.sums.size != b.sums.size:
        raise FormatError(f"{path}: the entry {shown(name)} has {b.sums.size} values, an earlier file {a.sums.size}")
    n_mat = max(len(a.counts), len(b.counts))  # a legacy entry has one count for all its matrices
    if not {len(a.counts), len(b.counts)} <= {1, n_mat}:
        raise FormatError(
            f"{path}: the entry {shown(name)} has {len(b.counts)} matrices, an earlier file {len(a.counts)}; "
            "the files belong to different models"
        )
    a, b = (split_matrices(e, n_mat if n_mat > 1 else n_experts) for e in (a, b))
    return ImatrixEntry(a.sums + b.sums, a.counts + b.counts)


def split_matrices(entry: ImatrixEntry, n_mat: int) -> ImatrixEntry:
    """Give an entry one count per matrix (n_mat): the common count, or 0 for matrices without data."""
    if len(entry.counts) == n_mat:
        return entry
    empty = without_data(entry.sums, entry.counts, n_mat)
    sums = np.where(empty[:, None], np.float32(0), entry.sums.reshape(n_mat, -1))
    return ImatrixEntry(sums, np.where(empty, np.float32(0), entry.counts).astype(np.float32))
