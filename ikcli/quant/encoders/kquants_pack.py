"""Pack K-quant super-blocks: move codes, sub-block integers and scales from the search's scratch to the stored bytes.

In scratch the code of weight i of sub-block `lane` is the byte CODES + 16*i + lane; integers are bytes LS + lane and
MS + lane, super-block scales float32 at D + 4*lane and DMIN + 4*lane. Layouts as in ggml-common.h (block_q2_K, ...).
"""

# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import numpy as np

from ikcli.native.jit import inline
from ikcli.native.simd.half import st_f16
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i8,
    ld_u8,
    load_f32x16,
    reduce_add,
    reduce_max,
    splat_f32x16,
    st_f32,
    st_i8,
    vabs,
    vfma,
    vmax,
    vmul,
    vround_even,
    vsub,
    zero_f32x16,
)

# Scratch: values, weights, codes, sub-block scales, sub-block minima, super-block scales.
XS, WS, CODES, LS, MS, D, DMIN, SCRATCH_BYTES = 0, 2048, 4096, 4608, 4624, 4672, 4736, 4800


@inline
def crumbs16(out, codes, lane):
    """Pack 2-bit codes of 16 sub-blocks of 16 into 64 bytes.

    Byte 32h + l holds weights 128h + l + 0, 32, 64, 96.
    """
    for h in range(2):
        for l in range(32):  # noqa: E741
            at = codes + 16 * (l % 16) + lane + 8 * h + l // 16
            a, b, c, d = ld_u8(at) & 3, ld_u8(at + 2) & 3, ld_u8(at + 4) & 3, ld_u8(at + 6) & 3
            st_i8(out + 32 * h + l, a | b << 2 | c << 4 | d << 6)


@inline
def pack_q2_k(out, s, lane):
    for j in range(16):
        st_i8(out + j, ld_u8(s + LS + j) | ld_u8(s + MS + j) << 4)
    crumbs16(out + 16, s + CODES, lane)
    st_f16(out + 80, ld_f32(s + D))
    st_f16(out + 82, ld_f32(s + DMIN))


@inline
def pack_q3_k(out, s, lane):
    for l in range(32):  # noqa: E741
        bits = 0
        for g in range(8):
            bits |= (ld_u8(s + CODES + 16 * (l % 16) + 2 * g + l // 16) >> 2) << g
        st_i8(out + l, bits)
    crumbs16(out + 32, s + CODES, lane)
    for i in range(8):
        a, b = ld_i8(s + LS + i) + 32, ld_i8(s + LS + i + 8) + 32
        st_i8(out + 96 + i, a & 15 | (b & 15) << 4)
    for i in range(4):
        bits = 0
        for k in range(4):
            bits |= ((ld_i8(s + LS + i + 4 * k) + 32) >> 4) << 2 * k
        st_i8(out + 104 + i, bits)
    st_f16(out + 108, ld_f32(s + D))


@inline
def pack_q6_k(out, s, lane):
    for h in range(2):
        for l in range(32):  # noqa: E741
            at = s + CODES + 16 * (l % 16) + 8 * h + l // 16
            a, b, c, d = ld_u8(at), ld_u8(at + 2), ld_u8(at + 4), ld_u8(at + 6)
            st_i8(out + 64 * h + l, a & 15 | (c & 15) << 4)
            st_i8(out + 64 * h + 32 + l, b & 15 | (d & 15) << 4)
            st_i8(out + 128 + 32 * h + l, a >> 4 | (b >> 4) << 2 | (c >> 4) << 4 | (d >> 4) << 6)
    for j in range(16):
        st_i8(out + 192 + j, ld_i8(s + LS + j))
    st_f16(out + 208, ld_f32(s + D))


@inline
def pack_iq4_xs(out, s, lane):
    st_f16(out, ld_f32(s + D + 4 * lane))
    high = 0
    for j in range(4):
        a, b = ld_i8(s + LS + lane + 2 * j) + 32, ld_i8(s + LS + lane + 2 * j + 1) + 32
        st_i8(out + 4 + j, a & 15 | (b & 15) << 4)
        high |= (a >> 4 | (b >> 4) << 2) << 4 * j
    st_i8(out + 2, high)
    st_i8(out + 3, high >> 8)
    for j in range(8):
        for i in range(16):
            at = s + CODES + 16 * i + lane + j
            st_i8(out + 8 + 16 * j + i, ld_u8(at) | ld_u8(at + 256) << 4)


@inline
def scales_6bit(out, s, lane):
    """Pack 8 scales and 8 minima of 6 bits into 12 bytes."""
    for j in range(4):
        a, b = ld_u8(s + LS + lane + j), ld_u8(s + LS + lane + j + 4)
        c, d = ld_u8(s + MS + lane + j), ld_u8(s + MS + lane + j + 4)
        st_i8(out + j, a | (b >> 4) << 6)
        st_i8(out + 4 + j, c | (d >> 4) << 6)
        st_i8(out + 8 + j, b & 15 | (d & 15) << 4)


@inline
def nibbles32(out, codes):
    """Pack 128 bytes: low nibbles of sub-block 2p, high nibbles of sub-block 2p + 1."""
    for p in range(4):
        for i in range(32):
            at = codes + 16 * i + 2 * p
            st_i8(out + 32 * p + i, ld_u8(at) & 15 | (ld_u8(at + 1) & 15) << 4)


@inline
def pack_q4_k(out, s, lane):
    st_f16(out, ld_f32(s + D + 4 * lane))
    st_f16(out + 2, ld_f32(s + DMIN + 4 * lane))
    scales_6bit(out + 4, s, lane)
    nibbles32(out + 16, s + CODES + lane)


@inline
def pack_q5_k(out, s, lane):
    st_f16(out, ld_f32(s + D + 4 * lane))
    st_f16(out + 2, ld_f32(s + DMIN + 4 * lane))
    scales_6bit(out + 4, s, lane)
    for i in range(32):
        bits = 0
        for j in range(8):
            bits |= (ld_u8(s + CODES + 16 * i + lane + j) >> 4) << j
        st_i8(out + 16 + i, bits)
    nibbles32(out + 48, s + CODES + lane)


_PACK = {
    "Q2_K": (pack_q2_k, 84),
    "Q3_K": (pack_q3_k, 110),
    "Q4_K": (pack_q4_k, 144),
    "Q5_K": (pack_q5_k, 176),
    "Q6_K": (pack_q6_k, 210),
    "IQ4_XS": (pack_iq4_xs, 136),
}


def make_pack(kind):
    """Return (device function (out, scratch, first lane), bytes per super-block)."""
    return _PACK[kind]


@inline
def ternary_scale(x, ne0):
    """Return the largest value of a row that is ternary, else 0.

    Ternary means that {-1, 0, 1} times that value is within a tenth of the square of every super-block.
    """
    peak = zero_f32x16()
    for i in range(0, ne0, 16):
        peak = vmax(peak, vabs(load_f32x16(x + 4 * i)))
    largest = reduce_max(peak)
    if largest < np.float32(1e-20):
        return np.float32(0.0)
    factor = splat_f32x16(np.float32(1.0) / largest)
    for u in range(ne0 // 256):
        square, error = zero_f32x16(), zero_f32x16()
        for i in range(16):
            v = vmul(load_f32x16(x + 1024 * u + 64 * i), factor)
            miss = vsub(v, vround_even(v))
            square, error = vfma(v, v, square), vfma(miss, miss, error)
        if reduce_add(error) > np.float32(0.1) * reduce_add(square):
            return np.float32(0.0)
    return largest


def make_ternary_q2_k():
    """Return a kernel that stores rows that are ternary up to a scale: d = dmin = scale, codes 0 1 2.

    It sets the flag of such rows.
    """

    def ternary_q2_k(x, n_rows, ne0, out, flags, s):
        for row in range(n_rows):
            src = x + 4 * ne0 * row
            largest = ternary_scale(src, ne0)
            st_i8(flags + row, 1 if largest > np.float32(0.0) else 0)
            if largest > np.float32(0.0):
                for lane in range(16):
                    st_i8(s + LS + lane, 1)
                    st_i8(s + MS + lane, 1)
                st_f32(s + D, min(largest, np.float32(65504.0)))
                st_f32(s + DMIN, min(largest, np.float32(65504.0)))
                for u in range(ne0 // 256):
                    for i in range(256):
                        v = ld_f32(src + 1024 * u + 4 * i) / largest
                        code = 2 if v > np.float32(0.5) else (0 if v < np.float32(-0.5) else 1)
                        st_i8(s + CODES + 16 * (i % 16) + i // 16, code)
                    pack_q2_k(out + 84 * (row * (ne0 // 256) + u), s, 0)

    return ternary_q2_k, 6, False
