"""Search super-block and sub-block scales jointly, 16 sub-blocks at once: Q3_K, Q6_K, IQ4_XS; Q2_K, Q4_K, Q5_K.

A lane is a sub-block; 16 or 8 neighbouring lanes are a super-block. First every sub-block gets its own best real scale
(and minimum), over a list of candidates. Around that point the error is a parabola, so a sum of 16 (8) parabolas ranks
many super-block scales cheaply. The best of each stretch of scales is then evaluated exactly: take sub-block integers
next to the ideal ones, round codes again, compute their least-squares super-block scale, and repeat.

Arguments: x, weights (ne0 f32, or 0), number of super-blocks, ne0, out, scratch, candidates, how many, and for Q2_K
flags of rows to leave out.
"""

# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd import vec
from ikcli.quant.encoders.kquants_pack import CODES, LS, WS, XS, D, make_pack
from ikcli.quant.encoders.lane_kernels import (
    ALL,
    HEAVY,
    LANES,
    fill_ones,
    load_group,
    reciprocal,
    round_f16,
    scale_group,
    signed_largest,
    swap_lanes,
    where_less,
)
from ikcli.quant.encoders.legacy_search_kernels import make_nearest, make_sums

_SMALLEST_F16 = np.float32(2.0**-24)
_HUGE = np.float32(3e38)
_STRETCHES, _STEPS, _ROUNDS = 3, 16, 2


def make_unit_reduce(op, n_lanes):
    """Return a device function that puts `op` of all lanes of a super-block into all its lanes."""
    whole = n_lanes == 16

    @inline
    def over_lanes(v):
        v = op(v, swap_lanes(v, 1))
        v = op(v, swap_lanes(v, 2))
        v = op(v, swap_lanes(v, 4))
        return op(v, swap_lanes(v, 8)) if whole else v

    return over_lanes


@inline
def stored_scale(d, amax, half):
    """Round d * amax to a half float that is not 0, in units of amax; `half` is scratch."""
    rounded = round_f16(vec.vmul(d, amax), half)
    smallest = vec.splat_f32x16(_SMALLEST_F16)
    rounded = where_less(vec.vabs(rounded), smallest, smallest, rounded)
    return vec.vmul(rounded, reciprocal(amax))


@inline
def clamp(v, lowest, highest):
    return vec.vmax(vec.vmin(v, vec.splat_f32x16(highest)), vec.splat_f32x16(lowest))


@inline
def load_units(x, weights, first, n_sub, size, ne0, s, largest):
    """Load a group, divide it by the largest value of its super-blocks, and return that value."""
    load_group(x, weights, first, n_sub, size, ne0, s + XS, s + WS)
    amax = largest(vec.vabs(signed_largest(s + XS, s + WS, size, ALL)))
    scale_group(s + XS, size, reciprocal(amax))
    return amax


def make_scale_only(kind):
    """Return the search of Q3_K, Q6_K, IQ4_XS: x = d * L * level, with a signed integer L per sub-block."""
    n_bits, size, nonlinear, l_min, l_max, reach = {
        "Q3_K": (3, 16, 0, -32, 31, 1),
        "Q6_K": (6, 16, 0, -128, 127, 2),
        "IQ4_XS": (4, 32, 1, -32, 31, 1),
    }[kind]
    n_lanes = 256 // size
    per_group = LANES // n_lanes
    nearest, code_of = make_nearest(n_bits, nonlinear)
    sums = make_sums(nearest, size, XS, WS)
    total, largest = make_unit_reduce(vec.vadd, n_lanes), make_unit_reduce(vec.vmax, n_lanes)
    pack, n_bytes = make_pack(kind)
    lowest, highest = np.float32(l_min), np.float32(l_max)
    first_ratio, step = np.float32(l_min * 1.02), np.float32(-l_min * 0.4 / (_STRETCHES * _STEPS))

    @inline
    def error_sums(s, scale):
        """Return (error, sum(w x l), sum(w l^2)) of the levels nearest to x / scale."""
        wxl, wll, error, inverse_scale = vec.zero_f32x16(), vec.zero_f32x16(), vec.zero_f32x16(), reciprocal(scale)
        for i in range(size):
            v, w = vec.load_f32x16(s + XS + 64 * i), vec.load_f32x16(s + WS + 64 * i)
            level = nearest(vec.vmul(v, inverse_scale))
            miss, wl = vec.vsub(v, vec.vmul(scale, level)), vec.vmul(w, level)
            wxl, wll, error = vec.vfma(wl, v, wxl), vec.vfma(wl, level, wll), vec.vfma(vec.vmul(miss, miss), w, error)
        return error, wxl, wll

    @inline
    def own_scale(s, anchors, candidates, n_candidates):
        """Return (scale, curvature of the error) of every sub-block."""
        inverse_top = reciprocal(signed_largest(s + XS, s + WS, size, ALL))
        scale, curve, best = vec.zero_f32x16(), vec.zero_f32x16(), vec.zero_f32x16()
        n_tried = n_candidates + (anchors - 1) * (n_candidates // 2)
        for c in range(n_tried + 1):
            if c == n_candidates:
                inverse_top = reciprocal(signed_largest(s + XS, s + WS, size, HEAVY))
            if c < n_tried:
                level = vec.bcast_f32x16(candidates + 4 * (c if c < n_candidates else 2 * (c - n_candidates)))
                inverse_scale = vec.vmul(level, inverse_top)
            else:
                inverse_scale = reciprocal(scale)
            wxl, wll = sums(s, inverse_scale)
            fitted = vec.vmul(wxl, reciprocal(wll))
            merit = vec.vmul(fitted, wxl)
            scale, curve = where_less(best, merit, fitted, scale), where_less(best, merit, wll, curve)
            best = vec.vmax(best, merit)
        return scale, curve

    @inline
    def promising(stretch, scale, curve, top):
        """Return the super-block scale of the least sum of parabolas in one stretch.

        `top` is the largest scale, with sign.
        """
        best, least = vec.zero_f32x16(), vec.splat_f32x16(_HUGE)
        for i in range(_STEPS):
            ratio = first_ratio + step * np.float32(stretch * _STEPS + i)
            d = vec.vmul(top, vec.splat_f32x16(np.float32(1.0) / ratio))
            whole = clamp(vec.vround_even(vec.vmul(scale, reciprocal(d))), lowest, highest)
            miss = vec.vsub(scale, vec.vmul(d, whole))
            promised = total(vec.vmul(curve, vec.vmul(miss, miss)))
            best, least = where_less(promised, least, d, best), vec.vmin(promised, least)
        return best

    @inline
    def exact(s, d, scale):
        """Return (error of the super-block, integers, least-squares d).

        The integers are next to scale / d, with codes rounded again.
        """
        middle = vec.vround_even(vec.vmul(scale, reciprocal(d)))
        error, whole = vec.splat_f32x16(_HUGE), vec.zero_f32x16()
        a, b = vec.zero_f32x16(), vec.zero_f32x16()
        for k in range(-reach, reach + 1):
            now = clamp(vec.vadd(middle, vec.splat_f32x16(np.float32(k))), lowest, highest)
            found, wxl, wll = error_sums(s, vec.vmul(d, now))
            whole = where_less(found, error, now, whole)
            a = where_less(found, error, vec.vmul(now, wxl), a)
            b = where_less(found, error, vec.vmul(vec.vmul(now, now), wll), b)
            error = vec.vmin(found, error)
        return total(error), whole, vec.vmul(total(a), reciprocal(total(b)))

    @inline
    def encode_group(s, amax, anchors, candidates, n_candidates):
        scale, curve = own_scale(s, anchors, candidates, n_candidates)
        peak = largest(vec.vabs(scale))
        negative = where_less(
            largest(scale), peak, vec.splat_f32x16(np.float32(-1.0)), vec.splat_f32x16(np.float32(1.0))
        )
        top = vec.vmul(peak, negative)
        best_d, best_l, least = vec.zero_f32x16(), vec.zero_f32x16(), vec.splat_f32x16(_HUGE)
        for stretch in range(_STRETCHES):
            d = promising(stretch, scale, curve, top)
            near = scale
            for _ in range(_ROUNDS):
                d = stored_scale(d, amax, s + CODES)
                error, whole, fitted = exact(s, d, near)
                best_d, best_l = where_less(error, least, d, best_d), where_less(error, least, whole, best_l)
                least = vec.vmin(error, least)
                near, d = vec.vmul(d, whole), fitted
        inverse_scale = reciprocal(vec.vmul(best_d, best_l))
        for i in range(size):
            code = code_of(vec.vmul(vec.load_f32x16(s + XS + 64 * i), inverse_scale))
            vec.store_i8x16(s + CODES + 16 * i, vec.trunc_i32x16_i8(vec.cvt_f32x16_i32(code)))
        vec.store_i8x16(s + LS, vec.trunc_i32x16_i8(vec.cvt_f32x16_i32(best_l)))
        vec.store_f32x16(s + D, vec.vmul(best_d, amax))

    def scale_only(x, weights, n_units, ne0, out, s, candidates, n_candidates, skip):
        fill_ones(s + WS, size)
        for first in range(0, n_units, per_group):
            amax = load_units(x, weights, first * n_lanes, n_units * n_lanes, size, ne0, s, largest)
            encode_group(s, amax, 2 if weights != 0 else 1, candidates, n_candidates)
            for u in range(min(per_group, n_units - first)):
                pack(out + (first + u) * n_bytes, s, u * n_lanes)

    return scale_only, 9, False
