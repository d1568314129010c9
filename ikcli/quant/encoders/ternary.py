"""Encode TQ1_0 and TQ2_0 byte for byte as llama.cpp does: d is the largest magnitude of 256 values.

Values that are d times -1, 0 or 1 come back exactly, but for the rounding of d to f16. Importance weights are ignored.
"""

from __future__ import annotations

import numpy as np

from ikcli.gguf.constants import GGMLType
from ikcli.quant.encoders import Bytes, EncodeOptions, Floats


def encode(values: Floats, type: GGMLType, imatrix: Floats | None, options: EncodeOptions) -> Bytes:
    """Encode rows (n_rows, ne0) into the bytes of `type`."""
    blocks = values.reshape(-1, 256)
    d = np.abs(blocks).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    scaled = blocks * inverse
    codes = (np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5)) + 1).astype(np.uint16)  # halves away from 0
    scale = d.astype("<f2").view(np.uint8).reshape(-1, 2)
    if type == GGMLType.TQ2_0:
        crumbs = codes.reshape(-1, 2, 4, 32)
        packed = [(crumbs << np.array([0, 2, 4, 6], np.uint16)[:, None]).sum(axis=2).reshape(-1, 64)]
    else:
        packed = [_digits(codes[:, :160], 5), _digits(codes[:, 160:240], 5), _digits(codes[:, 240:], 4)]
    return np.concatenate([*(part.astype(np.uint8) for part in packed), scale], axis=1).reshape(-1)


def _digits(codes: np.ndarray, n: int) -> np.ndarray:
    """Return bytes of n digits, the first of each on top, as fractions of 243."""
    rows = codes.reshape(len(codes), n, -1)
    number = np.zeros(rows.shape[::2], np.uint32)
    for i in range(5):
        number = number * 3 + (rows[:, i] if i < n else 0)
    return (number * 256 + 242) // 243
