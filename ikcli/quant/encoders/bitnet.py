"""Encode the ternary types IQ1_BN and IQ2_BN: rows of d * {-1, 0, 1} with the d of least weighted squared error.

Rows that are already ternary come back exactly (IQ1_BN: with d rounded to f16). Layouts: `decoders.bitnet`. Corresponds
to iqk_quantize.cpp, which takes d = max|x| and ignores importance weights.
"""

from __future__ import annotations

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.encoders.native_call import run
from ikcli.quant.encoders.trellis import mean_one_weights
from ikcli.quant.formats import row_size


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode rows (n_rows, ne0) into the bytes of `type`."""
    n_rows, ne0 = values.shape
    weights = mean_one_weights(imatrix)
    out = np.empty(n_rows * row_size(type, ne0), np.uint8)
    scratch = np.empty(ne0 + 16, np.float32)
    at_weights = 0 if weights is None else weights.ctypes.data
    slots = [values.ctypes.data, at_weights, n_rows, ne0, scratch.ctypes.data, out.ctypes.data]
    params = np.array(slots, np.int64)
    run(
        KernelKey("ikcli.quant.encoders.bitnet_kernels", "make_ternary", (int(type == GGMLType.IQ2_BN),)),
        params.ctypes.data,
    )
    return out
