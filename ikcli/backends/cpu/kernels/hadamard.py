"""Transform head vectors by Walsh-Hadamard, in blocks of powers of two, scaled to be its own inverse.

The transform spreads outliers evenly over a head before it is quantized. With q and k both transformed, their dot
product is the same. Butterflies run inside a vector by lane shuffles, then between vectors.
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import copy_f32
from ikcli.backends.cpu.kernels.common import n_rows
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import HadamardParams
from ikcli.native.jit import inline
from ikcli.native.simd.blocks import hadamard16
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i64,
    load_f32x16,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vadd,
    vmul,
    vsub,
)

_F1 = np.float32(1.0)


@inline
def transform_small(dst, src, n, scale):
    """Transform n < 16 elements."""
    for i in range(n):
        st_f32(dst + 4 * i, ld_f32(src + 4 * i) * scale)
    half = 1
    while half < n:
        for i in range(n):
            if i & half == 0:
                a, b = ld_f32(dst + 4 * i), ld_f32(dst + 4 * (i + half))
                st_f32(dst + 4 * i, a + b)
                st_f32(dst + 4 * (i + half), a - b)
        half *= 2


@inline
def transform(dst, src, n, scale):
    """Transform n elements, a power of two, at least 16."""
    factor = splat_f32x16(scale)
    for i in range(0, n, 16):
        store_f32x16(dst + 4 * i, hadamard16(vmul(load_f32x16(src + 4 * i), factor)))
    half = 16
    while half < n:
        for first in range(0, n, 2 * half):
            for i in range(first, first + half, 16):
                a, b = load_f32x16(dst + 4 * i), load_f32x16(dst + 4 * (i + half))
                store_f32x16(dst + 4 * i, vadd(a, b))
                store_f32x16(dst + 4 * (i + half), vsub(a, b))
        half *= 2


def make_hadamard():
    @kernel(HadamardParams)
    def hadamard(params, ith, nth):
        x, out, heads, dim = params.x, params.out, params.heads, params.dim
        offset, n_blocks = params.offset, params.n_blocks
        items = n_rows(params) * heads
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            src, dst, at = x + 4 * item * dim, out + 4 * item * dim, offset
            copy_f32(dst, src, offset)
            for b in range(n_blocks):
                n = ld_i64(params.sizes + 8 * b)
                scale = _F1 / np.float32(math.sqrt(np.float32(n)))
                if n < 16:
                    transform_small(dst + 4 * at, src + 4 * at, n, scale)
                else:
                    transform(dst + 4 * at, src + 4 * at, n, scale)
                at += n
            copy_f32(dst + 4 * at, src + 4 * at, dim - at)

    return hadamard
