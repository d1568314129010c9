# mypy: ignore-errors
"""Search the grid quants, first half: find the grid points that can be best for a group of values, at any scale.

A group of values x with weights w written as t * s * g (scale, signs, grid point) has the squared error
    sum(w x^2) + t * (t * B + A),   A = -2 sum(w |x| g),  B = sum(w g^2)
so every grid point is a line t -> t * B + A and the best point at t is the lowest line. Where the number of minus
signs must be even and is not, the cheapest sign is flipped, which changes A only. `candidates` evaluates all points of
the grid at 16 scales per group and keeps the lines that were lowest somewhere; that is nearly the whole lower
envelope, some ten lines of up to 2048. List: count i32 @0, A f32[17] @4, B f32[17] @72,
point i32[17] @140.
"""

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    bcast_f32x16,
    ld_f32,
    ld_i32,
    ld_i64,
    load_f32x16,
    reduce_add,
    reduce_max,
    splat_f32x16,
    splat_i32x16,
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
    vmul,
    zero_f32x16,
    zero_i32x16,
)
from ikcli.quant.encoders.iquants_simd import first_equal, lesser
from ikcli.quant.encoders.lane_kernels import where_less

LIST_BYTES = 208
_A, _B, _POINT = 4, 72, 140
# Kinds of sign: one bit per value; an even number of minus signs per 8 values; in the grid, which is shifted by +-1/8.
FREE, EVEN, TERNARY = 0, 1, 2

_F0, _F1, _M2, _HUGE = np.float32(0.0), np.float32(1.0), np.float32(-2.0), np.float32(3e38)
_SHIFT = np.float32(0.125)


@inline
def build_b(grid, n, dims, w, out, shift):
    """Compute B of every point: sum of w (g + shift)^2."""
    add = splat_f32x16(shift)
    for v in range(0, 4 * n, 64):
        acc = zero_f32x16()
        for i in range(dims):
            g = vadd(load_f32x16(grid + 4 * n * i + v), add)
            acc = vfma(vmul(g, g), bcast_f32x16(w + 4 * i), acc)
        store_f32x16(out + v, acc)


@inline
def build_a8(grid, n, p, out):
    """Compute A of every point of 8 values from the products p = -2 w x."""
    p0, p1, p2, p3 = bcast_f32x16(p), bcast_f32x16(p + 4), bcast_f32x16(p + 8), bcast_f32x16(p + 12)
    p4, p5, p6, p7 = bcast_f32x16(p + 16), bcast_f32x16(p + 20), bcast_f32x16(p + 24), bcast_f32x16(p + 28)
    s = 4 * n
    for v in range(0, s, 64):
        g = grid + v
        lo = vfma(p1, load_f32x16(g + s), vmul(p0, load_f32x16(g)))
        hi = vfma(p5, load_f32x16(g + 5 * s), vmul(p4, load_f32x16(g + 4 * s)))
        lo = vfma(p3, load_f32x16(g + 3 * s), vfma(p2, load_f32x16(g + 2 * s), lo))
        hi = vfma(p7, load_f32x16(g + 7 * s), vfma(p6, load_f32x16(g + 6 * s), hi))
        store_f32x16(out + v, vadd(lo, hi))


@inline
def build_a4(grid, n, p, out):
    """Compute A of every point of 4 values."""
    p0, p1, p2, p3 = bcast_f32x16(p), bcast_f32x16(p + 4), bcast_f32x16(p + 8), bcast_f32x16(p + 12)
    s = 4 * n
    for v in range(0, s, 64):
        g = grid + v
        lo = vfma(p1, load_f32x16(g + s), vmul(p0, load_f32x16(g)))
        store_f32x16(out + v, vfma(p3, load_f32x16(g + 3 * s), vfma(p2, load_f32x16(g + 2 * s), lo)))


@inline
def flip_cheapest(grid, n, dims, p, a, out):
    """Compute A of every point after flipping the sign that costs least at that point."""
    for v in range(0, 4 * n, 64):
        least = vmul(bcast_f32x16(p), load_f32x16(grid + v))
        for i in range(1, dims):
            least = vmax(least, vmul(bcast_f32x16(p + 4 * i), load_f32x16(grid + 4 * n * i + v)))
        store_f32x16(out + v, vfma(splat_f32x16(_M2), least, load_f32x16(a + v)))


@inline
def _sweep(a, b, n, t, best_at, chunk_at):
    """Find the lowest line at 16 scales: its value, and the offset of its 16 points."""
    best, chunk = splat_f32x16(_HUGE), zero_i32x16()
    for c in range(0, 4 * n, 64):
        low = vfma(bcast_f32x16(b + c), t, bcast_f32x16(a + c))
        for j in range(4, 64, 4):
            low = lesser(vfma(bcast_f32x16(b + c + j), t, bcast_f32x16(a + c + j)), low)
        chunk = where_less(low, best, splat_i32x16(c), chunk)
        best = lesser(low, best)
    store_f32x16(best_at, best)
    store_i32x16(chunk_at, chunk)


@inline
def _envelope(a, b, n, base, ratios, scratch, out, rest, shift):
    """Write the list of lines; `rest` is the point of least energy, the best one at large scales."""
    best, chunk, ts = scratch, scratch + 64, scratch + 128
    t = vmul(splat_f32x16(base), load_f32x16(ratios))
    store_f32x16(ts, t)
    _sweep(a, b, n, t, best, chunk)
    count, last = 0, -1
    for k in range(17):
        point = rest
        if k < 16:
            at = ld_i32(chunk + 4 * k)
            value = vfma(load_f32x16(b + at), bcast_f32x16(ts + 4 * k), load_f32x16(a + at))
            point = at // 4 + first_equal(value, bcast_f32x16(best + 4 * k))
        if point != last:
            st_f32(out + _A + 4 * count, ld_f32(a + 4 * point) + shift)
            st_f32(out + _B + 4 * count, ld_f32(b + 4 * point))
            st_i32(out + _POINT + 4 * count, point)
            count += 1
            last = point
    st_i32(out, count)


@inline
def products(x, w, p, signed):
    """Store p = -2 w |x| (or of x) of 8 values; return 1 if the number of negative ones is odd."""
    odd = 0
    for i in range(8):
        v = ld_f32(x + 4 * i)
        if v < _F0 and not signed:
            v = -v
            odd ^= 1
        st_f32(p + 4 * i, _M2 * ld_f32(w + 4 * i) * v)
    return odd


@inline
def _sum8(p):
    s = _F0
    for i in range(8):
        s += ld_f32(p + 4 * i)
    return s


def make_prepare():
    """Return a kernel that divides values by the largest magnitude of their span, and computes the RMS of sub-blocks.

    params: 0 values f32, 1 rows, 2 spans, 3 span, 4 sub-block, 5 weights f32 (columns), 6 x out f32, 7 divisors out
    (rows, spans), 8 RMS out (rows, subs).
    """

    def prepare(params):
        src, w, x = ld_i64(params), ld_i64(params + 40), ld_i64(params + 48)
        divisors, rms = ld_i64(params + 56), ld_i64(params + 64)
        n_spans, span, sub = ld_i64(params + 16), ld_i64(params + 24), ld_i64(params + 32)
        for i in range(ld_i64(params + 8) * n_spans):
            largest = zero_f32x16()
            for at in range(4 * span * i, 4 * span * (i + 1), 64):
                largest = vmax(largest, vabs(load_f32x16(src + at)))
            amax = reduce_max(largest)
            st_f32(divisors + 4 * i, amax)
            divisor = splat_f32x16(amax if amax > _F0 else _F1)
            for s in range(span // sub):
                first, column = 4 * (span * i + sub * s), 4 * (span * (i % n_spans) + sub * s)
                energy, weight = zero_f32x16(), zero_f32x16()
                for at in range(0, 4 * sub, 64):
                    v, wv = vdiv(load_f32x16(src + first + at), divisor), load_f32x16(w + column + at)
                    store_f32x16(x + first + at, v)
                    energy, weight = vfma(vmul(v, v), wv, energy), vadd(weight, wv)
                st_f32(rms + 4 * (span // sub * i + s), np.sqrt(reduce_add(energy) / reduce_add(weight)))

    return prepare, 1, False


def make_signs(dims, kind):
    """Return a kernel that writes sign bytes.

    Where the number of minus signs must be even, it flips the one that costs least at the chosen points (dims 4: in the
    half whose flag is set). params: 0 x, 1 rows, 2 columns / 8, 3 weights, 4 grid f32 (n, dims), 5 points i32, 6 sign
    bytes out.
    """
    halves = 8 // dims

    def signs(params):
        grid, n = ld_i64(params + 32), ld_i64(params + 16)
        for i in range(ld_i64(params + 8) * n):
            x, w = ld_i64(params) + 32 * i, ld_i64(params + 24) + 32 * (i % n)
            bits, odd = 0, 0
            for j in range(8):
                negative = 1 if ld_f32(x + 4 * j) < _F0 else 0
                bits |= negative << j
                odd ^= negative
            if kind == EVEN and odd == 1:
                low, where = _HUGE, 0
                for h in range(halves):
                    point = ld_i32(ld_i64(params + 40) + 4 * (halves * i + h))
                    if dims == 8 or point >= 65536:
                        for j in range(dims * h, dims * (h + 1)):
                            level = ld_f32(grid + 4 * (dims * (point & 65535) + j - dims * h))
                            cost = abs(ld_f32(x + 4 * j)) * ld_f32(w + 4 * j) * level
                            if cost < low:
                                low, where = cost, j
                bits ^= 1 << where
            st_i8(ld_i64(params + 48) + i, bits)

    return signs, 1, False


def make_candidates(dims, n, kind):
    """Return a kernel that makes the lists of all groups of some columns of some rows.

    params: 0 x, 1 its row bytes, 2 rows, 3 columns / 8, 4 weights, 5 grid f32 (dims, n), 6 ratios f32[16], 7 base
    scales f32, one per sub-block, 8 their row bytes, 9 sub-block / 8, 10 point of least energy, 11 lists, 12 their row
    bytes, 13 scratch.
    """
    halves = 8 // dims
    variants = 2 if kind == TERNARY or (kind == EVEN and dims == 4) else 1

    def candidates(params):
        grid, ratios, rest = ld_i64(params + 40), ld_i64(params + 48), ld_i64(params + 80)
        scratch = ld_i64(params + 104)
        p, a, flipped = scratch + 512, scratch + 1024, scratch + 1024 + 4 * n
        b = scratch + 1024 + 8 * n
        for u in range(ld_i64(params + 24)):
            w = ld_i64(params + 32) + 32 * u
            for h in range(halves):
                build_b(grid, n, dims, w + 4 * dims * h, b + 4 * n * h, _SHIFT if kind == TERNARY else _F0)
            if kind == TERNARY:
                build_b(grid, n, dims, w, b + 4 * n, -_SHIFT)
            for r in range(ld_i64(params + 16)):
                odd = products(ld_i64(params) + r * ld_i64(params + 8) + 32 * u, w, p, kind == TERNARY)
                base = ld_f32(ld_i64(params + 56) + r * ld_i64(params + 64) + 4 * (u // ld_i64(params + 72)))
                out = ld_i64(params + 88) + r * ld_i64(params + 96) + u * halves * variants * LIST_BYTES
                for h in range(halves):
                    bh = b + 4 * n * h
                    shift = _F0
                    at = a
                    if dims == 8:
                        build_a8(grid, n, p, a)
                    else:
                        build_a4(grid, n, p + 16 * h, a)
                    if kind == TERNARY:
                        shift = _SHIFT * _sum8(p)
                    if kind == EVEN and odd == 1:
                        flip_cheapest(grid, n, dims, p + 16 * h, a, flipped)
                        if variants == 1:
                            at = flipped
                    _envelope(at, bh, n, base, ratios, scratch, out, rest, shift)
                    if variants == 2:
                        second = out + LIST_BYTES
                        if kind == TERNARY:
                            _envelope(a, b + 4 * n, n, base, ratios, scratch, second, rest, -shift)
                        elif odd == 1:
                            _envelope(flipped, bh, n, base, ratios, scratch, second, rest, shift)
                        else:
                            st_i32(second, 0)
                    out += variants * LIST_BYTES

    return candidates, 1, False
