"""Choose table rows of trellis types group by group and pass errors on to later columns (see `ikcli.quant.feedback`).

The search visits the clusters whose centres are not much farther than the nearest one, as in `trellis_kernels`. A group
is searched in all rows before the next group.
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i32,
    ld_i64,
    ld_u8,
    load_f32x16,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    st_i32,
    store_f32x16,
    store_i32x16,
    vfma,
    vmul,
    zero_i32x16,
)
from ikcli.quant.encoders.feedback_grids import errors_of
from ikcli.quant.encoders.lane_kernels import mask_less, where_less
from ikcli.quant.encoders.trellis_kernels import make_limit, make_sums
from ikcli.quant.encoders.trellis_simd import first_bit, lane_of_least, reduce_least

_F0, _HUGE, _M2 = np.float32(0.0), np.float32(3e38), np.float32(-2.0)


def make_rows(size, magnitude):
    """Return a kernel that chooses the table rows of all groups.

    Arguments: x, targets (rows, n) f32, rows, n, feedback (n, n), weights (n,), scales (rows, n / 32) f32, tables
    (rows, n / 32) u8, slots of the tables, reach in 1/1000 of the table's unit, table rows out (rows, n / size) i32,
    errors out (rows, n), scratch of 256 bytes and 4 per cluster. `magnitude`: tables hold magnitudes, signs are free.
    """
    sums, limit = make_sums(size, True), make_limit(size)

    @inline
    def best_row(book, s, w, wu, energy, reach, scratch):
        scores, least, n = scratch + 256, splat_f32x16(_HUGE), ld_i64(book + 48)
        centers, p, q = ld_i64(book), splat_f32x16(s * s), splat_f32x16(_M2 * s)
        for i in range(n // 16):
            a, b = sums(centers + 64 * size * i, w, wu, 0, True)
            score = vfma(p, a, vmul(q, b))
            store_f32x16(scores + 64 * i, score)
            least = where_less(score, least, score, least)
        top = splat_f32x16(limit(energy, w, s, reduce_least(least), reach))
        starts, members, indices = ld_i64(book + 8), ld_i64(book + 16), ld_i64(book + 32)
        best, where = splat_f32x16(_HUGE), zero_i32x16()
        for i in range(n // 16):
            near = mask_less(load_f32x16(scores + 64 * i), top)
            while near != 0:
                at = starts + 4 * (16 * i + first_bit(near))
                near &= near - 1
                for j in range(ld_i32(at), ld_i32(at + 4)):
                    a, b = sums(members + 16 * size * j, w, wu, 0, False)
                    cost = vfma(p, a, vmul(q, b))
                    where = where_less(cost, best, splat_i32x16(j), where)
                    best = where_less(cost, best, cost, best)
        lane = lane_of_least(best)
        store_i32x16(scratch, where)
        return ld_i32(indices + 64 * ld_i32(scratch + 4 * lane) + 4 * lane)

    def table_rows(x, targets, n_rows, n, feedback, weights, scales, tables, books, reach, out, errors, scratch):
        far, wu = np.float32(reach) / np.float32(1000), scratch + 64
        for u in range(n // size):
            w = weights + 4 * size * u
            for r in range(n_rows):
                at = 4 * (n * r + size * u)
                sub = n // 32 * r + size * u // 32
                s, book = ld_f32(scales + 4 * sub), books + 64 * ld_u8(tables + sub)
                energy = _F0
                for i in range(size):
                    v = ld_f32(targets + at + 4 * i)
                    if magnitude:
                        v = abs(v)
                    st_f32(wu + 4 * i, v * ld_f32(w + 4 * i))
                    energy += v * v * ld_f32(w + 4 * i)
                row = best_row(book, s, w, wu, energy, far, scratch)
                st_i32(out + 4 * (n // size * r + u), row)
                for i in range(size):
                    level = s * ld_f32(ld_i64(book + 40) + 4 * (size * row + i))
                    if magnitude and ld_f32(targets + at + 4 * i) < _F0:
                        level = -level
                    st_f32(errors + at + 4 * i, level)
                errors_of(x + at, errors + at, targets + 4 * n * r, feedback + 4 * n * size * u, n, size)

    return table_rows, 13, False
