"""Encode NVFP4 byte for byte as llama.cpp does: a scale E4M3 without sign for 16 values, the nearest of E2M1 for each.

A scale is the largest magnitude over 6, rounded (halves up) to what E4M3 holds without infinity: at most 240. Of two
codes at the same distance the smaller magnitude is taken. Importance weights are ignored. Corresponds to ggml-quants.c.
"""

from __future__ import annotations

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats
from ikcli.quant.tables import MXFP4_VALUES

_MOST = 0x7E


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode rows (n_rows, ne0) into the bytes of `type`."""
    groups = values.reshape(-1, 16)
    magnitudes = np.abs(groups)
    scale = _e4m3(magnitudes.max(axis=1) / np.float32(6))
    d = _half_value(scale)[:, None]
    code, least = np.zeros(groups.shape, np.uint8), magnitudes
    for i in range(1, 8):
        distance = np.abs(np.float32(MXFP4_VALUES[i]) * d - magnitudes)
        nearer = distance < least
        code[nearer] = i
        least = np.minimum(distance, least)
    code |= np.where((groups < 0) & (code > 0), np.uint8(8), np.uint8(0))
    packed = code[:, :8] | code[:, 8:] << 4
    return np.concatenate([scale.reshape(-1, 4), packed.reshape(-1, 32)], axis=1).reshape(-1)


def _e4m3(x: Floats) -> Bytes:
    """Return numbers >= 0 as E4M3."""
    bits = x.view(np.uint32)
    # exponent and three bits of the fraction; half of the last carries into the exponent
    normal = (bits >> 20).astype(np.int32) - (120 << 3) + (bits >> 19 & 1).astype(np.int32)
    tiny = np.minimum((np.minimum(x, 1) * np.float32(512) + np.float32(0.5)).astype(np.int32), 7)
    return np.where(bits >> 23 <= 120, tiny, np.minimum(normal, _MOST)).astype(np.uint8)


def _half_value(scale: Bytes) -> Floats:
    """Return half of what E4M3 means: the table of values is doubled."""
    exponent, fraction = (scale >> 3).astype(np.int32), (scale & np.uint8(7)).astype(np.float32)
    return np.where(exponent, np.ldexp(1 + fraction / 8, exponent - 8), np.ldexp(fraction, -10)).astype(np.float32)
