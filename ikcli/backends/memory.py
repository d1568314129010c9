"""Host memory that is aligned for vector loads."""

from __future__ import annotations

import numpy as np


def aligned_zeros(n_bytes: int, align: int = 64) -> np.ndarray:
    """Return uint8 zeros whose address is a multiple of `align`."""
    raw = np.zeros(n_bytes + align, dtype=np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + n_bytes]
