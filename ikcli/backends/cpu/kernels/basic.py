"""Row-wise and element-wise kernels: embeddings, norms, sums, activations, rotary positions, row selection.

All values are float32, rows contiguous. Column counts need not be multiples of 16: tails are handled with scalars or
partial stores. Answers to ggml's get_rows, rms_norm, add, silu/mul, rope, concat.
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.common import N_TOKENS, OUT_IDS, POS, n_rows, state_word, word
from ikcli.native.jit import inline
from ikcli.native.simd.math import vsilu
from ikcli.native.simd.vec import (
    ld_f32,
    ld_f64,
    ld_i32,
    ld_i64,
    load_f32x16,
    reduce_add,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vadd,
    vfma,
    vmul,
    zero_f32x16,
)

_F0, _F1 = np.float32(0.0), np.float32(1.0)


@inline
def copy_f32(dst, src, n):
    """dst[:n] = src[:n]."""
    full = n & ~15
    for i in range(0, full, 16):
        store_f32x16(dst + 4 * i, load_f32x16(src + 4 * i))
    for i in range(full, n):
        st_f32(dst + 4 * i, ld_f32(src + 4 * i))


@inline
def sum_squares(x, n):
    full = n & ~15
    acc = zero_f32x16()
    for i in range(0, full, 16):
        v = load_f32x16(x + 4 * i)
        acc = vfma(v, v, acc)
    total = reduce_add(acc)
    for i in range(full, n):
        total += ld_f32(x + 4 * i) * ld_f32(x + 4 * i)
    return total


def make_rms_norm():
    """params: 3 x, 4 row bytes of x, 5 offset in bytes, 6 weight, 7 out, 8 columns, 9 width, 10 eps (f32 bits)."""

    def rms_norm(params, ith, nth):
        x, stride, out, cols, width = (
            word(params, 3),
            word(params, 4),
            word(params, 7),
            word(params, 8),
            word(params, 9),
        )
        x += word(params, 5)
        w, eps = word(params, 6), ld_f32(params + 80)
        groups = cols // width
        items = n_rows(params) * groups
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, group = item // groups, item % groups
            src = x + row * stride + 4 * group * width
            dst = out + 4 * (row * cols + group * width)
            scale = _F1 / np.float32(math.sqrt(sum_squares(src, width) / np.float32(width) + eps))
            sv = splat_f32x16(scale)
            full = width & ~15
            for i in range(0, full, 16):
                store_f32x16(dst + 4 * i, vmul(vmul(load_f32x16(src + 4 * i), sv), load_f32x16(w + 4 * i)))
            for i in range(full, width):
                st_f32(dst + 4 * i, ld_f32(src + 4 * i) * scale * ld_f32(w + 4 * i))

    return rms_norm


@inline
def span(n, ith, nth):
    """This thread's share of n elements, in units of 16."""
    units = (n + 15) >> 4
    lo, hi = (units * ith // nth) << 4, (units * (ith + 1) // nth) << 4
    return lo, min(hi, n)


def make_add():
    """params: 3 x, 4 y, 5 out, 6 columns, 7: 1 = y is one row added to every row."""

    def add(params, ith, nth):
        x, y, out, cols = word(params, 3), word(params, 4), word(params, 5), word(params, 6)
        rows = n_rows(params)
        if word(params, 7) != 0:
            for row in range(rows * ith // nth, rows * (ith + 1) // nth):
                add_span(out + 4 * row * cols, x + 4 * row * cols, y, 0, cols)
        else:
            lo, hi = span(rows * cols, ith, nth)
            add_span(out, x, y, lo, hi)

    return add


@inline
def add_span(out, x, y, lo, hi):
    full = lo + ((hi - lo) & ~15)
    for i in range(lo, full, 16):
        store_f32x16(out + 4 * i, vadd(load_f32x16(x + 4 * i), load_f32x16(y + 4 * i)))
    for i in range(full, hi):
        st_f32(out + 4 * i, ld_f32(x + 4 * i) + ld_f32(y + 4 * i))


@inline
def swiglu_span(out, gate, up, lo, hi):
    full = lo + ((hi - lo) & ~15)
    for i in range(lo, full, 16):
        store_f32x16(out + 4 * i, vmul(vsilu(load_f32x16(gate + 4 * i)), load_f32x16(up + 4 * i)))
    for i in range(full, hi):
        g = ld_f32(gate + 4 * i)
        st_f32(out + 4 * i, g / (_F1 + np.float32(math.exp(-g))) * ld_f32(up + 4 * i))


def make_swiglu():
    """params: 3 gate, 4 up, 5 out, 6 columns."""

    def swiglu(params, ith, nth):
        lo, hi = span(n_rows(params) * word(params, 6), ith, nth)
        swiglu_span(word(params, 5), word(params, 3), word(params, 4), lo, hi)

    return swiglu


def make_concat():
    """Copy one part, head by head. params: 3 source, 4 its row bytes, 5 columns, 6 destination, 7 its row bytes,
    8 heads, 9 bytes between heads of the source, 10 of the destination."""

    def concat(params, ith, nth):
        src, src_stride, n, dst, dst_stride = (
            word(params, 3), word(params, 4), word(params, 5), word(params, 6), word(params, 7)
        )  # fmt: skip
        heads, src_head, dst_head = word(params, 8), word(params, 9), word(params, 10)
        items = n_rows(params) * heads
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, h = item // heads, item % heads
            copy_f32(dst + row * dst_stride + h * dst_head, src + row * src_stride + h * src_head, n)

    return concat


def make_get_rows():
    """Rows listed in out_ids: params: 3 x, 4 out, 5 columns."""

    def get_rows(params, ith, nth):
        x, out, cols, ids = word(params, 3), word(params, 4), word(params, 5), state_word(params, OUT_IDS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            copy_f32(out + 4 * row * cols, x + 4 * ld_i64(ids + 8 * row) * cols, cols)

    return get_rows


def make_rope_table():
    """params: 3 out, 4 pairs, 5 inv_freq (f64[pairs]), 6 mscale (f32 bits): cos, sin per pair."""

    def rope_table(params, ith, nth):
        out, pairs, freqs, mscale = word(params, 3), word(params, 4), word(params, 5), ld_f32(params + 48)
        pos = state_word(params, POS)
        items = state_word(params, N_TOKENS) * pairs
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, pair = item // pairs, item % pairs
            theta = ld_i32(pos + 4 * row) * ld_f64(freqs + 8 * pair)
            st_f32(out + 8 * item, np.float32(math.cos(theta)) * mscale)
            st_f32(out + 8 * item + 4, np.float32(math.sin(theta)) * mscale)

    return rope_table


def make_rope():
    """params: 3 x, 4 table, 5 out, 6 heads, 7 head columns, 8 offset, 9 rotated columns, 10: 1 = neox pairs."""

    def rope(params, ith, nth):
        x, table, out, heads, dim = word(params, 3), word(params, 4), word(params, 5), word(params, 6), word(params, 7)
        offset, n_rot, neox = word(params, 8), word(params, 9), word(params, 10)
        half = n_rot >> 1
        items = n_rows(params) * heads
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            cs = table + 4 * (item // heads) * n_rot
            src, dst = x + 4 * item * dim, out + 4 * item * dim
            if src != dst:
                copy_f32(dst, src, offset)
                copy_f32(dst + 4 * (offset + n_rot), src + 4 * (offset + n_rot), dim - offset - n_rot)
            src, dst = src + 4 * offset, dst + 4 * offset
            if neox != 0:
                for i in range(half):
                    rotate(dst, src, 4 * i, 4 * (i + half), cs + 8 * i)
            else:
                for i in range(half):
                    rotate(dst, src, 8 * i, 8 * i + 4, cs + 8 * i)

    return rope


@inline
def rotate(dst, src, a, b, cs):
    x, y, c, s = ld_f32(src + a), ld_f32(src + b), ld_f32(cs), ld_f32(cs + 4)
    st_f32(dst + a, x * c - y * s)
    st_f32(dst + b, x * s + y * c)
