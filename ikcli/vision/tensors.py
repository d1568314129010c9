"""The tensors of a projector file: as graphs use them, and where they are in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ikcli.errors import FormatError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES, tensor_n_bytes
from ikcli.graph import Weight
from ikcli.quant.decode import dequantize

Floats = npt.NDArray[np.float32]
_LAYER = re.compile(r"v\.blk\.(\d{1,4})\.(.+)")


class Tensors:
    """Access by name, with checked shapes. Vectors are used as float32; some matrices are made of others."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.source = file, str(file.paths[0])
        self._made: dict[str, npt.NDArray[np.generic]] = {}
        self.specs: dict[str, Weight] = {}  # of the tensors that graphs use

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def values(self, name: str, *shape: int) -> Floats:
        """Return a tensor as float32 in NumPy order; `shape`: its expected shape, without leading ones."""
        t = self._found(name)
        found = tuple(int(n) for n in reversed(t.shape))
        if shape and tuple(n for n in found if n != 1) != tuple(n for n in shape if n != 1):
            raise self._wrong(name, tuple(reversed(shape)))
        values = np.asarray(dequantize(self._file.data(name), t.type, tuple(t.shape)), np.float32)
        return values.reshape(shape) if shape else values

    def matrix(self, name: str, ne0: int, ne1: int) -> Weight:
        """Return a matrix of ne1 rows of ne0 columns; kernels of convolutions count as rows."""
        t = self._found(name)
        rows, total = t.shape[-1] if len(t.shape) > 1 else 1, int(np.prod([int(n) for n in t.shape]))
        if int(rows) != ne1 or total != ne0 * ne1:
            raise self._wrong(name, (ne0, ne1))
        if len(t.shape) > 2 and t.shape[0] != ne0 and t.type not in (GGMLType.F32, GGMLType.F16, GGMLType.BF16):
            return self.made(name, self.values(name).reshape(ne1, ne0))
        return self._used(Weight(name, t.type, (ne0, ne1)))

    def n_rows(self, name: str) -> int:
        """Return the rows of a matrix."""
        return int(self._found(name).shape[-1])

    def n_cols(self, name: str) -> int:
        """Return the columns of a matrix."""
        return int(self._found(name).shape[0])

    def vector(self, name: str, n: int) -> Weight:
        """Return a vector of n numbers."""
        if name not in self._made:
            self._made[name] = np.ascontiguousarray(self.values(name, n), np.float32)
        return self._used(Weight(name, GGMLType.F32, (n,)))

    def vector_or_none(self, name: str, n: int) -> Weight | None:
        """Return a vector, or None where the file has none of that name."""
        return self.vector(name, n) if name in self else None

    def made(self, name: str, values: Floats, like: str = "") -> Weight:
        """Return a matrix or vector of these values, float16 where the tensor `like` is."""
        half = like in self._file.tensors and self._file.tensors[like].type is GGMLType.F16
        self._made[name] = np.ascontiguousarray(values, np.float16 if half else np.float32)
        return self._used(Weight(name, GGMLType.F16 if half else GGMLType.F32, tuple(reversed(values.shape))))

    def _used(self, w: Weight) -> Weight:
        self.specs[w.name] = w
        return w

    # --- of tensors that graphs use: `WeightSource` -------------------------------------------------------------------
    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of a tensor."""
        return (self._made[name] if name in self._made else self._file.data(name)).reshape(-1).view(np.uint8)

    def n_bytes(self, names: Iterable[str]) -> int:
        """Return the bytes of these tensors."""
        return sum(tensor_n_bytes(self.specs[n].type, self.specs[n].shape) for n in names)

    def load(self, names: Iterable[str], *, mmap: bool) -> dict[str, int]:
        """Return the addresses of these tensors, which are mapped or made already."""
        return {n: int(self.bytes_of(n).ctypes.data) for n in names}

    # --- about the file -----------------------------------------------------------------------------------------------
    @property
    def names(self) -> list[str]:
        """Return the names of all tensors of the file."""
        return list(self._file.tensors)

    def sample(self, name: str) -> bytes:
        """Return the first bytes of a tensor."""
        return self._file.data(name)[:4096].tobytes()

    @property
    def file_bytes(self) -> int:
        """Return the bytes of all tensors of the file."""
        return sum(self._file.data(n).nbytes for n in self._file.tensors)

    def check_layers(self, n_layer: int) -> None:
        """Raise FormatError unless all layers have the same tensors; some files leave out layers that nothing reads."""
        names: dict[int, set[str]] = {}
        for name in self._file.tensors:
            if found := _LAYER.fullmatch(name):
                names.setdefault(int(found[1]), set()).add(found[2])
        layers = [il for il in range(n_layer) if il in names]
        whole = set().union(*(names[il] for il in layers))
        for il in layers:
            if missing := whole - names[il]:
                raise FormatError(
                    f"{self.source}: tensor 'v.blk.{il}.{min(missing)}' is missing, which other layers have; the "
                    "projector is incomplete"
                )

    def not_finite(self) -> str:
        """Return the name of a tensor with values that are not finite, or an empty text; this reads all of them."""
        for name in self._file.tensors:
            if not np.isfinite(self.values(name)).all():
                return name
        return ""

    def _found(self, name: str) -> TensorInfo:
        if name not in self._file.tensors:
            raise FormatError(f"{self.source}: tensor '{name}' is missing; the projector is incomplete")
        found = self._file.tensors[name]
        if not TYPES[found.type].cpu and TYPES[found.type].kind != "float":
            raise FormatError(
                f"{self.source}: tensor '{name}' is {TYPES[found.type].name}; weights have a float or quantized type"
            )
        return found

    def _wrong(self, name: str, expected: tuple[int, ...]) -> FormatError:
        found = ", ".join(str(n) for n in self._file.tensors[name].shape)
        want = ", ".join(str(n) for n in expected)
        return FormatError(f"{self.source}: tensor '{name}' has wrong shape; expected {want}, got {found}")
