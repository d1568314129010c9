"""Search one scale (and minimum) per block of 32, 16 blocks at once: Q4_0, Q5_0, Q6_0, IQ4_NL; Q4_1, Q5_1.

For given codes l the best scale is sum(w x l) / sum(w l^2), which lowers the weighted squared error by sum(w x l)^2 /
sum(w l^2). So many scales are tried, and the codes of the best are refined by rounding again with their own best scale.
Arguments: x, weights (ne0 f32, or 0), number of blocks, ne0, out, scratch, candidates, how many.
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import itertools

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd import vec
from ikcli.native.simd.half import st_f16
from ikcli.quant.encoders.lane_kernels import (
    ALL,
    HEAVY,
    LANES,
    fill_ones,
    load_group,
    make_step_sum,
    reciprocal,
    round_f16,
    scale_group,
    signed_largest,
    value_range,
    where_less,
)

# Scratch: values, weights, codes (bytes), scales, minima, half floats, heavy values.
XS, WS, QS, DS, MS, HALF, TOP, SCRATCH_BYTES = 0, 2048, 4096, 4608, 4672, 4736, 4800, 4864
_REFINEMENTS, N_EXACT = 3, 8
_NOISE = np.float32(1e-5)  # of a difference of sums, relative to them
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NL_MIDDLES = [(a + b) / 2 for a, b in itertools.pairwise(_NL)]
_nl_value = make_step_sum(_NL_MIDDLES, _NL[0], [b - a for a, b in itertools.pairwise(_NL)])
_nl_index = make_step_sum(_NL_MIDDLES, 0, [1] * 15)


def make_nearest(n_bits, nonlinear):
    """Return device functions: the level nearest to y, and its code."""
    half = 1 << (n_bits - 1)
    lowest, highest, offset = np.float32(-half), np.float32(half - 1), np.float32(half)
    if nonlinear:
        return _nl_value, _nl_index

    @inline
    def nearest(y):
        return vec.vmax(vec.vmin(vec.vround_even(y), vec.splat_f32x16(highest)), vec.splat_f32x16(lowest))

    @inline
    def code_of(y):
        return vec.vadd(nearest(y), vec.splat_f32x16(offset))

    return nearest, code_of


def make_sums(nearest, size, xs, ws):
    """Return a device function: sum(w x l) and sum(w l^2) of the levels nearest to x * inverse_scale."""

    @inline
    def sums(s, inverse_scale):
        wxl, wll = vec.zero_f32x16(), vec.zero_f32x16()
        for i in range(size):
            v = vec.load_f32x16(s + xs + 64 * i)
            level = nearest(vec.vmul(v, inverse_scale))
            wl = vec.vmul(vec.load_f32x16(s + ws + 64 * i), level)
            wxl, wll = vec.vfma(wl, v, wxl), vec.vfma(wl, level, wll)
        return wxl, wll

    return sums


def _search(encode_group, n_bytes):
    """Return the kernel over all groups of blocks."""

    def search(x, weights, n_blocks, ne0, out, s, candidates, n_candidates):
        fill_ones(s + WS, 32)
        for first in range(0, n_blocks, LANES):
            encode_group(x, weights, first, n_blocks, ne0, out + first * n_bytes, s, candidates, n_candidates)

    return search


def make_store(n_bits):
    """Return a device function that stores a block of packed codes from 32 bytes of codes that are 16 apart."""

    @inline
    def store(out, codes):
        if n_bits == 5:
            bits = 0
            for i in range(32):
                bits |= (vec.ld_u8(codes + 16 * i) >> 4) << i
            vec.st_i32(out, bits)
            out += 4
        if n_bits == 6:
            for i in range(8):
                a, b = vec.ld_u8(codes + 16 * i) >> 4, vec.ld_u8(codes + 16 * (i + 16)) >> 4
                c, d = vec.ld_u8(codes + 16 * (i + 8)) >> 4, vec.ld_u8(codes + 16 * (i + 24)) >> 4
                vec.st_i8(out + i, a | b << 2 | c << 4 | d << 6)
            out += 8
        for i in range(16):
            vec.st_i8(out + i, vec.ld_u8(codes + 16 * i) & 15 | (vec.ld_u8(codes + 16 * (i + 16)) & 15) << 4)

    return store


def make_scale_search(n_bits, nonlinear):
    """Return the search of x = d * level: Q4_0, Q5_0, Q6_0 (whole levels) and IQ4_NL.

    Candidates: levels of the largest value, followed by N_EXACT inverse levels to be tried with scales as stored.
    """
    nearest, code_of = make_nearest(n_bits, nonlinear)
    sums = make_sums(nearest, 32, XS, WS)
    n_bytes = {4: 18, 5: 22, 6: 26}[n_bits]
    store = make_store(n_bits)

    @inline
    def best_scale(s, anchors, candidates, n_candidates):
        """Return the least-squares scale of the best codes.

        Every other candidate also serves the largest heavy value.
        """
        best, best_merit = vec.zero_f32x16(), vec.zero_f32x16()
        n_tried = n_candidates + (anchors - 1) * (n_candidates // 2)
        for c in range(n_tried + _REFINEMENTS):
            if c < n_candidates:
                inverse_scale = vec.bcast_f32x16(candidates + 4 * c)
            elif c < n_tried:
                inverse_scale = vec.vmul(
                    vec.bcast_f32x16(candidates + 8 * (c - n_candidates)), vec.load_f32x16(s + TOP)
                )
            else:
                inverse_scale = reciprocal(best)
            wxl, wll = sums(s, inverse_scale)
            fitted = vec.vmul(wxl, reciprocal(wll))
            merit = vec.vmul(fitted, wxl)
            best, best_merit = where_less(best_merit, merit, fitted, best), vec.vmax(best_merit, merit)
        return best

    @inline
    def error(s, scale):
        total, inverse_scale = vec.zero_f32x16(), reciprocal(scale)
        for i in range(32):
            v = vec.load_f32x16(s + XS + 64 * i)
            miss = vec.vsub(v, vec.vmul(scale, nearest(vec.vmul(v, inverse_scale))))
            total = vec.vfma(vec.vmul(miss, miss), vec.load_f32x16(s + WS + 64 * i), total)
        return total

    @inline
    def best_stored_scale(s, largest, found, exact):
        """Return a half float near `found`, or one at which the largest value is a level.

        This serves blocks of few and regular values.
        """
        inverse = reciprocal(largest)
        best = round_f16(vec.vmul(found, largest), s + HALF)
        least = error(s, vec.vmul(best, inverse))
        for c in range(N_EXACT):
            d = round_f16(vec.vmul(largest, vec.bcast_f32x16(exact + 4 * c)), s + HALF)
            now = error(s, vec.vmul(d, inverse))
            best, least = where_less(now, least, d, best), vec.vmin(now, least)
        return best

    @inline
    def encode_group(x, weights, first, n_blocks, ne0, out, s, candidates, n_candidates):
        load_group(x, weights, first, n_blocks, 32, ne0, s + XS, s + WS)
        largest = signed_largest(s + XS, s + WS, 32, ALL)
        scale_group(s + XS, 32, reciprocal(largest))
        vec.store_f32x16(s + TOP, reciprocal(signed_largest(s + XS, s + WS, 32, HEAVY)))
        found = best_scale(s, 2 if weights != 0 else 1, candidates, n_candidates)
        d = best_stored_scale(s, largest, found, candidates + 4 * n_candidates)
        vec.store_f32x16(s + DS, d)
        inverse_scale = vec.vmul(reciprocal(d), largest)
        for i in range(32):
            y = vec.vmul(vec.load_f32x16(s + XS + 64 * i), inverse_scale)
            vec.store_i8x16(s + QS + 16 * i, vec.trunc_i32x16_i8(vec.cvt_f32x16_i32(code_of(y))))
        for lane in range(min(LANES, n_blocks - first)):
            st_f16(out, vec.ld_f32(s + DS + 4 * lane))
            store(out + 2, s + QS + lane)
            out += n_bytes

    return _search(encode_group, n_bytes), 8, False


def make_range_search(n_bits):
    """Return the search of x = d * code + m: Q4_1 and Q5_1.

    Candidates: pairs of codes given to the smallest and the largest value.
    """
    highest = np.float32((1 << n_bits) - 1)
    n_bytes = {4: 20, 5: 24}[n_bits]
    store = make_store(n_bits)

    @inline
    def code(y):
        return vec.vmax(vec.vmin(vec.vround_even(y), vec.splat_f32x16(highest)), vec.zero_f32x16())

    @inline
    def fit(s, inverse_scale, offset, inverse_w):
        """Return (merit, scale, mean code) of the codes of x * inverse_scale + offset; x has weighted mean 0."""
        wl, wll, wxl = vec.zero_f32x16(), vec.zero_f32x16(), vec.zero_f32x16()
        for i in range(32):
            v = vec.load_f32x16(s + XS + 64 * i)
            q = code(vec.vfma(v, inverse_scale, offset))
            w = vec.vmul(vec.load_f32x16(s + WS + 64 * i), q)
            wl, wll, wxl = vec.vadd(wl, w), vec.vfma(w, q, wll), vec.vfma(w, v, wxl)
        mean = vec.vmul(wl, inverse_w)
        spread = reciprocal(vec.vmax(vec.vsub(wll, vec.vmul(wl, mean)), vec.vmul(wll, vec.splat_f32x16(_NOISE))))
        scale = vec.vmul(wxl, spread)
        return vec.vmul(scale, wxl), scale, mean

    @inline
    def centre(s):
        """Subtract the weighted mean; return it and 1 / sum of weights."""
        total, wx = vec.zero_f32x16(), vec.zero_f32x16()
        for i in range(32):
            v, w = vec.load_f32x16(s + XS + 64 * i), vec.load_f32x16(s + WS + 64 * i)
            total, wx = vec.vadd(total, w), vec.vfma(v, w, wx)
        inverse_w = reciprocal(total)
        mean = vec.vmul(wx, inverse_w)
        for i in range(32):
            vec.store_f32x16(s + XS + 64 * i, vec.vsub(vec.load_f32x16(s + XS + 64 * i), mean))
        return mean, inverse_w

    @inline
    def best_range(s, anchors, candidates, n_candidates):
        """Return (scale, minimum, subtracted mean), in units of the largest value."""
        mean, inverse_w = centre(s)
        scale, shift, best = vec.zero_f32x16(), vec.zero_f32x16(), vec.zero_f32x16()
        lo, hi = value_range(s + XS, s + WS, 32, ALL)
        factor = reciprocal(vec.vsub(hi, lo))
        n_tried = n_candidates + (anchors - 1) * (n_candidates // 2)
        for c in range(n_tried + _REFINEMENTS):
            if c == n_candidates:
                lo, hi = value_range(s + XS, s + WS, 32, HEAVY)
                factor = reciprocal(vec.vsub(hi, lo))
            if c < n_tried:
                at = candidates + 8 * (c if c < n_candidates else 2 * (c - n_candidates))
                first, last = vec.bcast_f32x16(at), vec.bcast_f32x16(at + 4)
                inverse_scale = vec.vmul(vec.vsub(last, first), factor)
                offset = vec.vsub(first, vec.vmul(lo, inverse_scale))
            else:
                inverse_scale, offset = reciprocal(scale), shift
            found, new_scale, new_shift = fit(s, inverse_scale, offset, inverse_w)
            scale, shift = where_less(best, found, new_scale, scale), where_less(best, found, new_shift, shift)
            best = vec.vmax(best, found)
        return scale, vec.vsub(mean, vec.vmul(scale, shift)), mean

    @inline
    def encode_group(x, weights, first, n_blocks, ne0, out, s, candidates, n_candidates):
        load_group(x, weights, first, n_blocks, 32, ne0, s + XS, s + WS)
        largest = vec.vabs(signed_largest(s + XS, s + WS, 32, ALL))
        scale_group(s + XS, 32, reciprocal(largest))
        scale, low, mean = best_range(s, 2 if weights != 0 else 1, candidates, n_candidates)
        d, m = round_f16(vec.vmul(scale, largest), s + HALF), round_f16(vec.vmul(low, largest), s + HALF)
        vec.store_f32x16(s + DS, d)
        vec.store_f32x16(s + MS, m)
        inverse_scale = vec.vmul(reciprocal(d), largest)
        offset = vec.vmul(vec.vsub(mean, vec.vmul(m, reciprocal(largest))), inverse_scale)
        for i in range(32):
            y = vec.vfma(vec.load_f32x16(s + XS + 64 * i), inverse_scale, offset)
            vec.store_i8x16(s + QS + 16 * i, vec.trunc_i32x16_i8(vec.cvt_f32x16_i32(code(y))))
        for lane in range(min(LANES, n_blocks - first)):
            st_f16(out, vec.ld_f32(s + DS + 4 * lane))
            st_f16(out + 2, vec.ld_f32(s + MS + 4 * lane))
            store(out + 4, s + QS + lane)
            out += n_bytes

    return _search(encode_group, n_bytes), 8, False
