"""Encode int8 rows and int8 super-blocks: Q8_KV, Q8_K_R8, Q8_K_R16. Importance weights have no effect."""

from __future__ import annotations

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.gguf.types import TYPES
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.encoders.native_call import run
from ikcli.quant.formats import row_size

_KERNELS = "ikcli.quant.encoders.int8_kernels"


def encode_rows(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode (n_rows, ne0) float32 with one scale per row; see `RowEncoder`."""
    n_rows, ne0 = values.shape
    out = np.empty(n_rows * row_size(type, ne0), np.uint8)
    run(KernelKey(_KERNELS, "make_int8_rows"), values.ctypes.data, n_rows, ne0, out.ctypes.data)
    return out


def encode_groups(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode (n_rows, ne0) float32 with one scale per 256 weights, rows interleaved; see `RowEncoder`."""
    n_rows, ne0 = values.shape
    out, scratch = np.empty(n_rows * row_size(type, ne0), np.uint8), np.empty(256, np.uint8)
    bias = 0x80808080 if type == GGMLType.Q8_K_R16 else 0
    key = KernelKey(_KERNELS, "make_int8_groups", (TYPES[type].rows, bias))
    run(key, values.ctypes.data, n_rows, ne0, out.ctypes.data, scratch.ctypes.data)
    return out
