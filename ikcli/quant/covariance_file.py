"""Read and write activation second moments, which GPTQ/LDLQ error feedback (`ikcli.quant.feedback`) needs.

The file is GGUF with `general.type` = "covariance", `covariance.chunk_count`, `covariance.datasets` and two lists of
equal length: `covariance.tensors` and `covariance.entries` say which entry serves which tensor (q, k and v see one
input). An entry has three F32 tensors of sums over rows: `<entry>.in_cov` (B, ne0, n_mat) holds for every column its
products with the B columns of its own block, `<entry>.in_sum` (ne0, n_mat) the sums, `<entry>.counts` (1, n_mat) the
numbers of rows. B divides ne0; B = ne0 is a full matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError, NonFiniteError
from ikcli.gguf.constants import GGUF_MAGIC, GGMLType, GGUFValueType
from ikcli.gguf.cursor import shown
from ikcli.gguf.reader import GGUFFile, open_gguf
from ikcli.gguf.values import Typed
from ikcli.gguf.writer import GGUFWriter, NewTensor
from ikcli.quant.imatrix_file import Imatrix, ImatrixEntry
from ikcli.quant.imatrix_lookup import relatives

Floats = npt.NDArray[np.float32]
KIND = "covariance"
RANDOM_TOKENS = "random tokens"
"""The data set of moments that no text was needed for."""
_SUPER = 256  # columns of a super-block
_DOUBT = 4  # see `Covariance.moments`
_OTHER = "; the files belong to different models"
_COV, _SUM, _COUNTS = ".in_cov", ".in_sum", ".counts"


@dataclass(frozen=True, slots=True)
class Moments:
    """Sums over the inputs of n_mat matrices: `products` (n_mat, ne0, B), `sums` (n_mat, ne0), `counts` (n_mat,)."""

    products: Floats
    sums: Floats
    counts: npt.NDArray[np.float64]

    @property
    def block(self) -> int:
        return int(self.products.shape[2])


class Covariance:
    """An open file of second moments; they are read on demand, one matrix at a time."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.path = str(file.paths[0])
        names, entries = (_strings(file, f"covariance.{key}") for key in ("tensors", "entries"))
        if len(names) != len(entries) or not names:
            raise FormatError(f"{self.path}: {len(names)} tensors are listed for {len(entries)} entries; it is damaged")
        self._entries = dict(zip(names, entries, strict=True))
        self._last: tuple[str, Floats | None] = "", None
        self.datasets = tuple(_strings(file, "covariance.datasets"))
        self.n_chunks = int(file.get("covariance.chunk_count", 0))

    @property
    def of_random_tokens(self) -> bool:
        """Return whether the moments come from random tokens, so that an importance matrix has better mean squares."""
        return set(self.datasets) == {RANDOM_TOKENS}

    def find(self, name: str) -> str | None:
        """Return the entry of a tensor: its own, else that of a tensor with the same input, else None."""
        return next((self._entries[n] for n in (name, *relatives(name)) if n in self._entries), None)

    def moments(self, name: str, shape: tuple[int, ...], matrix: int) -> Floats | None:
        """Return E[x x^T] for one matrix of a tensor of `shape`, as (n, B, B) diagonal blocks; None without data.

        Everything outside the n blocks is 0. A block is a whole super-block of 256 columns where ne0 allows it.
        Matrices with few rows (experts) are drawn towards the mean of all matrices, which counts as B rows.
        Off-diagonal values are less certain than the diagonal and are scaled by rows / (rows + 4 B): on held-out text
        this lowers the divergence by 3 to 7 % where an expert saw 40 B rows.
        """
        entry = self.find(name)
        if entry is None:
            return None
        self.check_size(name, shape)
        counts = self._part(entry + _COUNTS).reshape(-1)
        mean = self._mean(entry, counts)
        if mean is None:
            return None
        if len(counts) > 1 and (shape[2] if len(shape) > 2 else 1) == len(counts):
            own, count = self._part(entry + _COV)[matrix], float(counts[matrix])
            weight = np.float32(mean.shape[1] / (count + mean.shape[1]))
            mean = mean * weight + own * ((1 - weight) / np.float32(max(count, 1.0)))
            n_rows = count + mean.shape[1]
        else:
            n_rows = float(counts.sum(dtype=np.float64))
        if not np.isfinite(mean).all():
            raise NonFiniteError(f"{self.path}: the entry {shown(entry)} holds NaN or Inf; collect the file again")
        return _diagonal_blocks(_shrunk(mean, n_rows / (n_rows + _DOUBT * mean.shape[1])))

    def _mean(self, entry: str, counts: Floats) -> Floats | None:
        """Return the mean products (ne0, B) over all matrices, None without rows; the last entry's result is kept."""
        if self._last[0] != entry:
            total = float(counts.sum(dtype=np.float64))
            mean = self._part(entry + _COV).sum(axis=0) / np.float32(total) if total > 0 else None
            self._last = entry, mean
        return self._last[1]

    def check_size(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise FormatError if the entry that serves a tensor is damaged or its row length differs."""
        entry = self.find(name)
        if entry is None:
            return
        n_counts, (n_mat, ne0, block) = self._part(entry + _COUNTS).size, self._part(entry + _COV).shape
        if ne0 != shape[0] or n_counts != n_mat or ne0 % block:
            raise FormatError(
                f"{self.path}: the entry {shown(entry)} has {ne0} columns in {n_counts} matrices, but tensor {name} "
                f"has rows of {shape[0]}; the file belongs to another model"
            )

    def imatrix(self) -> Imatrix:
        """Return the mean squares alone, as an importance matrix with one entry per tensor."""
        out = Imatrix(datasets=self.datasets, n_chunks=self.n_chunks, path=self.path)
        made: dict[str, ImatrixEntry] = {}
        for name, entry in self._entries.items():
            if entry not in made:
                products = self._part(entry + _COV)
                column = np.arange(products.shape[1])
                squares = products[:, column, column % products.shape[2]]
                made[entry] = ImatrixEntry(np.maximum(squares, 0), self._part(entry + _COUNTS).reshape(-1))
            out.entries[name] = made[entry]
        return out

    @property
    def entries(self) -> Mapping[str, str]:
        """Return the entry of every tensor."""
        return self._entries

    def sums(self, entry: str) -> Moments:
        """Return the stored sums of an entry."""
        counts = self._part(entry + _COUNTS).reshape(-1).astype(np.float64)
        return Moments(self._part(entry + _COV), self._part(entry + _SUM)[0], counts)

    def _part(self, name: str) -> Floats:
        t = self._file.tensors.get(name)
        if t is None or t.type != GGMLType.F32:
            raise FormatError(f"{self.path}: tensor {shown(name)} is missing or not f32")
        shape = (*t.shape, 1, 1)[:3]
        return self._file.data(name).view("<f4").reshape(shape[2], shape[1], shape[0])


def _strings(file: GGUFFile, key: str) -> list[str]:
    found = file.get(key, [])
    return [str(s) for s in found] if isinstance(found, list) else []


def _shrunk(products: Floats, factor: float) -> Floats:
    """Scale the mean products (ne0, B), except for the squares on the diagonal."""
    column = np.arange(len(products))
    out = products * np.float32(factor)
    out[column, column % products.shape[1]] = products[column, column % products.shape[1]]
    return out


def _diagonal_blocks(products: Floats) -> Floats:
    """Turn products (ne0, B) into exactly symmetric blocks (n, B', B').

    Small blocks are joined to B' = 256 where 256 divides ne0.
    """
    ne0, size = products.shape
    given = products.reshape(-1, size, size)
    blocks: Floats = (given + given.transpose(0, 2, 1)) * np.float32(0.5)
    if size >= _SUPER or ne0 % _SUPER or _SUPER % size:
        return blocks
    out = np.zeros((ne0 // _SUPER, _SUPER, _SUPER), np.float32)
    for i, block in enumerate(blocks):
        at = i * size % _SUPER
        out[i * size // _SUPER, at : at + size, at : at + size] = block
    return out


def with_squares(moments: Floats, squares: Floats) -> Floats:
    """Put mean squares (n * B,) on the diagonal of moments (n, B, B) and keep the correlations.

    Columns that were always 0 are correlated with no other.
    """
    old = np.ascontiguousarray(np.diagonal(moments, axis1=1, axis2=2), np.float64)
    new = np.maximum(squares.reshape(old.shape).astype(np.float64), 0)
    factor = np.sqrt(np.divide(new, old, out=np.zeros_like(old), where=old > 0)).astype(np.float32)
    out: Floats = moments * factor[:, :, None] * factor[:, None, :]
    column = np.arange(out.shape[1])
    out[:, column, column] = new
    return out


def is_covariance(path: str | Path) -> bool:
    """Return whether a file holds second moments, damaged or not."""
    with Path(path).open("rb") as f:
        if f.read(4) != GGUF_MAGIC:
            return False
    try:
        return open_gguf(path).get("general.type", "") == KIND
    except FormatError:
        return False


def open_covariance(path: str | Path) -> Covariance:
    """Open a file of second moments; raise FormatError if it is damaged or something else."""
    file = open_gguf(path)
    kind = file.get("general.type", "model")
    if kind != KIND:
        raise FormatError(
            f"{path}: holds no second moments (general.type is {kind}); make them with ik imatrix --covariance FILE"
        )
    return Covariance(file)


def write_covariance(
    path: str | Path,
    entries: Sequence[tuple[Sequence[str], Moments]],
    *,
    n_chunks: int = 0,
    datasets: Sequence[str] = (),
) -> None:
    """Write entries with the tensors that each serves; an entry is named after the first of them."""
    shapes = {names[0]: m.products.shape for names, m in entries}
    parts = ((names[0], m) for names, m in entries)
    _write(path, [(name, names[0]) for names, _ in entries for name in names], shapes, parts, n_chunks, datasets)


def merge_covariance(files: Sequence[Covariance], path: str | Path) -> None:
    """Add up several files into one, an entry at a time; the result may replace one of them.

    Entries that only some files have are taken from these. Raises FormatError if the shapes of an entry differ.
    """
    pairs: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        for name, entry in file.entries.items():
            if pairs.setdefault(name, entry) != entry:
                raise FormatError(f"{file.path}: {name} shares {shown(entry)}, elsewhere {shown(pairs[name])}{_OTHER}")
            shape = file.sums(entry).products.shape
            if shapes.setdefault(entry, shape) != shape:
                raise FormatError(
                    f"{file.path}: the entry {shown(entry)} has {shape[0]} matrices of {shape[1]} columns in blocks of "
                    f"{shape[2]}, elsewhere {', '.join(map(str, shapes[entry]))}; merge files of one model and one "
                    "--covariance-limit"
                )

    def parts() -> Iterator[tuple[str, Moments]]:
        for entry in shapes:
            found = [file.sums(entry) for file in files if entry in file.entries.values()]
            products, sums, counts = (np.sum(a, axis=0) for a in zip(*map(_arrays, found), strict=True))
            yield entry, Moments(products, sums, counts)

    datasets = list(dict.fromkeys(d for file in files for d in file.datasets))
    _write(path, list(pairs.items()), shapes, parts(), sum(file.n_chunks for file in files), datasets)


def _arrays(m: Moments) -> tuple[Floats, Floats, npt.NDArray[np.float64]]:
    return m.products, m.sums, m.counts


def _write(
    path: str | Path,
    pairs: Sequence[tuple[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    parts: Iterable[tuple[str, Moments]],
    n_chunks: int,
    datasets: Sequence[str],
) -> None:
    metadata: Mapping[str, object] = {
        "general.type": KIND,
        "covariance.chunk_count": Typed(n_chunks, GGUFValueType.UINT32),
        "covariance.datasets": Typed(list(datasets), GGUFValueType.ARRAY, GGUFValueType.STRING),
        "covariance.tensors": Typed([p[0] for p in pairs], GGUFValueType.ARRAY, GGUFValueType.STRING),
        "covariance.entries": Typed([p[1] for p in pairs], GGUFValueType.ARRAY, GGUFValueType.STRING),
    }
    specs: list[NewTensor] = []
    for name, (n_mat, ne0, block) in shapes.items():
        specs.append(NewTensor(name + _COV, (block, ne0, n_mat), GGMLType.F32))
        specs.append(NewTensor(name + _SUM, (ne0, n_mat), GGMLType.F32))
        specs.append(NewTensor(name + _COUNTS, (1, n_mat), GGMLType.F32))
    with GGUFWriter(Path(path), dict(metadata), specs) as writer:
        for name, m in parts:
            writer.write_tensor(name + _COV, m.products.astype("<f4", copy=False))
            writer.write_tensor(name + _SUM, m.sums.astype("<f4", copy=False))
            writer.write_tensor(name + _COUNTS, m.counts.astype("<f4"))
