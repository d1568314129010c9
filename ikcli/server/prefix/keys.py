"""Keys of cached positions, and how many bytes the rows of waiting conversations may take.

The key of a position is what it was computed from: the id of a token, or a number below 0 for a position of an image.
Nothing here looks into a key; equal keys at all positions of a prefix mean equal rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

_MOST_MIB, _SHARE = 8192, 4


def default_limit(mib: int | None, free: int | None) -> int:
    """Return the bytes for stored prompts: `mib` if given, else a quarter of the free memory but at most 8 GiB."""
    if mib is None:
        return min(_MOST_MIB << 20, (free or 0) // _SHARE)
    return mib << 20 if mib >= 0 else 1 << 62


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of equal tokens at the start of both."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()[0]
    return int(different[0]) if different.size else n
