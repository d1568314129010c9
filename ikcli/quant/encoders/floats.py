"""Write F16 and BF16 rows, and read pieces of tensors as float32 (F32 pieces in place)."""

from __future__ import annotations

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.decode import dequantize
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.encoders.native_call import run
from ikcli.quant.formats import row_size

_KERNELS = "ikcli.quant.encoders.floats_kernels"
_HALVES = (GGMLType.F16, GGMLType.BF16)


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode (n_rows, ne0) float32 as F16 or BF16; see `RowEncoder`."""
    out = np.empty(len(values) * row_size(type, values.shape[1]), np.uint8)
    run(KernelKey(_KERNELS, "make_narrow", (TYPES[type].name,)), values.ctypes.data, out.ctypes.data, values.size)
    return out


class RowReader:
    """Reads runs of rows as float32, one after the other, into its own memory (one reader per thread).

    The result of `read` is valid until the next call and must not be written to.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def read(self, data: Bytes, type: GGMLType, ne0: int) -> Floats:
        """Return the bytes of whole rows of `type` as (n_rows, ne0)."""
        n_rows = len(data) // row_size(type, ne0)
        if type == GGMLType.F32:
            return data.view("<f4").reshape(n_rows, ne0)
        if type not in _HALVES:
            return dequantize(data, type, (ne0, n_rows)).reshape(n_rows, ne0)
        if self._memory.size < n_rows * ne0:
            self._memory = np.empty(n_rows * ne0, np.float32)
        out = self._memory[: n_rows * ne0]
        key = KernelKey(_KERNELS, "make_widen", (TYPES[type].name,))
        run(key, data.ctypes.data, out.ctypes.data, out.size)
        return out.reshape(n_rows, ne0)
