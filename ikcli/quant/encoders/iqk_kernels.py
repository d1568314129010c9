# mypy: ignore-errors
"""Search the scales of the IQ*_K and KS types: sixteen sub-blocks at a time, one per lane.

A unit (256 elements or a row) shares one scale d; element = d * m * (table[code] + shift * t) with an integer m and a
bit t per sub-block. Steps:
(1) find the best real scale for every sub-block, sign and table row, over a grid of scales with nearest codes and a
    least-squares refit;
(2) rank values of d by the errors that these parabolas promise;
(3) for the best few, compute the exact error of every sub-block over the multipliers near its real scales, then the
    least-squares d for the choice made, until nothing improves.
Errors are sums of weight * residual^2, kept as residuals.

Parameters (int64 each): see the slots below. Scratch per unit: x and w transposed (element, sub-block), then states.
"""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.half import ld_f16, st_f16
from ikcli.native.simd.vec import (
    cvt_f32x16_i32,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32x16,
    reduce_add,
    splat_f32x16,
    st_f32,
    st_i8,
    st_i32,
    store_f32x16,
    store_i32x16,
    vabs,
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
from ikcli.quant.encoders.iqk_simd import count_reached, lookup_f32, lookup_i32, vfloor
from ikcli.quant.encoders.iqk_tables import SHAPES, STATE_BYTES
from ikcli.quant.encoders.lane_kernels import where_less

# Slots of the parameters.
X, WEIGHTS, N_UNITS, UNITS_PER_ROW, UNIT, TABLE, SCRATCH, OUT_CODES, OUT_M, OUT_T, OUT_D = range(11)
GRID, N_GRID, N_REFINE, FACTORS, N_FACTORS, N_KEEP, N_ROUNDS, N_OPTIONS, SPAN = range(11, 20)

# State of one group of sixteen sub-blocks (STATE_BYTES): rows of sixteen floats.
_SCALE, _SHIFT, _ERROR, _CURVE = 0, 4 * 64, 8 * 64, 12 * 64  # four options each, best first
_M, _T = 16 * 64, 17 * 64  # choice of the current d
_BEST_M, _BEST_T = 18 * 64, 19 * 64

_F0, _F1, _HALF, _TINY = np.float32(0.0), np.float32(1.0), np.float32(0.5), np.float32(1e-30)
_HUGE = np.float32(3e38)
_F16_MAX, _F16_LEAST = np.float32(65504.0), np.float32(5.9604645e-08)


@inline
def slot(params, i):
    return ld_i64(params + 8 * i)


@inline
def inverse(s):
    """Return 1/s, 0 where s is 0."""
    one = splat_f32x16(_F1)
    safe = where_less(vabs(s), splat_f32x16(_TINY), splat_f32x16(_HUGE), s)
    return vdiv(one, safe)


def make_nearest(name):
    """Return a device function (v, table address) -> (code, value) of the nearest entry of the base row."""
    shape = SHAPES[name]
    n_cells, n_entries = shape.n_cells, shape.n_entries
    per_unit, first = np.float32(1.0 / shape.width), np.float32(-shape.start / shape.width)
    last = np.float32(n_cells - 1)
    look_first, look_limit, look_value = lookup_i32[n_cells], lookup_f32[n_entries], lookup_f32[n_entries]
    limit_at, value_at = 4 * n_cells, 4 * n_cells + 4 * n_entries

    @inline
    def nearest(v, table):
        cell = vfma(v, splat_f32x16(per_unit), splat_f32x16(first))
        cell = vmin(vmax(cell, splat_f32x16(_F0)), splat_f32x16(last))
        code = look_first(table, cvt_f32x16_i32(cell))
        code = count_reached(code, v, look_limit(table + limit_at, code))
        return code, look_value(table + value_at, code)

    return nearest


def make_evaluate(name, n):
    """Return device functions for sub-blocks: sums (w r^2, w r q, w q^2), and codes.

    The sums use the nearest codes at scale s, with r = x - s q.
    """
    nearest = make_nearest(name)

    @inline
    def evaluate(x, w, s, shift, table):
        inv = inverse(s)
        zero = zero_f32x16()
        minus_s, minus_shift = vsub(zero, s), vsub(zero, shift)
        error, slope, curve = zero, zero, zero
        for j in range(n):
            xj, wj = load_f32x16(x + 64 * j), load_f32x16(w + 64 * j)
            _, q = nearest(vfma(xj, inv, minus_shift), table)
            q = vadd(q, shift)
            r = vfma(minus_s, q, xj)
            wr = vmul(wj, r)
            error, slope, curve = vfma(wr, r, error), vfma(wr, q, slope), vfma(vmul(wj, q), q, curve)
        return error, slope, curve

    @inline
    def write_codes(x, w, s, shift, table, out, scratch, n_valid):
        inv = inverse(s)
        minus_shift = vsub(zero_f32x16(), shift)
        for j in range(n):
            code, _ = nearest(vfma(load_f32x16(x + 64 * j), inv, minus_shift), table)
            store_i32x16(scratch, code)
            for lane in range(n_valid):
                st_i8(out + lane * n + j, ld_i32(scratch + 4 * lane))

    return evaluate, write_codes


def make_multiplier(low, high, odd):
    """Return a device function: real multiplier -> nearest allowed one (odd ones only, or all of low..high)."""
    low, high = np.float32(low), np.float32(high)

    @inline
    def any_multiplier(r):
        return vmin(vmax(vround_even(r), splat_f32x16(low)), splat_f32x16(high))

    @inline
    def odd_multiplier(r):
        two, one = splat_f32x16(np.float32(2.0)), splat_f32x16(_F1)
        m = vfma(vfloor(vmul(r, splat_f32x16(_HALF))), two, one)
        return vmin(vmax(m, splat_f32x16(low)), splat_f32x16(high))

    return odd_multiplier if odd else any_multiplier


@inline
def power_of_two_below(value, scratch):
    """Return the largest power of two <= a positive normal number."""
    st_f32(scratch, value)
    st_i32(scratch, ld_i32(scratch) & 0x7F800000)
    return ld_f32(scratch)


@inline
def transpose(x, weights, n_total, scale, n, xt, wt, n_groups):
    """Transpose elements times `scale` and their weights to (element, sub-block).

    Missing sub-blocks become zero with weight 0.
    """
    for g in range(n_groups):
        for lane in range(16):
            start = (16 * g + lane) * n
            dst = 64 * g * n + 4 * lane
            for j in range(n):
                inside = start + j < n_total
                st_f32(xt + dst + 64 * j, ld_f32(x + 4 * (start + j)) * scale if inside else _F0)
                st_f32(wt + dst + 64 * j, ld_f32(weights + 4 * (start + j)) if inside else _F0)


@inline
def largest(x, n):
    top = _F0
    for i in range(n):
        top = max(top, abs(ld_f32(x + 4 * i)))
    return top


@inline
def swap_if_better(state, a, b):
    """Order options a and b (a < b) of every lane by error."""
    ea, eb = load_f32x16(state + _ERROR + 64 * a), load_f32x16(state + _ERROR + 64 * b)
    for row in (_SCALE, _SHIFT, _CURVE):
        va, vb = load_f32x16(state + row + 64 * a), load_f32x16(state + row + 64 * b)
        store_f32x16(state + row + 64 * a, where_less(eb, ea, vb, va))
        store_f32x16(state + row + 64 * b, where_less(eb, ea, va, vb))
    store_f32x16(state + _ERROR + 64 * a, vmin(ea, eb))
    store_f32x16(state + _ERROR + 64 * b, vmax(ea, eb))


def make_real_scales(evaluate, n, shift_step, n_rows):
    """Return a device function: options (scale, row) of sixteen sub-blocks, each the best of its sign and table row."""
    shift_step = np.float32(shift_step)

    @inline
    def refit(x, w, s, shift, table):
        error, slope, curve = evaluate(x, w, s, shift, table)
        curve = vmax(curve, splat_f32x16(_TINY))
        step = vdiv(slope, curve)
        return vadd(s, step), vsub(error, vmul(slope, step)), curve

    @inline
    def real_scales(x, w, table, grid, n_grid, n_refine, state):
        top = splat_f32x16(_TINY)
        for j in range(n):
            top = vmax(top, vabs(load_f32x16(x + 64 * j)))
        for option in range(4):
            row, sign = option >> 1, _F1 - np.float32(2 * (option & 1))
            best = splat_f32x16(_HUGE)
            best_s, best_curve = zero_f32x16(), splat_f32x16(_F1)
            shift = splat_f32x16(np.float32(row) * shift_step)
            if row < n_rows:
                for i in range(n_grid):
                    s = vmul(top, splat_f32x16(sign * ld_f32(grid + 4 * i)))
                    s, error, curve = refit(x, w, s, shift, table)
                    best_s, best_curve = (
                        where_less(error, best, s, best_s),
                        where_less(error, best, curve, best_curve),
                    )
                    best = vmin(error, best)
                for _ in range(n_refine):
                    s, error, curve = refit(x, w, best_s, shift, table)
                    best_s, best_curve = (
                        where_less(error, best, s, best_s),
                        where_less(error, best, curve, best_curve),
                    )
                    best = vmin(error, best)
            store_f32x16(state + _SCALE + 64 * option, best_s)
            store_f32x16(state + _SHIFT + 64 * option, shift)
            store_f32x16(state + _ERROR + 64 * option, best)
            store_f32x16(state + _CURVE + 64 * option, best_curve)
        swap_if_better(state, 0, 1)
        swap_if_better(state, 2, 3)
        swap_if_better(state, 0, 2)
        swap_if_better(state, 1, 3)
        swap_if_better(state, 1, 2)

    return real_scales


@inline
def largest_scale(states, n_groups):
    """Return the best real scale of largest magnitude over all sub-blocks."""
    top = _F0
    for g in range(n_groups):
        for lane in range(16):
            s = ld_f32(states + g * STATE_BYTES + _SCALE + 4 * lane)
            if abs(s) > abs(top):
                top = s
    return top


def make_choose(evaluate, multiplier, n, step):
    """Return a device function: best (m, t) of every sub-block at scale d.

    It returns (error, sum m w r q, sum m^2 w q^2).
    """
    step = np.float32(step)

    @inline
    def choose(xt, wt, states, n_groups, d, table, n_options, span):
        total, slope_sum, curve_sum = np.float64(0.0), np.float64(0.0), np.float64(0.0)
        per_d, d_all = splat_f32x16(_F1 / d), splat_f32x16(d)
        for g in range(n_groups):
            state, x, w = states + g * STATE_BYTES, xt + 64 * g * n, wt + 64 * g * n
            best = splat_f32x16(_HUGE)
            best_m, best_t, best_slope, best_curve = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
            for option in range(n_options):
                shift = load_f32x16(state + _SHIFT + 64 * option)
                centre = multiplier(vmul(load_f32x16(state + _SCALE + 64 * option), per_d))
                for k in range(-span, span + 1):
                    m = multiplier(vadd(centre, splat_f32x16(np.float32(k) * step)))
                    error, slope, curve = evaluate(x, w, vmul(d_all, m), shift, table)
                    best_m, best_t = where_less(error, best, m, best_m), where_less(error, best, shift, best_t)
                    best_slope = where_less(error, best, vmul(m, slope), best_slope)
                    best_curve = where_less(error, best, vmul(vmul(m, m), curve), best_curve)
                    best = vmin(error, best)
            store_f32x16(state + _M, best_m)
            store_f32x16(state + _T, best_t)
            total += np.float64(reduce_add(best))
            slope_sum += np.float64(reduce_add(best_slope))
            curve_sum += np.float64(reduce_add(best_curve))
        return total, slope_sum, curve_sum

    return choose


def make_promise(multiplier):
    """Return a device function: the error that the parabolas promise at scale d."""

    @inline
    def promise(states, n_groups, d, n_options):
        total = zero_f32x16()
        per_d, d_all = splat_f32x16(_F1 / d), splat_f32x16(d)
        for g in range(n_groups):
            state = states + g * STATE_BYTES
            best = splat_f32x16(_HUGE)
            for option in range(n_options):
                s = load_f32x16(state + _SCALE + 64 * option)
                off = vsub(vmul(multiplier(vmul(s, per_d)), d_all), s)
                curve, error = load_f32x16(state + _CURVE + 64 * option), load_f32x16(state + _ERROR + 64 * option)
                best = vmin(best, vfma(vmul(curve, off), off, error))
            total = vadd(total, best)
        return reduce_add(total)

    return promise


@inline
def energy(xt, wt, n_vectors):
    """Return the error of the scale 0: sum of w x^2."""
    total = np.float64(0.0)
    for j in range(n_vectors):
        x = load_f32x16(xt + 64 * j)
        total += np.float64(reduce_add(vmul(vmul(x, x), load_f32x16(wt + 64 * j))))
    return total


@inline
def half_scale(d, unscale, scale, scratch):
    """Round d so that d * unscale is a half float other than 0."""
    real = min(max(d * unscale, -_F16_MAX), _F16_MAX)
    st_f16(scratch, real)
    real = ld_f16(scratch)
    if real == _F0:
        real = _F16_LEAST if d >= _F0 else -_F16_LEAST
    return real * scale


@inline
def keep_choice(states, n_groups):
    for g in range(n_groups):
        state = states + g * STATE_BYTES
        store_f32x16(state + _BEST_M, load_f32x16(state + _M))
        store_f32x16(state + _BEST_T, load_f32x16(state + _T))


@inline
def take_least(list_, n):
    """Return the index of the least of n numbers, and make it and its neighbours huge."""
    at = 0
    for i in range(n):
        if ld_f32(list_ + 4 * i) < ld_f32(list_ + 4 * at):
            at = i
    for i in range(max(0, at - 1), min(n, at + 2)):
        st_f32(list_ + 4 * i, _HUGE)
    return at


def make_search(name, n, low, high, odd, n_rows, half):
    """Return kernel(params) as described in the module docstring.

    `name`: table, `n`: sub-block size, `n_rows`: rows of the table.
    """
    evaluate, write_codes = make_evaluate(name, n)
    return make_driver(evaluate, write_codes, n, low, high, odd, SHAPES[name].shift, n_rows, half, n)


def make_driver(evaluate, write_codes, n, low, high, odd, shift, n_rows, half, n_codes):
    """Return the search around an evaluation of sub-blocks, which writes `n_codes` bytes of codes per sub-block."""
    multiplier = make_multiplier(low, high, odd)
    real_scales = make_real_scales(evaluate, n, shift, n_rows)
    choose = make_choose(evaluate, multiplier, n, 2 if odd else 1)
    promise = make_promise(multiplier)
    widest = np.float32(max(-low, high))

    @inline
    def best_scale(params, xt, wt, states, n_groups, unscale, scale, scratch):
        """Return d of one unit, 0 if nothing is better; its choices stay in the states."""
        n_factors, n_options, table = slot(params, N_FACTORS), slot(params, N_OPTIONS), slot(params, TABLE)
        factors = slot(params, FACTORS)
        base = largest_scale(states, n_groups) / widest
        promises = scratch + 64
        for i in range(n_factors):
            st_f32(promises + 4 * i, promise(states, n_groups, base * ld_f32(factors + 4 * i), n_options))
        best, best_d = energy(xt, wt, n_groups * n), _F0
        for _ in range(slot(params, N_KEEP)):
            d = base * ld_f32(factors + 4 * take_least(promises, n_factors))
            for _round in range(slot(params, N_ROUNDS)):
                if half:
                    d = half_scale(d, unscale, scale, scratch)
                error, slope, curve = choose(
                    xt, wt, states, n_groups, d, table, n_options, slot(params, SPAN)
                )  # fmt: skip
                if error < best:
                    best, best_d = error, d
                    keep_choice(states, n_groups)
                if curve <= np.float64(0.0):
                    break
                step = np.float32(slope / curve)
                if abs(step) <= np.float32(1e-6) * abs(d):
                    break
                d += step
        return best_d

    @inline
    def write_unit(params, unit, xt, wt, states, n_groups, n_subs, d, scratch):
        m_out, t_out = slot(params, OUT_M) + unit * n_subs, slot(params, OUT_T) + unit * n_subs
        codes = slot(params, OUT_CODES) + unit * n_subs * n_codes
        for g in range(n_groups):
            state = states + g * STATE_BYTES
            m, t = load_f32x16(state + _BEST_M), load_f32x16(state + _BEST_T)
            valid = min(16, n_subs - 16 * g)
            write_codes(
                xt + 64 * g * n, wt + 64 * g * n, vmul(m, splat_f32x16(d)), t, slot(params, TABLE),
                codes + 16 * g * n_codes, scratch, valid,
            )  # fmt: skip
            for lane in range(valid):
                st_i8(m_out + 16 * g + lane, np.int64(ld_f32(state + _BEST_M + 4 * lane)))
                st_i8(t_out + 16 * g + lane, 1 if ld_f32(state + _BEST_T + 4 * lane) != _F0 else 0)

    def search(params):
        unit_size, scratch = slot(params, UNIT), slot(params, SCRATCH)
        n_subs = unit_size // n
        n_groups = (n_subs + 15) // 16
        xt = scratch + 4096
        wt = xt + 64 * n_groups * n
        states = wt + 64 * n_groups * n
        for unit in range(slot(params, N_UNITS)):
            x = slot(params, X) + 4 * unit * unit_size
            w = slot(params, WEIGHTS) + 4 * (unit % slot(params, UNITS_PER_ROW)) * unit_size
            top = largest(x, unit_size)
            d, unscale = _F0, _F1
            if top > _TINY:
                unscale = power_of_two_below(top, scratch)
                scale = _F1 / unscale
                transpose(x, w, unit_size, scale, n, xt, wt, n_groups)
                for g in range(n_groups):
                    real_scales(
                        xt + 64 * g * n, wt + 64 * g * n, slot(params, TABLE), slot(params, GRID),
                        slot(params, N_GRID), slot(params, N_REFINE), states + g * STATE_BYTES,
                    )  # fmt: skip
                d = best_scale(params, xt, wt, states, n_groups, unscale, scale, scratch)
            if d != _F0:
                write_unit(params, unit, xt, wt, states, n_groups, n_subs, d, scratch)
            d *= unscale
            if half:
                d = min(max(d, -_F16_MAX), _F16_MAX)
            st_f32(slot(params, OUT_D) + 4 * unit, d)

    return search, 1, False
