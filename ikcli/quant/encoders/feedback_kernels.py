"""Choose codes column by column and let later columns make up for each error (see `ikcli.quant.feedback`).

A row has targets t, changed in place. For each code the kernel takes the value nearest to t and adds its error,
e = x - value, times a row of the feedback matrix to the targets of later columns. A row of that matrix is 0 up to its
own column.
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bcast_f32x16,
    ld_f32,
    ld_i32,
    load_f32x16,
    reduce_max,
    splat_f32x16,
    st_f32,
    st_i32,
    store_f32x16,
    vfma,
    vmul,
    vsub,
)
from ikcli.quant.encoders.iquants_simd import first_equal, lesser

_F0, _HUGE = np.float32(0.0), np.float32(3e38)


@inline
def pass_on(targets, feedback, first, n, e):
    """Add e * feedback to the targets, from column `first` on (rounded down to 16)."""
    factor = splat_f32x16(e)
    for k in range(4 * (first & -16), 4 * n, 64):
        store_f32x16(targets + k, vfma(factor, load_f32x16(feedback + k), load_f32x16(targets + k)))


@inline
def nearest(values, n_codes, size, targets, weights, scratch):
    """Return the code with the least weighted squared distance to the targets.

    There are `size` tables of n_codes values.
    """
    best = splat_f32x16(_HUGE)
    for c in range(0, 4 * n_codes, 64):
        d = vsub(load_f32x16(values + c), bcast_f32x16(targets))
        cost = vmul(vmul(d, d), bcast_f32x16(weights))
        if size == 2:
            d = vsub(load_f32x16(values + 4 * n_codes + c), bcast_f32x16(targets + 4))
            cost = vfma(vmul(d, d), bcast_f32x16(weights + 4), cost)
        store_f32x16(scratch + c, cost)
        best = lesser(cost, best)
    least = splat_f32x16(-reduce_max(vsub(splat_f32x16(_F0), best)))
    for c in range(0, n_codes, 16):
        at = first_equal(load_f32x16(scratch + 4 * c), least)
        if at < 16:
            return c + at
    return 0


def make_tables(size):
    """Return a kernel for codes of `size` columns each, whose values are tabled for every 16 columns.

    Arguments: x, targets (rows, n) f32, rows, n, feedback (n, n), weights of columns (n,), tables (rows, n / 16, size,
    n_codes) f32, n_codes (a multiple of 16, padded with large numbers), codes out (rows, n / size) i32, errors out
    (rows, n) f32, scratch of 4 * n_codes bytes.
    """

    def tables(x, targets, n_rows, n, feedback, weights, values, n_codes, codes, errors, scratch):
        for _ in range(n_rows):
            for j in range(0, n, size):
                at = values + 4 * size * n_codes * (j >> 4)
                code = nearest(at, n_codes, size, targets + 4 * j, weights + 4 * j, scratch)
                st_i32(codes + 4 * (j // size), code)
                for i in range(size):
                    e = ld_f32(x + 4 * (j + i)) - ld_f32(at + 4 * (n_codes * i + code))
                    st_f32(errors + 4 * (j + i), e)
                    pass_on(targets, feedback + 4 * n * (j + i), j + size, n, e)
            x += 4 * n
            targets += 4 * n
            errors += 4 * n
            codes += 4 * (n // size)
            values += 4 * size * n_codes * (n >> 4)

    return tables, 11, False


def make_parity():
    """Return a kernel for 4-bit codes of which four columns together have an even number of bits set.

    Arguments as those of `make_tables`, for tables of 16 codes and one column. Of four nearest codes with an odd number
    of bits, the kernel changes the one for which a code of other parity costs least.
    """
    odd_codes = 0b0110100110010110  # bit c: c has an odd number of bits

    def parity(x, targets, n_rows, n, feedback, weights, values, n_codes, codes, errors, scratch):
        for _ in range(n_rows):
            for j in range(0, n, 4):
                at = values + 64 * (j >> 4)
                odd, least, where, instead = 0, _HUGE, 0, 0
                for i in range(j, j + 4):
                    t = ld_f32(targets + 4 * i)
                    even_cost, odd_cost, even_code, odd_code = _HUGE, _HUGE, 0, 1
                    for c in range(16):
                        d = ld_f32(at + 4 * c) - t
                        cost = d * d
                        if odd_codes >> c & 1:
                            if cost < odd_cost:
                                odd_cost, odd_code = cost, c
                        elif cost < even_cost:
                            even_cost, even_code = cost, c
                    more = abs(odd_cost - even_cost) * ld_f32(weights + 4 * i)
                    if odd_cost < even_cost:
                        odd ^= 1
                        st_i32(codes + 4 * i, odd_code)
                        other = even_code
                    else:
                        st_i32(codes + 4 * i, even_code)
                        other = odd_code
                    if more < least:
                        least, where, instead = more, i, other
                if odd == 1:
                    st_i32(codes + 4 * where, instead)
                for i in range(j, j + 4):
                    e = ld_f32(x + 4 * i) - ld_f32(at + 4 * ld_i32(codes + 4 * i))
                    st_f32(errors + 4 * i, e)
                    pass_on(targets, feedback + 4 * n * i, j + 4, n, e)
            x += 4 * n
            targets += 4 * n
            errors += 4 * n
            codes += 4 * n
            values += 4 * n_codes * (n >> 4)

    return parity, 11, False
