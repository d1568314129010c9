"""Choose grid points group by group and pass errors on to later columns (see `ikcli.quant.feedback`).

A group is searched in all rows before the next group, so that the data of its columns stay in the cache.
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i32,
    load_f32x16,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    st_i8,
    st_i32,
    store_f32x16,
    store_i32x16,
    vfma,
    zero_i32x16,
)
from ikcli.quant.encoders.feedback_kernels import pass_on
from ikcli.quant.encoders.iquants_kernels import EVEN, build_a4, build_a8, build_b, flip_cheapest, products
from ikcli.quant.encoders.iquants_simd import lesser
from ikcli.quant.encoders.lane_kernels import where_less

_F0, _HUGE, _M2 = np.float32(0.0), np.float32(3e38), np.float32(-2.0)
_SHIFT = np.float32(0.125)
_FLAG = 65536  # of a ternary point: its shift is negative


@inline
def lowest(a, b, n, s, scratch):
    """Return the point with the least s * B + A; its value goes to `scratch`."""
    best, where, t = splat_f32x16(_HUGE), zero_i32x16(), splat_f32x16(s)
    for v in range(0, 4 * n, 64):
        cost = vfma(load_f32x16(b + v), t, load_f32x16(a + v))
        where = where_less(cost, best, splat_i32x16(v // 4), where)
        best = lesser(cost, best)
    store_f32x16(scratch, best)
    store_i32x16(scratch + 64, where)
    least, lane = ld_f32(scratch), 0
    for i in range(1, 16):
        if ld_f32(scratch + 4 * i) < least:
            least, lane = ld_f32(scratch + 4 * i), i
    st_f32(scratch, least)
    return ld_i32(scratch + 64 + 4 * lane) + lane


@inline
def shifted_products(x, w, s, p):
    """Store p = -2 w (x - s) of 8 values; return the sum of w (x - s)^2."""
    energy = _F0
    for i in range(8):
        v, wv = ld_f32(x + 4 * i) - s, ld_f32(w + 4 * i)
        st_f32(p + 4 * i, _M2 * wv * v)
        energy += wv * v * v
    return energy


@inline
def errors_of(x, errors, targets, feedback, n, size):
    """Compute errors from the stored values, and pass them on."""
    for i in range(size):
        e = ld_f32(x + 4 * i) - ld_f32(errors + 4 * i)
        st_f32(errors + 4 * i, e)
        pass_on(targets, feedback + 4 * n * i, 0, n, e)


def make_grid(dims, n_points, kind):
    """Return a kernel that finds points and signs of groups of 8 columns under given scales.

    With 4 dims and free signs a group has 4 columns.

    Arguments: x, targets (rows, n) f32, rows, n, feedback (n, n), weights (n,), scales (rows, n / 8) f32, grid (dims,
    n_points) f32, points out (rows, n / dims) i32, sign bytes out (rows, n / 8), errors out (rows, n), scratch of
    512 + 16 * n_points bytes.
    """
    halves = 8 // dims

    def grid_points(x, targets, n_rows, n, feedback, weights, scales, grid, points, signs, errors, scratch):
        p, a = scratch + 256, scratch + 512
        flipped, b = a + 4 * n_points, a + 8 * n_points
        for u in range(n // 8):
            w = weights + 32 * u
            for h in range(halves):
                build_b(grid, n_points, dims, w + 4 * dims * h, b + 4 * n_points * h, _F0)
            for r in range(n_rows):
                at = 4 * (n * r + 8 * u)
                s = ld_f32(scales + 4 * (n // 8 * r + u))
                t = targets + at
                bits, flip_half, flip_cost, flip_point = 0, -1, _HUGE, 0
                odd = products(t, w, p, False)
                for h in range(halves):
                    if h > 0 and kind != EVEN:  # the first half has changed the targets of the second
                        products(t, w, p, False)
                    if dims == 8:
                        build_a8(grid, n_points, p, a)
                    else:
                        build_a4(grid, n_points, p + 16 * h, a)
                    point = lowest(a, b + 4 * n_points * h, n_points, s, scratch)
                    cost = ld_f32(scratch)
                    if kind == EVEN and odd == 1:
                        flip_cheapest(grid, n_points, dims, p + 16 * h, a, flipped)
                        other = lowest(flipped, b + 4 * n_points * h, n_points, s, scratch)
                        if ld_f32(scratch) - cost < flip_cost:
                            flip_cost, flip_half, flip_point = ld_f32(scratch) - cost, h, other
                    st_i32(points + 4 * (n // dims * r + halves * u + h), point)
                    if kind != EVEN:
                        for i in range(dims * h, dims * (h + 1)):
                            level = s * ld_f32(grid + 4 * (n_points * (i - dims * h) + point))
                            if ld_f32(t + 4 * i) < _F0:
                                level = -level
                                bits |= 1 << i
                            st_f32(errors + at + 4 * i, level)
                        first = 4 * dims * h
                        errors_of(
                            x + at + first, errors + at + first, targets + 4 * n * r,
                            feedback + 4 * n * (8 * u + dims * h), n, dims,
                        )  # fmt: skip
                if kind == EVEN:
                    if flip_half >= 0:
                        st_i32(points + 4 * (n // dims * r + halves * u + flip_half), flip_point)
                    least, cheapest = _HUGE, -1
                    for i in range(8):
                        point = ld_i32(points + 4 * (n // dims * r + halves * u + i // dims))
                        level = ld_f32(grid + 4 * (n_points * (i % dims) + point))
                        cost = -ld_f32(p + 4 * i) * level
                        if flip_half == i // dims and cost < least:
                            least, cheapest = cost, i
                        if ld_f32(t + 4 * i) < _F0:
                            level = -level
                            bits |= 1 << i
                        st_f32(errors + at + 4 * i, s * level)
                    if cheapest >= 0:
                        bits ^= 1 << cheapest
                        st_f32(errors + at + 4 * cheapest, -ld_f32(errors + at + 4 * cheapest))
                    errors_of(x + at, errors + at, targets + 4 * n * r, feedback + 32 * n * u, n, 8)
                st_i8(signs + n // 8 * r + u, bits)

    return grid_points, 12, False


def make_ternary(n_points, free_shift):
    """Return a kernel for points of groups of 8 whose levels are shifted by +-1/8.

    The flags of `points` choose the shift, or the smaller error does. Arguments as those of `make_grid`; sign bytes are
    not used.
    """

    def ternary_points(x, targets, n_rows, n, feedback, weights, scales, grid, points, signs, errors, scratch):
        p, a = scratch + 256, scratch + 512
        b = a + 8 * n_points
        for u in range(n // 8):
            w = weights + 32 * u
            build_b(grid, n_points, 8, w, b, _F0)
            for r in range(n_rows):
                at, out = 4 * (n * r + 8 * u), points + 4 * (n // 8 * r + u)
                s = ld_f32(scales + 4 * (n // 8 * r + u))
                flag = ld_i32(out) & _FLAG
                least, best = _HUGE, flag
                for trial in range(2):
                    if free_shift or (flag != 0) == (trial == 1):
                        shift = s * (_SHIFT if trial == 0 else -_SHIFT)
                        energy = shifted_products(targets + at, w, shift, p)
                        build_a8(grid, n_points, p, a)
                        point = lowest(a, b, n_points, s, scratch)
                        cost = energy + s * ld_f32(scratch)
                        if cost < least:
                            least, best = cost, point + _FLAG * trial
                st_i32(out, best)
                shift = -_SHIFT if best >= _FLAG else _SHIFT
                for i in range(8):
                    level = ld_f32(grid + 4 * (n_points * i + (best & 65535))) + shift
                    st_f32(errors + at + 4 * i, s * level)
                errors_of(x + at, errors + at, targets + 4 * n * r, feedback + 32 * n * u, n, 8)

    return ternary_points, 12, False
