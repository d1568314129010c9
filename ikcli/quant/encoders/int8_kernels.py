"""Kernels of int8 codes under one scale: per row (Q8_KV) or per 256 weights (Q8_K_R8, Q8_K_R16).

Arguments: x (f32), number of rows, their length, out, (scratch). Results equal the reference's bytes. Corresponds to
iqk_quantize_row_q8_KV and iqk_quantize_row_q8_K32 of ik_llama.cpp.
"""

# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.half import st_f16
from ikcli.native.simd.vec import (
    cvt_f32x16_i32,
    ld_i32,
    load_f32x16,
    reduce_add,
    reduce_max,
    splat_f32x16,
    st_f32,
    st_i32,
    store_i8x16,
    trunc_i32x16_i8,
    vabs,
    vadd,
    vmax,
    vmul,
    vround_even,
    zero_f32x16,
)

_F0, _F127 = np.float32(0.0), np.float32(127.0)


@inline
def largest_of(x, n):
    peak = zero_f32x16()
    for i in range(0, n, 16):
        peak = vmax(peak, vabs(load_f32x16(x + 4 * i)))
    return reduce_max(peak)


@inline
def store_codes(x, n, factor, out):
    """Store the nearest integers to x * factor; return their sum."""
    scale, count = splat_f32x16(factor), np.int64(0)
    for start in range(0, n, 4096):
        part = zero_f32x16()
        for i in range(start, min(start + 4096, n), 16):
            q = vround_even(vmul(load_f32x16(x + 4 * i), scale))
            store_i8x16(out + i, trunc_i32x16_i8(cvt_f32x16_i32(q)))
            part = vadd(part, q)
        count += np.int64(reduce_add(part))
    return count


def make_int8_rows():
    """Return a kernel for rows of n codes after an f32 scale and the i32 sum of the codes."""

    def int8_rows(x, n_rows, n, out):
        for _ in range(n_rows):
            largest = largest_of(x, n)
            d = largest / _F127
            st_f32(out, d)
            st_i32(out + 4, store_codes(x, n, np.float32(1.0) / d if d > _F0 else _F0, out + 8))
            x += 4 * n
            out += 8 + n

    return int8_rows, 4, False


def make_int8_groups(height, bias):
    """Return a kernel for groups of `height` rows.

    Per 256 columns a group holds f16 scales, then four codes of each row in turn, xor `bias`.
    """

    def int8_groups(x, n_rows, ne0, out, s):
        for first in range(0, n_rows, height):
            for u in range(ne0 // 256):
                for row in range(height):
                    src = x + 4 * (ne0 * (first + row) + 256 * u)
                    largest = largest_of(src, 256)
                    st_f16(out + 2 * row, min(largest / _F127, np.float32(65504.0)))
                    store_codes(src, 256, _F127 / largest if largest > _F0 else _F0, s)
                    dst = out + 2 * height + 4 * row
                    for i in range(64):
                        st_i32(dst + 4 * height * i, ld_i32(s + 4 * i) ^ bias)
                out += 258 * height

    return int8_groups, 5, False
