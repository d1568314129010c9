# mypy: ignore-errors
"""Search the grid quants, second half: scales of super-blocks (or rows) and sub-blocks, a grid point per group.

The search uses the lists of lines from `iquants_kernels`. For a given super-block scale d the sub-block scales take 16
values at most, d times the multipliers in the lanes of one vector. The best points at all of them come from the lists,
so the error of any d is known exactly. d is searched on a coarse and on a fine geometric grid and then refined by least
squares; every candidate is rounded to the half float that will be stored before it is judged.
"""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.half import ld_f16, st_f16
from ikcli.native.simd.vec import (
    bcast_f32x16,
    ld_f32,
    ld_f64,
    ld_i32,
    ld_i64,
    load_f32x16,
    reduce_max,
    splat_f32x16,
    st_f32,
    st_f64,
    st_i8,
    st_i32,
    store_f32x16,
    vadd,
    vfma,
    vmul,
    vsub,
    zero_f32x16,
)
from ikcli.quant.encoders.iquants_kernels import _A, _B, _POINT, LIST_BYTES
from ikcli.quant.encoders.iquants_simd import lesser

# How the lists of a sub-block combine: one per group; pairs of groups of which one has a sign flipped (second list),
# unless that list is empty; a second list per group, chosen for the whole sub-block; chosen for each group.
SINGLE, PAIR, PER_BLOCK, PER_GROUP = 0, 1, 2, 3

_F0, _HUGE = np.float32(0.0), np.float32(3e38)
_F16_MAX = np.float32(65504.0)
_MATTERS = 1e-3  # of the mean gain of a sub-block


@inline
def _lowest(lines, t):
    """Return the lowest line of a list at 16 scales."""
    best = vfma(bcast_f32x16(lines + _B), t, bcast_f32x16(lines + _A))
    for j in range(1, ld_i32(lines)):
        best = lesser(vfma(bcast_f32x16(lines + _B + 4 * j), t, bcast_f32x16(lines + _A + 4 * j)), best)
    return best


@inline
def _sub_block(lists, n_groups, t, mode):
    """Return the error of a sub-block at 16 scales, less its energy."""
    first, second = zero_f32x16(), zero_f32x16()
    if mode == SINGLE:
        for g in range(n_groups):
            first = vadd(first, _lowest(lists + g * LIST_BYTES, t))
    elif mode == PAIR:
        for g in range(0, n_groups, 2):
            one, two = lists + 2 * g * LIST_BYTES, lists + (2 * g + 2) * LIST_BYTES
            m1, m2 = _lowest(one, t), _lowest(two, t)
            if ld_i32(one + LIST_BYTES) == 0:
                first = vadd(first, vadd(m1, m2))
            else:
                f1, f2 = _lowest(one + LIST_BYTES, t), _lowest(two + LIST_BYTES, t)
                first = vadd(first, lesser(vadd(m1, f2), vadd(f1, m2)))
    elif mode == PER_BLOCK:
        for g in range(n_groups):
            first = vadd(first, _lowest(lists + 2 * g * LIST_BYTES, t))
            second = vadd(second, _lowest(lists + (2 * g + 1) * LIST_BYTES, t))
        first = lesser(first, second)
    else:
        for g in range(n_groups):
            one = lists + 2 * g * LIST_BYTES
            first = vadd(first, lesser(_lowest(one, t), _lowest(one + LIST_BYTES, t)))
    return vmul(first, t)


@inline
def _reduce_min(v):
    return -reduce_max(vsub(zero_f32x16(), v))


@inline
def _total(lists, n_subs, n_groups, sub_bytes, mult, d, mode):
    """Return the error of all sub-blocks with the scale d and the best sub-block scales, less the energy."""
    t = vmul(splat_f32x16(d), load_f32x16(mult))
    total = 0.0
    for s in range(n_subs):
        total += np.float64(_reduce_min(_sub_block(lists + s * sub_bytes, n_groups, t, mode)))
    return total


@inline
def _lane_of_least(v, n, scratch):
    store_f32x16(scratch, v)
    best = 0
    for k in range(1, n):
        if ld_f32(scratch + 4 * k) < ld_f32(scratch + 4 * best):
            best = k
    return best


@inline
def _pick(lines, t):
    """Return the number of the lowest line at t."""
    best, low = 0, _HUGE
    for j in range(ld_i32(lines)):
        value = ld_f32(lines + _B + 4 * j) * t + ld_f32(lines + _A + 4 * j)
        if value < low:
            best, low = j, value
    return best


@inline
def _value(lines, t):
    j = _pick(lines, t)
    return ld_f32(lines + _B + 4 * j) * t + ld_f32(lines + _A + 4 * j)


@inline
def _take(lines, t, m, flag, out, sums):
    """Store the best point of a list, and add its share of the least-squares sums for d (m: sub-block multiplier)."""
    j = _pick(lines, t)
    st_i32(out, ld_i32(lines + _POINT + 4 * j) + 65536 * flag)
    a, b = np.float64(ld_f32(lines + _A + 4 * j)), np.float64(ld_f32(lines + _B + 4 * j))
    m64 = np.float64(m)
    st_f64(sums, ld_f64(sums) + m64 * a)
    st_f64(sums + 8, ld_f64(sums + 8) + m64 * m64 * b)


@inline
def _assign_groups(lists, n_groups, t, m, mode, out, sums):
    if mode == SINGLE:
        for g in range(n_groups):
            _take(lists + g * LIST_BYTES, t, m, 0, out + 4 * g, sums)
    elif mode == PAIR:
        for g in range(0, n_groups, 2):
            one, two = lists + 2 * g * LIST_BYTES, lists + (2 * g + 2) * LIST_BYTES
            f1, f2 = 0, 0
            if ld_i32(one + LIST_BYTES) > 0:
                flip_two = _value(one, t) + _value(two + LIST_BYTES, t)
                flip_one = _value(one + LIST_BYTES, t) + _value(two, t)
                f1 = 1 if flip_one < flip_two else 0
                f2 = 1 - f1
            _take(one + f1 * LIST_BYTES, t, m, f1, out + 4 * g, sums)
            _take(two + f2 * LIST_BYTES, t, m, f2, out + 4 * g + 4, sums)
    else:
        second, sum1, sum2 = 0, _F0, _F0
        if mode == PER_BLOCK:
            for g in range(n_groups):
                sum1 += _value(lists + 2 * g * LIST_BYTES, t)
                sum2 += _value(lists + (2 * g + 1) * LIST_BYTES, t)
            second = 1 if sum2 < sum1 else 0
        for g in range(n_groups):
            one = lists + 2 * g * LIST_BYTES
            if mode == PER_GROUP:
                second = 1 if _value(one + LIST_BYTES, t) < _value(one, t) else 0
            _take(one + second * LIST_BYTES, t, m, second, out + 4 * g, sums)


@inline
def _assign(lists, n_subs, n_groups, sub_bytes, mult, n_mult, d, mode, scales, points, scratch):
    """Write sub-block scales and points for d; return the least-squares d (0 without one)."""
    t = vmul(splat_f32x16(d), load_f32x16(mult))
    sums = scratch + 64
    st_f64(sums, 0.0)
    st_f64(sums + 8, 0.0)
    for s in range(n_subs):
        at = lists + s * sub_bytes
        k = _lane_of_least(_sub_block(at, n_groups, t, mode), n_mult, scratch)
        st_i8(scales + s, k)
        m = ld_f32(mult + 4 * k)
        _assign_groups(at, n_groups, d * m, m, mode, points + 4 * n_groups * s, sums)
    a, b = ld_f64(sums), ld_f64(sums + 8)
    return np.float32(-0.5 * a / b) if b > 0.0 and a < 0.0 else _F0


@inline
def _largest_scale(lists, n_subs, n_groups, sub_bytes, ratios, base, mode, scratch):
    """Return the largest scale that a sub-block would choose freely, ignoring those that hardly matter."""
    sums, wanted = scratch, scratch + 128
    total = 0.0
    for s in range(n_subs):
        t = vmul(splat_f32x16(ld_f32(base + 4 * s)), load_f32x16(ratios))
        k = _lane_of_least(_sub_block(lists + s * sub_bytes, n_groups, t, mode), 16, sums)
        gain = -ld_f32(sums + 4 * k)
        store_f32x16(sums, t)
        st_f32(wanted + 8 * s, ld_f32(sums + 4 * k))
        st_f32(wanted + 8 * s + 4, gain)
        total += np.float64(gain)
    least = np.float32(_MATTERS * total / np.float64(n_subs))
    largest = _F0
    for s in range(n_subs):
        if ld_f32(wanted + 8 * s + 4) > least and ld_f32(wanted + 8 * s) > largest:
            largest = ld_f32(wanted + 8 * s)
    return largest


@inline
def _storable(d, amax, scratch):
    """Return d (for values divided by amax) after storing d * amax as a half float."""
    true = d * amax
    st_f16(scratch, true if true < _F16_MAX else _F16_MAX)
    return ld_f16(scratch) / amax


def make_search(mode):
    """Return kernel(params) that searches all scales.

    params: 0 lists, 1 their row bytes, 2 rows, 3 sub-blocks, 4 groups per sub-block, 5 multipliers f32[16] (all lanes
    filled), 6 ratios, 7 base scales, 8 their row bytes, 9 divisor of the values f32, 10 its row bytes, 11 d f32, 12 row
    bytes, 13 sub-block scales u8, 14 row bytes, 15 points i32 (flag at bit 16), 16 row bytes, 17 coarse factors f32, 18
    their number, 19 fine factors, 20 their number, 21 scratch (128 bytes and 8 per sub-block), 22 number of
    multipliers.
    """

    def search(params):
        n_subs, n_groups, mult = ld_i64(params + 24), ld_i64(params + 32), ld_i64(params + 40)
        scratch, n_mult = ld_i64(params + 168), ld_i64(params + 176)
        sub_bytes = n_groups * LIST_BYTES * (1 if mode == SINGLE else 2)
        for r in range(ld_i64(params + 16)):
            lists = ld_i64(params) + r * ld_i64(params + 8)
            base = ld_i64(params + 56) + r * ld_i64(params + 64)
            amax = ld_f32(ld_i64(params + 72) + r * ld_i64(params + 80))
            scales = ld_i64(params + 104) + r * ld_i64(params + 112)
            points = ld_i64(params + 120) + r * ld_i64(params + 128)
            best_d, low = _F0, 0.0
            if amax > _F0:
                largest = _largest_scale(lists, n_subs, n_groups, sub_bytes, ld_i64(params + 48), base, mode, scratch)
                start = largest / ld_f32(mult + 4 * n_mult - 4)
                factors, n_factors = ld_i64(params + 136), ld_i64(params + 144)
                for _stage in range(2):
                    for i in range(n_factors):
                        d = _storable(start * ld_f32(factors + 4 * i), amax, scratch)
                        e = _total(lists, n_subs, n_groups, sub_bytes, mult, d, mode)
                        if e < low:
                            best_d, low = d, e
                    start, factors, n_factors = best_d, ld_i64(params + 152), ld_i64(params + 160)
                for _step in range(4):
                    d = _assign(lists, n_subs, n_groups, sub_bytes, mult, n_mult, best_d, mode, scales, points, scratch)
                    d = _storable(d, amax, scratch)
                    e = _total(lists, n_subs, n_groups, sub_bytes, mult, d, mode)
                    if d == best_d or not e < low:
                        break
                    best_d, low = d, e
            _assign(lists, n_subs, n_groups, sub_bytes, mult, n_mult, best_d, mode, scales, points, scratch)
            st_f32(ld_i64(params + 88) + r * ld_i64(params + 96), best_d * amax)

    return search, 1, False
