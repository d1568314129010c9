# mypy: ignore-errors
"""Search IQ4_KSS and IQ2_KL, whose codes depend on each other.

IQ4_KSS: the 16 bits of codes 2i, 2i+16, 2i+1, 2i+17 of a sub-block have even parity. For each element the search finds
the nearest entry of either parity. Where the better ones add up to an odd number, it changes the element that loses
least, which is the optimum for the current scale. IQ2_KL: a pair of neighbours takes the nearest of 32 pairs of values.
"""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    ld_i32,
    load_f32x16,
    splat_f32x16,
    st_i8,
    store_i32x16,
    vabs,
    vadd,
    vfma,
    vmin,
    vmul,
    vsub,
    zero_f32x16,
)
from ikcli.quant.encoders.iqk_kernels import inverse, make_driver, make_nearest
from ikcli.quant.encoders.iqk_simd import lookup_f32, lookup_i32, make_nearest_pair
from ikcli.quant.encoders.iqk_tables import SHAPES
from ikcli.quant.encoders.lane_kernels import where_less
from ikcli.quant.tables import IQ2_KL_VALUES

_F0, _F1, _HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)


def _make_parity():
    """Return the device functions of IQ4_KSS."""
    even, odd = make_nearest("iq4 even"), make_nearest("iq4 odd")
    odd_at, codes_at = 4 * 48, 4 * 96
    look_code = lookup_i32[16]

    @inline
    def sides(x, w, s, inv, shift, table):
        """Return the nearest entries of both parities (codes, values) and by how much the odd one is worse."""
        v = vfma(x, inv, vsub(zero_f32x16(), shift))
        even_code, even_q = even(v, table)
        odd_code, odd_q = odd(v, table + odd_at)
        even_q, odd_q = vadd(even_q, shift), vadd(odd_q, shift)
        minus_s = vsub(zero_f32x16(), s)
        even_r, odd_r = vfma(minus_s, even_q, x), vfma(minus_s, odd_q, x)
        gap = vmul(w, vsub(vmul(odd_r, odd_r), vmul(even_r, even_r)))
        return even_code, odd_code, even_q, odd_q, gap

    @inline
    def settle(g0, g1, g2, g3):
        """Negate the least gap in lanes where an odd number of gaps is negative."""
        one, minus_one, zero = splat_f32x16(_F1), splat_f32x16(-_F1), zero_f32x16()
        parity = vmul(
            vmul(where_less(g0, zero, minus_one, one), where_less(g1, zero, minus_one, one)),
            vmul(where_less(g2, zero, minus_one, one), where_less(g3, zero, minus_one, one)),
        )
        a0, a1, a2, a3 = vabs(g0), vabs(g1), vabs(g2), vabs(g3)
        low, high = vmin(a0, a1), vmin(a2, a3)
        # +1 where this element gives way, by elimination, so that it is exactly one
        in_high = where_less(high, low, one, zero)
        in_1 = vmul(vsub(one, in_high), where_less(a1, a0, one, zero))
        in_3 = vmul(in_high, where_less(a3, a2, one, zero))
        in_0, in_2 = vsub(vsub(one, in_high), in_1), vsub(in_high, in_3)
        return (
            side(g0, in_0, parity), side(g1, in_1, parity), side(g2, in_2, parity), side(g3, in_3, parity)
        )  # fmt: skip

    @inline
    def side(gap, gives_way, parity):
        """Return -1 for the odd entry, 1 for the even one."""
        one, minus_one, zero = splat_f32x16(_F1), splat_f32x16(-_F1), zero_f32x16()
        own = where_less(gap, zero, minus_one, one)
        flipped = where_less(parity, zero, where_less(splat_f32x16(_HALF), gives_way, minus_one, one), one)
        return vmul(own, flipped)

    @inline
    def add(x, w, s, q, error, slope, curve):
        r = vfma(vsub(zero_f32x16(), s), q, x)
        wr = vmul(w, r)
        return vfma(wr, r, error), vfma(wr, q, slope), vfma(vmul(w, q), q, curve)

    @inline
    def evaluate(x, w, s, shift, table):
        inv = inverse(s)
        zero = zero_f32x16()
        error, slope, curve = zero, zero, zero
        for i in range(8):
            x0, x1 = load_f32x16(x + 128 * i), load_f32x16(x + 128 * i + 1024)
            x2, x3 = load_f32x16(x + 128 * i + 64), load_f32x16(x + 128 * i + 1088)
            w0, w1 = load_f32x16(w + 128 * i), load_f32x16(w + 128 * i + 1024)
            w2, w3 = load_f32x16(w + 128 * i + 64), load_f32x16(w + 128 * i + 1088)
            _, _, e0, o0, g0 = sides(x0, w0, s, inv, shift, table)
            _, _, e1, o1, g1 = sides(x1, w1, s, inv, shift, table)
            _, _, e2, o2, g2 = sides(x2, w2, s, inv, shift, table)
            _, _, e3, o3, g3 = sides(x3, w3, s, inv, shift, table)
            p0, p1, p2, p3 = settle(g0, g1, g2, g3)
            error, slope, curve = add(x0, w0, s, where_less(p0, zero, o0, e0), error, slope, curve)
            error, slope, curve = add(x1, w1, s, where_less(p1, zero, o1, e1), error, slope, curve)
            error, slope, curve = add(x2, w2, s, where_less(p2, zero, o2, e2), error, slope, curve)
            error, slope, curve = add(x3, w3, s, where_less(p3, zero, o3, e3), error, slope, curve)
        return error, slope, curve

    @inline
    def write(code_even, code_odd, p, j, table, out, scratch, n_valid):
        even_code, odd_code = look_code(table + codes_at, code_even), look_code(table + codes_at + 64, code_odd)
        store_i32x16(scratch, where_less(p, zero_f32x16(), odd_code, even_code))
        for lane in range(n_valid):
            st_i8(out + 32 * lane + j, ld_i32(scratch + 4 * lane))

    @inline
    def write_codes(x, w, s, shift, table, out, scratch, n_valid):
        inv = inverse(s)
        for i in range(8):
            j0, j1, j2, j3 = 2 * i, 2 * i + 16, 2 * i + 1, 2 * i + 17
            c0, d0, _, _, g0 = sides(load_f32x16(x + 64 * j0), load_f32x16(w + 64 * j0), s, inv, shift, table)
            c1, d1, _, _, g1 = sides(load_f32x16(x + 64 * j1), load_f32x16(w + 64 * j1), s, inv, shift, table)
            c2, d2, _, _, g2 = sides(load_f32x16(x + 64 * j2), load_f32x16(w + 64 * j2), s, inv, shift, table)
            c3, d3, _, _, g3 = sides(load_f32x16(x + 64 * j3), load_f32x16(w + 64 * j3), s, inv, shift, table)
            p0, p1, p2, p3 = settle(g0, g1, g2, g3)
            write(c0, d0, p0, j0, table, out, scratch, n_valid)
            write(c1, d1, p1, j1, table, out, scratch, n_valid)
            write(c2, d2, p2, j2, table, out, scratch, n_valid)
            write(c3, d3, p3, j3, table, out, scratch, n_valid)

    return evaluate, write_codes


def make_search_parity():
    """Return kernel(params) of IQ4_KSS."""
    evaluate, write_codes = _make_parity()
    return make_driver(evaluate, write_codes, 32, -127, 127, 1, SHAPES["iq4"].shift, 2, 0, 32)


def _make_pairs():
    """Return the device functions of IQ2_KL."""
    nearest_pair = make_nearest_pair([(float(a), float(b)) for a, b in IQ2_KL_VALUES])
    look = lookup_f32[32]

    @inline
    def evaluate(x, w, s, shift, table):
        inv = inverse(s)
        zero = zero_f32x16()
        minus_s = vsub(zero, s)
        error, slope, curve = zero, zero, zero
        for p in range(16):
            x0, x1 = load_f32x16(x + 128 * p), load_f32x16(x + 128 * p + 64)
            w0, w1 = load_f32x16(w + 128 * p), load_f32x16(w + 128 * p + 64)
            code = nearest_pair(vmul(x0, inv), w0, vmul(x1, inv), w1)
            q0, q1 = look(table, code), look(table + 128, code)
            r0, r1 = vfma(minus_s, q0, x0), vfma(minus_s, q1, x1)
            wr0, wr1 = vmul(w0, r0), vmul(w1, r1)
            error, slope = vfma(wr1, r1, vfma(wr0, r0, error)), vfma(wr1, q1, vfma(wr0, q0, slope))
            curve = vfma(vmul(w1, q1), q1, vfma(vmul(w0, q0), q0, curve))
        return error, slope, curve

    @inline
    def write_codes(x, w, s, shift, table, out, scratch, n_valid):
        inv = inverse(s)
        for p in range(16):
            x0, x1 = load_f32x16(x + 128 * p), load_f32x16(x + 128 * p + 64)
            w0, w1 = load_f32x16(w + 128 * p), load_f32x16(w + 128 * p + 64)
            store_i32x16(scratch, nearest_pair(vmul(x0, inv), w0, vmul(x1, inv), w1))
            for lane in range(n_valid):
                st_i8(out + 16 * lane + p, ld_i32(scratch + 4 * lane))

    return evaluate, write_codes


def make_search_pairs():
    """Return kernel(params) of IQ2_KL."""
    evaluate, write_codes = _make_pairs()
    return make_driver(evaluate, write_codes, 32, -32, 31, 0, 0, 1, 1, 16)
