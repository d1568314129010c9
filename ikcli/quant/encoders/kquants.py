"""Encode super-blocks of 256: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS."""

from __future__ import annotations

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.encoders.legacy import levels, normalized_weights, ranges
from ikcli.quant.encoders.native_call import run
from ikcli.quant.formats import row_size

_SCALE_ONLY = "ikcli.quant.encoders.kquants_kernels"
_RANGE = "ikcli.quant.encoders.kquants_range_kernels"
_PACK = "ikcli.quant.encoders.kquants_pack"
_SCRATCH_BYTES = 4864

_CANDIDATES = {
    GGMLType.Q3_K: levels(-4, 3, 0.25, 0.8, 12),
    GGMLType.Q6_K: levels(-32, 31, 0.2, 0.4, 40),
    GGMLType.IQ4_XS: levels(-127, 113, 0.2, 0.8, 14),
    GGMLType.Q2_K: ranges(3, 0.6, 2, 8),
    GGMLType.Q4_K: ranges(15, 1, 4, 11),
    GGMLType.Q5_K: ranges(31, 1, 5, 11),
}
_RANGE_TYPES = (GGMLType.Q2_K, GGMLType.Q4_K, GGMLType.Q5_K)


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode (n_rows, ne0) float32 as super-blocks; see `RowEncoder`."""
    n_rows, ne0 = values.shape
    out = np.empty(n_rows * row_size(type, ne0), np.uint8)
    src, dst, n_units = values.ctypes.data, out.ctypes.data, values.size // 256
    weights = normalized_weights(imatrix)
    w = 0 if weights is None else weights.ctypes.data
    scratch, candidates = np.empty(_SCRATCH_BYTES, np.uint8), _CANDIDATES[type]
    flags = np.zeros(n_rows, np.uint8)
    if type == GGMLType.Q2_K and weights is None:
        run(KernelKey(_PACK, "make_ternary_q2_k"), src, n_rows, ne0, dst, flags.ctypes.data, scratch.ctypes.data)
    skip = flags.ctypes.data if flags.any() else 0
    module, factory = (_RANGE, "make_range") if type in _RANGE_TYPES else (_SCALE_ONLY, "make_scale_only")
    key = KernelKey(module, factory, (type.name,))
    run(key, src, w, n_units, ne0, dst, scratch.ctypes.data, candidates.ctypes.data, len(candidates), skip)
    return out
