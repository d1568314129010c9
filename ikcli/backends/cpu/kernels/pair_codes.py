"""Convert numbers to 16-bit integers in pairs, for products that multiply and add two per lane.

A row, or a part of one, has a scale. The norms of rows are bounded, so by Cauchy and Schwarz no sum of products can
leave 32 bits.
"""

import math

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bits_f32x16_i32,
    splat_f32x16,
    splat_i32x16,
    vadd,
    vand,
    vdiv,
    vfma,
    vmin,
    vor,
    vshl,
    vsqrt,
    zero_f32x16,
)

NORM = np.float32(46000)  # of rows of integers, before rounding: no product of two leaves 32 bits
TOP = np.float32(32700)  # ... of their numbers
TINY = np.float32(1e-37)
ROUND = np.float32(1.5 * 2**23)  # a float plus this has the nearest integer in its lower bits
_F0, _F1 = np.float32(0.0), np.float32(1.0)


@inline
def rounded(x, factor):
    """Round x * factor to the nearest integer, even in a tie, in the lower 16 bits of each lane."""
    return bits_f32x16_i32(vfma(x, factor, splat_f32x16(ROUND)))


@inline
def pairs_of(low, high):
    """Put the lower 16 bits of two vectors of integers side by side."""
    return vor(vand(low, splat_i32x16(0xFFFF)), vshl(high, 16))


@inline
def row_factor(norm, top):
    """Return the factor on a row before rounding, from its sum of squares and largest magnitude."""
    return min(NORM / np.float32(math.sqrt(norm + TINY)), TOP / (top + TINY))


@inline
def row_scale(norm, factor):
    """Return the factor on its sums; NaN for a row that is not finite."""
    return _F1 / factor + _F0 * norm


@inline
def lane_factors(norms, tops):
    """Return row_factor of 16 rows."""
    factor = vdiv(splat_f32x16(NORM), vsqrt(vadd(norms, splat_f32x16(TINY))))
    return vmin(factor, vdiv(splat_f32x16(TOP), vadd(tops, splat_f32x16(TINY))))


@inline
def lane_scales(norms, factors):
    """Return row_scale of 16 rows."""
    return vfma(norms, zero_f32x16(), vdiv(splat_f32x16(_F1), factors))
