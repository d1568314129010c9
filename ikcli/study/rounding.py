"""Replace tensors of a model by their values after a round trip through another type, in their own type and place.

The rest of the model stays mapped from the file, so a trial takes only the memory of its tensors and runs the same
kernels as the base. It measures the damage by the weights alone, without that of quantized activations.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from ikcli.errors import UnsupportedError
from ikcli.gguf.constants import GGMLType
from ikcli.gguf.reader import GGUFFile, TensorInfo
from ikcli.gguf.types import TYPES
from ikcli.quant.decode import decodable_types, dequantize
from ikcli.quant.encoders import available_types, quantize_rows
from ikcli.quant.encoding import TensorEncoding

Bytes = npt.NDArray[np.uint8]
_PIECE = 1 << 20  # weights per thread at a time


@dataclass(slots=True)
class Replaced(GGUFFile):
    """A model file in which some tensors have other bytes, in the same type and shape."""

    held: dict[str, Bytes] | None = None

    def data(self, name: str) -> Bytes:
        """Return the bytes of the replacement, else of the file."""
        found = self.held.get(name) if self.held else None
        return GGUFFile.data(self, name) if found is None else found

    def read_into(self, name: str, start: int, out: Bytes) -> None:
        """Fill `out` with bytes of the replacement, else of the file."""
        found = self.held.get(name) if self.held else None
        if found is None:
            GGUFFile.read_into(self, name, start, out)
        else:
            out[:] = found[start : start + len(out)]

    @classmethod
    def of(cls, file: GGUFFile, held: dict[str, Bytes]) -> Replaced:
        """Return the model `file` with the bytes of `held` in place of those in the file."""
        return cls(**{f.name: getattr(file, f.name) for f in fields(GGUFFile)}, held=held)


def rounded(file: GGUFFile, t: TensorInfo, type: GGMLType, encoding: TensorEncoding, n_threads: int = 1) -> Bytes:
    """Return the values of `t` after a round trip through `type`, as bytes in the type of `t`.

    UnsupportedError if tensors of that type cannot be read and written.
    """
    if t.type not in decodable_types() or t.type not in available_types():
        raise UnsupportedError(
            f"tensor {t.name} is {TYPES[t.type].name}: start from an f16 or bf16 model to measure types"
        )
    ne0 = t.shape[0]
    ne1 = t.shape[1] if len(t.shape) > 1 else 1
    n_rows = t.n_elements // ne0
    step = max(16, _PIECE // ne0 // 16 * 16)
    source = file.data(t.name).reshape(n_rows, -1)
    out = np.empty_like(source)

    def work(piece: tuple[int, int, int]) -> None:
        matrix, first, stop = piece
        x = dequantize(source[first:stop].reshape(-1), t.type, (ne0, stop - first)).reshape(-1, ne0)
        code = encoding.encode(x, type, matrix)
        y = dequantize(code, type, (ne0, stop - first)).reshape(-1, ne0)
        out[first:stop] = quantize_rows(y, t.type).reshape(stop - first, -1)

    pieces = [(m, m * ne1 + r, m * ne1 + min(r + step, ne1)) for m in range(n_rows // ne1) for r in range(0, ne1, step)]
    with ThreadPoolExecutor(max(1, n_threads)) as pool:
        list(pool.map(work, pieces))
    return out.reshape(-1)
