"""Encode blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0, MXFP4, IQ4_NL.

Without importance weights Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and MXFP4 are written byte for byte as the reference does. All
others minimise the (weighted) squared error of a block over its scale, or scale and minimum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ikcli.gguf.constants import GGMLType
from ikcli.native.kernel_cache import KernelKey
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.encoders.native_call import run
from ikcli.quant.formats import row_size

_CLOSED = "ikcli.quant.encoders.legacy_kernels"
_SEARCH = "ikcli.quant.encoders.legacy_search_kernels"
_SCRATCH_BYTES = 4864

_SCALE_ONLY = {GGMLType.Q4_0: (4, 0), GGMLType.Q5_0: (5, 0), GGMLType.Q6_0: (6, 0), GGMLType.IQ4_NL: (4, 1)}
_RANGE = {GGMLType.Q4_1: 4, GGMLType.Q5_1: 5}


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode (n_rows, ne0) float32 as 32-blocks; see `RowEncoder`."""
    n_rows, ne0 = values.shape
    out = np.empty(n_rows * row_size(type, ne0), np.uint8)
    n_blocks, src, dst = values.size // 32, values.ctypes.data, out.ctypes.data
    narrow = type == GGMLType.Q4_0 and options.symmetric_q40
    weights = None if narrow else normalized_weights(imatrix)
    w = 0 if weights is None else weights.ctypes.data
    if type == GGMLType.MXFP4:
        run(KernelKey(_CLOSED, "make_mxfp4"), src, n_blocks, dst, w, ne0)
    elif type == GGMLType.Q8_0:
        run(KernelKey(_CLOSED, "make_q8_0"), src, n_blocks, dst)
    elif weights is None and type in (GGMLType.Q4_0, GGMLType.Q5_0):
        run(KernelKey(_CLOSED, "make_symmetric", (_SCALE_ONLY[type][0], int(narrow))), src, n_blocks, dst)
    elif weights is None and type in _RANGE:
        run(KernelKey(_CLOSED, "make_asymmetric", (_RANGE[type],)), src, n_blocks, dst)
    else:
        key, candidates, n_candidates = _search(type)
        scratch = np.empty(_SCRATCH_BYTES, np.uint8)
        run(key, src, w, n_blocks, ne0, dst, scratch.ctypes.data, candidates.ctypes.data, n_candidates)
    return out


def normalized_weights(imatrix: Floats | None) -> Floats | None:
    """Divide importance weights by the largest and keep them away from 0; return None without any, or if all are 0."""
    if imatrix is None or not (largest := float(imatrix.max())) > 0:
        return None
    return np.maximum(imatrix / np.float32(largest), np.float32(1e-9)).astype(np.float32)


def _search(type: GGMLType) -> tuple[KernelKey, Floats, int]:
    """Return the kernel, its table of candidates, and their number."""
    if type in _RANGE:
        table = _RANGE_CANDIDATES[type]
        return KernelKey(_SEARCH, "make_range_search", (_RANGE[type],)), table, len(table)
    table = _LEVELS[type]
    return KernelKey(_SEARCH, "make_scale_search", _SCALE_ONLY[type]), table, len(table) - 8


def levels(lowest: float, highest: float, below: float, above: float, n: int) -> npt.NDArray[np.float32]:
    """Return the levels that the largest value of a block may get.

    They lie around the highest and, negated, around the lowest one.
    """
    t = np.geomspace(1 - below, 1 + above, n)
    return np.concatenate((lowest * t, highest * t)).astype(np.float32)


def ranges(highest: int, below: float, above: float, n: int) -> npt.NDArray[np.float32]:
    """Return the codes that the smallest and the largest value of a block may get."""
    t = np.linspace(0, 1, n) ** 2 * (above + below) - below
    return np.stack(np.meshgrid(-t, highest + t), axis=-1).reshape(-1, 2).astype(np.float32)


def _with_exact(candidates: Floats, outer_levels: Sequence[float]) -> Floats:
    """Return the candidates, then the inverse levels that the largest value may have exactly."""
    return np.append(candidates, 1 / np.array(outer_levels, np.float32)).astype(np.float32)


_LEVELS = {
    GGMLType.Q4_0: _with_exact(levels(-8, 7, 0.2, 0.8, 32), (-8, -7, -6, -5, 4, 5, 6, 7)),
    GGMLType.Q5_0: _with_exact(levels(-16, 15, 0.2, 0.8, 32), (-16, -15, -14, -13, 12, 13, 14, 15)),
    GGMLType.Q6_0: _with_exact(levels(-32, 31, 0.2, 0.4, 40), (-32, -31, -30, -29, 28, 29, 30, 31)),
    GGMLType.IQ4_NL: _with_exact(levels(-127, 113, 0.2, 0.8, 28), (-127, -104, -83, -65, 53, 69, 89, 113)),
}
_RANGE_CANDIDATES = {GGMLType.Q4_1: ranges(15, 1, 6, 12), GGMLType.Q5_1: ranges(31, 1, 6, 12)}
