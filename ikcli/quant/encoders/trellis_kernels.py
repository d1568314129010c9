"""Search the trellis types: row scale, multipliers of sub-blocks of 32, and the table row of every group.

The error of a table row v at scale s is sum(w x^2) + s^2 sum(w v^2) - 2 s sum(w x v): both sums are computed once per
row and serve four scales. Only clusters are visited whose centre is at most `reach` farther away than the nearest one
(in units of the table). A row of weights is scaled to a largest magnitude of 1. Steps: trial scales of both signs for
each sub-block; the row scale by a quadratic model of those errors; per sub-block the four multipliers nearest to each
trial optimum; the row scale by least squares; again around the multipliers found, keeping what was better.
Buffers of a sub-block: 4 totals f32, then 4 index lists i32[8].
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bcast_f32x16,
    cvt_i32x16_f32,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32x16,
    load_i8x16,
    sext_i8x16_i32,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    st_i8,
    st_i32,
    store_f32x16,
    store_i32x16,
    vadd,
    vdiv,
    vfma,
    vmax,
    vmin,
    vmul,
    vround_even,
    vsub,
    zero_f32x16,
)
from ikcli.quant.encoders.lane_kernels import mask_less, where_less
from ikcli.quant.encoders.trellis_simd import first_bit, lane_of_least, reduce_least

SUB = 32  # weights under one multiplier
_HUGE, _F0, _F1 = np.float32(3e38), np.float32(0.0), np.float32(1.0)
_NOTHING = np.float32(1e-30)  # sub-blocks with a smaller sum of squares (largest weight of the row: 1) count as zero
_DEVIATION = np.float32(36.94)  # of the generator's values
_HIGHEST = np.float32(105.0)  # sub-blocks whose largest weight is above this at the usual scales get larger trials too
_FLAT, _STIFF = np.float32(0.25), np.float32(1.0)  # bounds of modelled curvatures of errors, relative to the gain
_MAX_CALLS = 12
_LARGE, _F32_MAX = np.float32(1e36), 3.402e38  # rows above the first must be kept from overflow
_TRIALS = 32  # trial row scales of each sign


def make_sums(size, weighted):
    """Return a device function: sums over 16 table rows of `size` values."""

    @inline
    def sums(at, w, wx, norms, floats):
        """Return sum(w v^2) and sum(w x v) of 16 table rows, float32 or half floats."""
        a, b = zero_f32x16(), zero_f32x16()
        for k in range(size):
            v = load_f32x16(at + 64 * k) if floats else cvt_i32x16_f32(sext_i8x16_i32(load_i8x16(at + 16 * k)))
            b = vfma(v, bcast_f32x16(wx + 4 * k), b)
            if weighted:
                a = vfma(vmul(v, v), bcast_f32x16(w + 4 * k), a)
        if not weighted:
            a = load_f32x16(norms)
        return a, b

    return sums


def make_limit(size):
    """Return a device function: the largest score of a cluster centre that is worth a visit."""

    @inline
    def limit(energy, w, s, least, reach):
        """Return the bound below which the scores of clusters to visit lie."""
        weight = _F0
        for k in range(size):
            weight += ld_f32(w + 4 * k)
        far = np.sqrt(max(_F0, least + energy)) + reach * abs(s) * np.sqrt(weight / np.float32(size))
        return max(far * far - energy, least + np.float32(1e-5) * abs(least) + _NOTHING)  # never below the nearest

    return limit


def make_search(size, weighted, linear, both_signs):
    """Return the encoder of rows; its only argument points to int64 slots (see `trellis.py`)."""
    n_groups = SUB // size
    sums, limit = make_sums(size, weighted), make_limit(size)

    @inline
    def center_sums(books, n_books, only, w, wx, out):
        """Compute both sums of all centres, for all groups of a sub-block: they serve every scale."""
        for book in range(n_books):
            slots = books + 64 * book
            centers, norms, n = ld_i64(slots), ld_i64(slots + 56), ld_i64(slots + 48)
            at = out + 8 * n * n_groups * book
            if only < 0 or only == book:
                for g in range(n_groups):
                    for i in range(n // 16):
                        here = 4 * size * g
                        a, b = sums(centers + 64 * size * i, w + here, wx + here, norms + 64 * i, True)
                        store_f32x16(at + 64 * i, a)
                        store_f32x16(at + 4 * n + 64 * i, b)
                    at += 8 * n

    @inline
    def rate_centers(centers, n, s, out):
        """Compute the scores of all cluster centres at scale s; return the least."""
        p, q, least = splat_f32x16(s * s), splat_f32x16(np.float32(-2.0) * s), splat_f32x16(_HUGE)
        for i in range(n // 16):
            score = vfma(p, load_f32x16(centers + 64 * i), vmul(q, load_f32x16(centers + 4 * n + 64 * i)))
            store_f32x16(out + 64 * i, score)
            least = where_less(score, least, score, least)
        return reduce_least(least)

    @inline
    def settle(best, vectors, indices, scratch, out, k, g):
        """Add the least score to total k and write its table row as that of group g."""
        lane = lane_of_least(best)
        store_f32x16(scratch, best)
        store_i32x16(scratch + 64, vectors)
        st_f32(out + 4 * k, ld_f32(out + 4 * k) + ld_f32(scratch + 4 * lane))
        row = ld_i32(indices + 64 * ld_i32(scratch + 64 + 4 * lane) + 4 * lane)
        st_i32(out + 16 + 32 * k + 4 * g, row)

    @inline
    def match(book, centers, w, wx, energy, s, scales, reach, scratch, out, g):
        """Find the best rows of a group for the four `scales`, visiting clusters that are near at scale s."""
        least = rate_centers(centers, ld_i64(book + 48), s, scratch)
        top = splat_f32x16(limit(energy, w, s, least, reach))
        s0, s1, s2, s3 = ld_f32(scales), ld_f32(scales + 4), ld_f32(scales + 8), ld_f32(scales + 12)
        p0, p1, p2, p3 = splat_f32x16(s0 * s0), splat_f32x16(s1 * s1), splat_f32x16(s2 * s2), splat_f32x16(s3 * s3)
        m2 = np.float32(-2.0)
        q0, q1, q2, q3 = splat_f32x16(m2 * s0), splat_f32x16(m2 * s1), splat_f32x16(m2 * s2), splat_f32x16(m2 * s3)
        b0, b1, b2, b3 = splat_f32x16(_HUGE), splat_f32x16(_HUGE), splat_f32x16(_HUGE), splat_f32x16(_HUGE)
        i0, i1, i2, i3 = splat_i32x16(0), splat_i32x16(0), splat_i32x16(0), splat_i32x16(0)
        starts, members, norms = ld_i64(book + 8), ld_i64(book + 16), ld_i64(book + 24)
        for i in range(ld_i64(book + 48) // 16):
            near = mask_less(load_f32x16(scratch + 64 * i), top)
            while near != 0:
                at = starts + 4 * (16 * i + first_bit(near))
                near &= near - 1
                for j in range(ld_i32(at), ld_i32(at + 4)):
                    a, b = sums(members + 16 * size * j, w, wx, norms + 64 * j, False)
                    here = splat_i32x16(j)
                    e = vfma(p0, a, vmul(q0, b))
                    i0, b0 = where_less(e, b0, here, i0), where_less(e, b0, e, b0)
                    e = vfma(p1, a, vmul(q1, b))
                    i1, b1 = where_less(e, b1, here, i1), where_less(e, b1, e, b1)
                    e = vfma(p2, a, vmul(q2, b))
                    i2, b2 = where_less(e, b2, here, i2), where_less(e, b2, e, b2)
                    e = vfma(p3, a, vmul(q3, b))
                    i3, b3 = where_less(e, b3, here, i3), where_less(e, b3, e, b3)
        indices = ld_i64(book + 32)
        settle(b0, i0, indices, scratch, out, 0, g)
        settle(b1, i1, indices, scratch, out, 1, g)
        settle(b2, i2, indices, scratch, out, 2, g)
        settle(b3, i3, indices, scratch, out, 3, g)

    @inline
    def match_sub(book, centers, w, wx, energies, s, scales, reach, scratch, out):
        """Match all groups of a sub-block; totals are relative to the sum of w x^2."""
        for k in range(4):
            st_f32(out + 4 * k, _F0)
        for g in range(n_groups):
            at = 4 * size * g
            here = centers + 8 * ld_i64(book + 48) * g
            match(book, here, w + at, wx + at, ld_f32(energies + 4 * g), s, scales, reach, scratch, out, g)

    @inline
    def curvature(trials, n, s, e, energy):
        """Return the mean of (error - e) / (gain * r^2) over trials at scales s * (1 + r), within bounds."""
        rise, run = _F0, _F0
        for k in range(n):
            r = ld_f32(trials + 8 * k) / s - _F1
            rise += ld_f32(trials + 8 * k + 4) - e
            run += r * r
        return min(_STIFF, max(_FLAT, rise / ((energy - e) * run + _NOTHING)))

    @inline
    def rough(books, n_books, centers, w, wx, amax, energies, model, low, ratio, n_calls, reach, scratch, out):
        """Try scales of a sub-block: model = energy, then best s, its error and the curvature, + and -."""
        energy, weight = _F0, _F0
        for g in range(n_groups):
            energy += ld_f32(energies + 4 * g)
        for k in range(SUB):
            weight += ld_f32(w + 4 * k)
        scales, trials = out + 160, out + 192
        center_sums(books, n_books, -1, w, wx, centers)
        st_f32(model, energy)
        for sign in range(2):
            st_f32(model + 4 + 12 * sign, _F0)
            st_f32(model + 8 + 12 * sign, _HUGE)
            st_f32(model + 12 + 12 * sign, _F1)
        s, step, n = np.sqrt(energy / weight) / _DEVIATION * low, ratio * ratio * ratio * ratio, 0
        for call in range(_MAX_CALLS):
            if call >= n_calls and (s * _HIGHEST > amax or energy < _NOTHING):
                break
            for sign in range(2 if both_signs else 1):
                one = _F1 if sign == 0 else -_F1
                x, best = s * one, model + 4 + 12 * sign
                for k in range(4):
                    st_f32(scales + 4 * k, x)
                    st_f32(trials + 8 * (4 * _MAX_CALLS * sign + n + k), x)
                    st_f32(trials + 8 * (4 * _MAX_CALLS * sign + n + k) + 4, _HUGE)
                    x *= ratio
                middle = one * s * ratio * np.sqrt(ratio)
                for book in range(n_books):
                    match_sub(
                        books + 64 * book,
                        centers + 8 * ld_i64(books + 48) * n_groups * book,
                        w,
                        wx,
                        energies,
                        middle,
                        scales,
                        reach,
                        scratch,
                        out,
                    )
                    for k in range(4):
                        e, at = ld_f32(out + 4 * k) + energy, trials + 8 * (4 * _MAX_CALLS * sign + n + k) + 4
                        st_f32(at, min(e, ld_f32(at)))
                        if e < ld_f32(best + 4):
                            st_f32(best, ld_f32(scales + 4 * k))
                            st_f32(best + 4, e)
            s *= step
            n += 4
        if energy > _NOTHING:
            for sign in range(2 if both_signs else 1):
                best = model + 4 + 12 * sign
                at = trials + 32 * _MAX_CALLS * sign
                st_f32(best + 8, curvature(at, n, ld_f32(best), ld_f32(best + 4), energy))

    @inline
    def misfit(d, s, table, n_mults):
        """Return the least squared relative distance of s from a multiple of d, 16 values of d at once."""
        inverse = splat_f32x16(_F1 / s)
        if linear:
            lo, hi = bcast_f32x16(table), bcast_f32x16(table + 4 * (n_mults - 1))
            m = vmax(lo, vmin(hi, vround_even(vdiv(splat_f32x16(s), d))))
            r = vsub(vmul(vmul(m, d), inverse), splat_f32x16(_F1))
            return vmul(r, r)
        least = splat_f32x16(_HUGE)
        for j in range(n_mults):
            r = vsub(vmul(vmul(bcast_f32x16(table + 4 * j), d), inverse), splat_f32x16(_F1))
            least = vmin(least, vmul(r, r))
        return least

    @inline
    def choose_scale(models, n_subs, table, n_mults, lowest, highest, scratch):
        """Return the row scale of least modelled error.

        Trials go from `lowest` to `highest` times the least without clipping.
        """
        largest, top = _F0, _F0
        for b in range(n_subs):
            largest = max(largest, max(abs(ld_f32(models + 28 * b + 4)), abs(ld_f32(models + 28 * b + 16))))
        for j in range(n_mults):
            top = max(top, abs(ld_f32(table + 4 * j)))
        base, ratio = largest / top, (highest / lowest) ** (_F1 / np.float32(_TRIALS - 1))
        d = base * lowest
        for i in range(_TRIALS):
            st_f32(scratch + 4 * i, d)
            st_f32(scratch + 4 * (_TRIALS + i), -d if both_signs else d)
            d *= np.float32(ratio)
        best, found = _HUGE, base
        for i in range(2 * _TRIALS // 16):
            d16, total = load_f32x16(scratch + 64 * i), zero_f32x16()
            for b in range(n_subs):
                energy = ld_f32(models + 28 * b)
                if energy > _NOTHING:
                    cost = splat_f32x16(_HUGE)
                    for sign in range(2 if both_signs else 1):
                        at = models + 28 * b + 4 + 12 * sign
                        s, e = ld_f32(at), ld_f32(at + 4)
                        gain = splat_f32x16(ld_f32(at + 8) * (energy - e))
                        cost = vmin(cost, vfma(misfit(d16, s, table, n_mults), gain, splat_f32x16(e)))
                    total = vadd(total, cost)
            lane = lane_of_least(total)
            store_f32x16(scratch + 512, total)
            if ld_f32(scratch + 512 + 4 * lane) < best:
                best, found = ld_f32(scratch + 512 + 4 * lane), ld_f32(scratch + 64 * i + 4 * lane)
        return found

    @inline
    def nearest(table, n_mults, y):
        """Return the multiplier nearest to y, as an index."""
        found, least = 0, _HUGE
        for j in range(n_mults):
            distance = abs(ld_f32(table + 4 * j) - y)
            if distance < least:
                found, least = j, distance
        return found

    @inline
    def sub_sums(rows, idx, w, wx):
        """Return sum(w v^2) and sum(w x v) of the table rows `idx` of a sub-block."""
        a, b = np.float64(0.0), np.float64(0.0)
        for g in range(n_groups):
            row = rows + 4 * size * ld_i32(idx + 4 * g)
            for k in range(size):
                v = np.float64(ld_f32(row + 4 * k))
                a += v * v * ld_f32(w + 4 * (size * g + k))
                b += v * ld_f32(wx + 4 * (size * g + k))
        return a, b

    @inline
    def around(books, n_books, only, centers, w, wx, energies, d, table, n_mults, y, first, reach, scratch, out, found):
        """Try four multipliers from index `first` with all tables or one, visiting clusters that are near at index y.

        found: least error (relative), multiplier, table, i32[8] rows.
        """
        first = max(0, min(n_mults - 4, first))
        y = max(first + 1, min(first + 2, y))
        scales = out + 160
        for k in range(4):
            st_f32(scales + 4 * k, d * ld_f32(table + 4 * (first + k)))
        s = d * ld_f32(table + 4 * y)
        if s == _F0:
            s = d * ld_f32(table + 4 * (y + 1))
        for book in range(n_books):
            if only < 0 or only == book:
                match_sub(
                    books + 64 * book,
                    centers + 8 * ld_i64(books + 48) * n_groups * book,
                    w,
                    wx,
                    energies,
                    s,
                    scales,
                    reach,
                    scratch,
                    out,
                )
                for k in range(4):
                    if ld_f32(out + 4 * k) < ld_f32(found):
                        st_f32(found, ld_f32(out + 4 * k))
                        st_i32(found + 4, first + k)
                        st_i32(found + 8, book)
                        for g in range(n_groups):
                            st_i32(found + 12 + 4 * g, ld_i32(out + 16 + 32 * k + 4 * g))

    @inline
    def least_squares(books, table, found, n_subs, w, wx, d):
        """Return the row scale for the rows and multipliers found; d if their squares sum to 0."""
        aa, bb = np.float64(0.0), np.float64(0.0)
        for b in range(n_subs):
            at = found + 48 * b
            m = np.float64(ld_f32(table + 4 * ld_i32(at + 4)))
            a, c = sub_sums(ld_i64(books + 64 * ld_i32(at + 8) + 40), at + 12, w + 128 * b, wx + 128 * b)
            aa += a * m * m
            bb += c * m
        return np.float32(bb / aa) if aa > 0.0 else d

    @inline
    def peak(books, table, found, n_subs):
        """Return the largest multiplier times table value of a row."""
        most = _F0
        for b in range(n_subs):
            at = found + 48 * b
            m, rows = abs(ld_f32(table + 4 * ld_i32(at + 4))), ld_i64(books + 64 * ld_i32(at + 8) + 40)
            for g in range(n_groups):
                row = rows + 4 * size * ld_i32(at + 12 + 4 * g)
                for k in range(size):
                    most = max(most, m * abs(ld_f32(row + 4 * k)))
        return most

    @inline
    def prepare(x, weights, ne0, inverse, xs, w, wx, energies):
        """Store scaled magnitudes or values, weights, their products, energies of groups."""
        for i in range(ne0):
            v = np.float32(np.float64(ld_f32(x + 4 * i)) * inverse)
            if not both_signs:
                v = abs(v)
            u = ld_f32(weights + 4 * i) if weighted else _F1
            st_f32(xs + 4 * i, v)
            st_f32(w + 4 * i, u)
            st_f32(wx + 4 * i, u * v)
        for g in range(ne0 // size):
            e = _F0
            for k in range(size):
                e += ld_f32(wx + 4 * (size * g + k)) * ld_f32(xs + 4 * (size * g + k))
            st_f32(energies + 4 * g, e)

    @inline
    def largest_of(x, n):
        """Return the largest magnitude."""
        most = _F0
        for i in range(n):
            most = max(most, abs(ld_f32(x + 4 * i)))
        return most

    @inline
    def refine(
        books, n_books, centers, w, wx, energies, model, d, table, n_mults, turn, n_windows, reach, work, out, at
    ):
        """Find the best multiplier, table and rows of a sub-block at row scale d.

        Later rounds start from those found.
        """
        only, turns, y = -1, n_windows, 0
        if turn > 0:
            only, turns, y = ld_i32(at + 8), 1, ld_i32(at + 4)
        center_sums(books, n_books, only, w, wx, centers)
        st_f32(at, _HUGE)
        if turn > 0:
            a, c = sub_sums(ld_i64(books + 64 * only + 40), at + 12, w, wx)
            dm = np.float64(d * ld_f32(table + 4 * y))
            st_f32(at, np.float32(dm * dm * a - 2.0 * dm * c))
        for sign in range(2 if both_signs and turn == 0 else 1):
            if turn == 0:
                y = nearest(table, n_mults, ld_f32(model + 4 + 12 * sign) / d)
            for i in range(turns):
                first = y + 1 - 2 * turns + 4 * i
                around(
                    books, n_books, only, centers, w, wx, energies, d, table, n_mults, y, first, reach, work, out, at
                )

    @inline
    def write_row(found, n_subs, m_out, book_out, idx_out):
        """Write multipliers, tables and table rows of a row."""
        for b in range(n_subs):
            at = found + 48 * b
            st_i8(m_out + b, ld_i32(at + 4))
            st_i8(book_out + b, ld_i32(at + 8))
            for g in range(n_groups):
                st_i32(idx_out + 4 * (n_groups * b + g), ld_i32(at + 12 + 4 * g))

    def search(slots):
        x, weights, n_rows, ne0 = ld_i64(slots), ld_i64(slots + 8), ld_i64(slots + 16), ld_i64(slots + 24)
        books, n_books, table, n_mults = ld_i64(slots + 32), ld_i64(slots + 40), ld_i64(slots + 48), ld_i64(slots + 56)
        options, xs, out = ld_i64(slots + 64), ld_i64(slots + 72), ld_i64(slots + 80)
        d_out, m_out, book_out, idx_out = (
            ld_i64(slots + 88),
            ld_i64(slots + 96),
            ld_i64(slots + 104),
            ld_i64(slots + 112),
        )
        low, ratio, n_calls = ld_f32(options), ld_f32(options + 4), np.int64(ld_f32(options + 8))
        rough_reach, reach = ld_f32(options + 12), ld_f32(options + 16)
        lowest, highest, n_rounds = ld_f32(options + 20), ld_f32(options + 24), np.int64(ld_f32(options + 28))
        n_windows, n_subs = np.int64(ld_f32(options + 32)), ne0 // SUB
        w, wx, energies, models = xs + 4 * ne0, xs + 8 * ne0, xs + 12 * ne0, xs + 16 * ne0
        found, work = models + 28 * n_subs, out + 1024
        centers = work + 1024 + 4 * ld_i64(books + 48)
        for row in range(n_rows):
            src, start = x + 4 * ne0 * row, row * n_subs
            amax, scaled = largest_of(src, ne0), np.float64(0.0)
            if amax > 0.0:
                prepare(src, weights, ne0, np.float64(1.0) / np.float64(amax), xs, w, wx, energies)
                for b in range(n_subs):
                    rough(books, n_books, centers, w + 128 * b, wx + 128 * b, largest_of(xs + 128 * b, SUB),
                          energies + 4 * n_groups * b, models + 28 * b, low, ratio, n_calls, rough_reach,
                          work, out)  # fmt: skip
                d = choose_scale(models, n_subs, table, n_mults, lowest, highest, work)
                for turn in range(n_rounds):
                    for b in range(n_subs):
                        refine(books, n_books, centers, w + 128 * b, wx + 128 * b, energies + 4 * n_groups * b,
                               models + 28 * b, d, table, n_mults, turn, n_windows, reach,
                               work, out, found + 48 * b)  # fmt: skip
                    d = least_squares(books, table, found, n_subs, w, wx, d)
                write_row(found, n_subs, m_out + start, book_out + start, idx_out + 4 * n_groups * start)
                scaled = np.float64(d) * np.float64(amax)
                if amax > _LARGE:
                    top = _F32_MAX / np.float64(max(_F1, peak(books, table, found, n_subs)))
                    scaled = max(-top, min(top, scaled))
            st_f32(d_out + 4 * row, np.float32(scaled))

    return search, 1, False
