"""Kernel of XXH64's inner loop over whole stripes of 32 bytes; gguf/hashes.py handles the rest."""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import ld_i64, st_i64

_PRIME_1, _PRIME_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)


@inline
def _round(lane, address):
    lane = lane + np.uint64(ld_i64(address)) * _PRIME_2
    return ((lane << _LEFT) | (lane >> _RIGHT)) * _PRIME_1


def make_stripes():
    """Return stripes(data, n, lanes u64[4]), which updates the lanes with n more stripes of 32 bytes each."""

    def stripes(data, n, lanes):
        a, b = np.uint64(ld_i64(lanes)), np.uint64(ld_i64(lanes + 8))
        c, d = np.uint64(ld_i64(lanes + 16)), np.uint64(ld_i64(lanes + 24))
        for _ in range(n):
            a, b = _round(a, data), _round(b, data + 8)
            c, d = _round(c, data + 16), _round(d, data + 24)
            data += 32
        st_i64(lanes, np.int64(a))
        st_i64(lanes + 8, np.int64(b))
        st_i64(lanes + 16, np.int64(c))
        st_i64(lanes + 24, np.int64(d))
        return np.int64(0)

    return stripes, 3, True
