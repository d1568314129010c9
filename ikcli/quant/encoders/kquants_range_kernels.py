"""Search scales and minima of Q2_K, Q4_K and Q5_K jointly: x = d * L * code - dmin * M.

The plan is that of `kquants_kernels`, with two numbers per sub-block. For a given scale the best minimum is known:
(scale * sum(w l) - sum(w x)) / sum(w). Minima are >= 0, because the format stores no others for positive d and dmin.
"""

# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bcast_f32x16,
    cvt_f32x16_i32,
    ld_u8,
    load_f32x16,
    splat_f32x16,
    store_f32x16,
    store_i8x16,
    trunc_i32x16_i8,
    vadd,
    vfma,
    vmax,
    vmin,
    vmul,
    vround_even,
    vsub,
    zero_f32x16,
)
from ikcli.quant.encoders.kquants_kernels import clamp, load_units, make_unit_reduce, stored_scale
from ikcli.quant.encoders.kquants_pack import CODES, DMIN, LS, MS, WS, XS, D, make_pack
from ikcli.quant.encoders.lane_kernels import ALL, HEAVY, LANES, fill_ones, reciprocal, value_range, where_less

_HUGE, _NOISE = np.float32(3e38), np.float32(1e-5)
_STRETCHES, _STEPS, _ROUNDS, _REFINEMENTS = 3, 8, 2, 2
_SPAN = 0.3  # the integer of the largest scale (minimum) is at most this part below the highest one


def make_range(kind):
    """Return the search of Q2_K, Q4_K, Q5_K.

    Candidates: codes given to the smallest value of a sub-block (or 0) and to the largest.
    """
    n_bits, size, top = {"Q2_K": (2, 16, 15), "Q4_K": (4, 32, 63), "Q5_K": (5, 32, 63)}[kind]
    n_lanes = 256 // size
    per_group = LANES // n_lanes
    total, largest = make_unit_reduce(vadd, n_lanes), make_unit_reduce(vmax, n_lanes)
    pack, n_bytes = make_pack(kind)
    code_max, whole_max, f0 = np.float32((1 << n_bits) - 1), np.float32(top), np.float32(0.0)

    first_ratio = np.float32(1.01 * top)
    d_step, min_step = np.float32(_SPAN * top / (_STRETCHES * _STEPS)), np.float32(_SPAN * top / _STEPS)

    @inline
    def code(y):
        return clamp(vround_even(y), f0, code_max)

    @inline
    def code_sums(s, inverse_scale, offset):
        """Return sums of w l, w l^2, w x l for the codes l of x * inverse_scale + offset."""
        wl, wll, wxl = zero_f32x16(), zero_f32x16(), zero_f32x16()
        for i in range(size):
            v = load_f32x16(s + XS + 64 * i)
            q = code(vfma(v, inverse_scale, offset))
            w = vmul(load_f32x16(s + WS + 64 * i), q)
            wl, wll, wxl = vadd(wl, w), vfma(w, q, wll), vfma(w, v, wxl)
        return wl, wll, wxl

    @inline
    def error_sums(s, scale, low):
        """Return (error, sums of w l, w l^2, w x l) of the codes of (x + low) / scale."""
        wl, wll, wxl, error = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
        inverse_scale = reciprocal(scale)
        offset = vmul(low, inverse_scale)
        for i in range(size):
            v, w = load_f32x16(s + XS + 64 * i), load_f32x16(s + WS + 64 * i)
            q = code(vfma(v, inverse_scale, offset))
            miss, wq = vsub(vadd(v, low), vmul(scale, q)), vmul(w, q)
            wl, wll, wxl, error = vadd(wl, wq), vfma(wq, q, wll), vfma(wq, v, wxl), vfma(vmul(miss, miss), w, error)
        return error, wl, wll, wxl

    @inline
    def moments(s):
        """Return sum(w), sum(w x)."""
        w_sum, wx = zero_f32x16(), zero_f32x16()
        for i in range(size):
            w = load_f32x16(s + WS + 64 * i)
            w_sum, wx = vadd(w_sum, w), vfma(load_f32x16(s + XS + 64 * i), w, wx)
        return w_sum, wx

    @inline
    def own_range(s, w_sum, wx, anchors, candidates, n_candidates):
        """Return (scale, minimum, mean code, spread of the codes) of every sub-block.

        The mean is 0 where the minimum is.
        """
        zero, inverse_w = zero_f32x16(), reciprocal(w_sum)
        lo, hi = value_range(s + XS, s + WS, size, ALL)
        lo = vmin(lo, zero)
        scale, low, mean, spread = zero, vsub(zero, lo), zero, zero
        best = splat_f32x16(np.float32(-1.0))
        factor = reciprocal(vsub(hi, lo))
        n_tried = n_candidates + (anchors - 1) * (n_candidates // 2)
        for c in range(n_tried + _REFINEMENTS):
            if c == n_candidates:
                lo, hi = value_range(s + XS, s + WS, size, HEAVY)
                lo = vmin(lo, zero)
                factor = reciprocal(vsub(hi, lo))
            if c < n_tried:
                at = candidates + 8 * (c if c < n_candidates else 2 * (c - n_candidates))
                first, last = bcast_f32x16(at), bcast_f32x16(at + 4)
                inverse_scale = vmul(vsub(last, first), factor)
                offset = vsub(first, vmul(lo, inverse_scale))
            else:
                inverse_scale = reciprocal(scale)
                offset = vmul(low, inverse_scale)
            wl, wll, wxl = code_sums(s, inverse_scale, offset)
            mean_now = vmul(wl, inverse_w)
            spread_now = vmax(vsub(wll, vmul(wl, mean_now)), vmul(wll, splat_f32x16(_NOISE)))
            scale_now = vmul(vsub(wxl, vmul(wx, mean_now)), reciprocal(spread_now))
            low_now = vsub(vmul(scale_now, mean_now), vmul(wx, inverse_w))
            # Gain over all codes 0 and no minimum; with a minimum below 0: that of a scale alone.
            gain = vfma(vmul(scale_now, scale_now), spread_now, vmul(wx, vmul(wx, inverse_w)))
            alone = vmul(wxl, reciprocal(wll))
            scale_now = where_less(low_now, zero, alone, scale_now)
            gain = where_less(low_now, zero, vmul(alone, wxl), gain)
            mean_now, spread_now = where_less(low_now, zero, zero, mean_now), where_less(low_now, zero, wll, spread_now)
            gain = where_less(zero, scale_now, gain, splat_f32x16(np.float32(-2.0)))
            scale, low = where_less(best, gain, scale_now, scale), where_less(best, gain, vmax(low_now, zero), low)
            mean, spread = where_less(best, gain, mean_now, mean), where_less(best, gain, spread_now, spread)
            best = vmax(best, gain)
        return scale, low, mean, spread

    @inline
    def promising(stretch, scale, low, mean, spread, w_sum):
        """Return (d, dmin) of the least sum of parabolas in one stretch of d."""
        peak, low_peak = largest(scale), largest(low)
        best_d, best_m, least = zero_f32x16(), zero_f32x16(), splat_f32x16(_HUGE)
        for i in range(_STEPS):
            d = vmul(peak, splat_f32x16(np.float32(1.0) / (first_ratio - d_step * np.float32(stretch * _STEPS + i))))
            miss = vsub(vmul(d, clamp(vround_even(vmul(scale, reciprocal(d))), f0, whole_max)), scale)
            base = vmul(spread, vmul(miss, miss))
            wanted = vmax(vfma(mean, miss, low), zero_f32x16())
            for j in range(_STEPS):
                dmin = vmul(low_peak, splat_f32x16(np.float32(1.0) / (first_ratio - min_step * np.float32(j))))
                low_now = vmul(dmin, clamp(vround_even(vmul(wanted, reciprocal(dmin))), f0, whole_max))
                low_miss = vsub(low_now, wanted)
                promised = total(vfma(w_sum, vmul(low_miss, low_miss), base))
                best_d, best_m = where_less(promised, least, d, best_d), where_less(promised, least, dmin, best_m)
                least = vmin(promised, least)
        return best_d, best_m

    @inline
    def fit(l_now, m_now, wl, wll, wxl, w_sum, wx, dmin):
        """Return the least-squares (d, dmin) of super-blocks with these integers and codes."""
        a, b = total(vmul(vmul(l_now, l_now), wll)), total(vmul(vmul(l_now, m_now), wl))
        c = total(vmul(vmul(m_now, m_now), w_sum))
        p, q = total(vmul(l_now, wxl)), total(vmul(m_now, wx))
        det = vsub(vmul(a, c), vmul(b, b))
        sound = vmul(vmul(a, c), splat_f32x16(np.float32(1e-5)))
        inverse = reciprocal(det)
        d_new = vmul(vsub(vmul(p, c), vmul(b, q)), inverse)
        m_new = vmul(vsub(vmul(b, p), vmul(a, q)), inverse)
        alone = vmul(vfma(b, dmin, p), reciprocal(a))
        return where_less(sound, det, d_new, alone), where_less(sound, det, m_new, dmin)

    @inline
    def exact(s, d, dmin, scale, low, w_sum, wx):
        """Return (error, L, M, d, dmin).

        L and M are next to the ideal ones, codes are rounded again; d and dmin follow by least squares.
        """
        zero = zero_f32x16()
        inverse_d, inverse_m, inverse_w = reciprocal(d), reciprocal(dmin), reciprocal(w_sum)
        middle = vround_even(vmul(scale, inverse_d))
        error, l_best, m_best = splat_f32x16(_HUGE), zero, zero
        wl_best, wll_best, wxl_best = zero, zero, zero
        for k in range(-1, 2):
            l_now = clamp(vadd(middle, splat_f32x16(np.float32(k))), f0, whole_max)
            m_now = clamp(vround_even(vmul(low, inverse_m)), f0, whole_max)
            for _ in range(2):
                found, wl, wll, wxl = error_sums(s, vmul(d, l_now), vmul(dmin, m_now))
                l_best, m_best = where_less(found, error, l_now, l_best), where_less(found, error, m_now, m_best)
                wl_best, wll_best = where_less(found, error, wl, wl_best), where_less(found, error, wll, wll_best)
                wxl_best = where_less(found, error, wxl, wxl_best)
                error = vmin(found, error)
                wanted = vmul(vsub(vmul(vmul(d, l_now), wl), wx), inverse_w)
                m_now = clamp(vround_even(vmul(wanted, inverse_m)), f0, whole_max)
        d_new, m_new = fit(l_best, m_best, wl_best, wll_best, wxl_best, w_sum, wx, dmin)
        return total(error), l_best, m_best, d_new, m_new

    @inline
    def encode_group(s, amax, anchors, candidates, n_candidates):
        zero = zero_f32x16()
        w_sum, wx = moments(s)
        scale, low, mean, spread = own_range(s, w_sum, wx, anchors, candidates, n_candidates)
        best_d, best_m, best_l, best_mins, least = zero, zero, zero, zero, splat_f32x16(_HUGE)
        for stretch in range(_STRETCHES + 1):
            if stretch < _STRETCHES:
                d, dmin = promising(stretch, scale, low, mean, spread, w_sum)
            else:  # few and regular values: both scales the same, the largest value a whole multiple
                d = dmin = splat_f32x16(np.float32(1.0) / whole_max)
            near, near_low = scale, low
            for _ in range(_ROUNDS):
                d, dmin = stored_scale(d, amax, s + CODES), stored_scale(dmin, amax, s + CODES)
                error, whole, mins, d_new, m_new = exact(s, d, dmin, near, near_low, w_sum, wx)
                best_d, best_m = where_less(error, least, d, best_d), where_less(error, least, dmin, best_m)
                best_l, best_mins = where_less(error, least, whole, best_l), where_less(error, least, mins, best_mins)
                least = vmin(error, least)
                near, near_low = vmul(d, whole), vmul(dmin, mins)
                d, dmin = d_new, m_new
        inverse_scale = reciprocal(vmul(best_d, best_l))
        offset = vmul(vmul(best_m, best_mins), inverse_scale)
        for i in range(size):
            q = code(vfma(load_f32x16(s + XS + 64 * i), inverse_scale, offset))
            store_i8x16(s + CODES + 16 * i, trunc_i32x16_i8(cvt_f32x16_i32(q)))
        store_i8x16(s + LS, trunc_i32x16_i8(cvt_f32x16_i32(best_l)))
        store_i8x16(s + MS, trunc_i32x16_i8(cvt_f32x16_i32(best_mins)))
        store_f32x16(s + D, vmul(best_d, amax))
        store_f32x16(s + DMIN, vmul(best_m, amax))

    def range_(x, weights, n_units, ne0, out, s, candidates, n_candidates, skip):
        fill_ones(s + WS, size)
        for first in range(0, n_units, per_group):
            if skip != 0 and ld_u8(skip + first * 256 // ne0) != 0:
                continue
            amax = load_units(x, weights, first * n_lanes, n_units * n_lanes, size, ne0, s, largest)
            encode_group(s, amax, 2 if weights != 0 else 1, candidates, n_candidates)
            for u in range(min(per_group, n_units - first)):
                pack(out + (first + u) * n_bytes, s, u * n_lanes)

    return range_, 9, False
