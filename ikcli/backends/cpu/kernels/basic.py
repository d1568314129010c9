"""Row-wise and element-wise kernels: embeddings, norms, sums, activations, rotary positions, row selection.

All values are float32, rows contiguous. Column counts need not be multiples of 16: tails are handled with scalars or
partial stores. Corresponds to ggml's get_rows, rms_norm, add, silu/mul, rope, concat.
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.common import N_TOKENS, OUT_IDS, POS, n_rows, state_word
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import (
    AddParams,
    ConcatParams,
    MapParams,
    RmsNormParams,
    RopeParams,
    RopeTableParams,
    SwiGluParams,
)
from ikcli.native.jit import inline, merge
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
    """Copy n floats: dst[:n] = src[:n]."""
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
    @kernel(RmsNormParams)
    def rms_norm(params, ith, nth):
        x, stride, out, cols, width = params.x, params.stride, params.out, params.cols, params.width
        x += params.offset
        w, eps = params.w, params.eps
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
    """Return this thread's share of n elements, in units of 16."""
    units = (n + 15) >> 4
    lo, hi = (units * ith // nth) << 4, (units * (ith + 1) // nth) << 4
    return lo, min(hi, n)


def make_add():
    @kernel(AddParams)
    def add(params, ith, nth):
        x, y, out, cols = params.x, params.y, params.out, params.cols
        rows = n_rows(params)
        if params.y_is_row != 0:
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


@merge
def scale_span(out, x, factor, lo, hi):
    full, v = lo + ((hi - lo) & ~15), splat_f32x16(factor)
    for i in range(lo, full, 16):
        store_f32x16(out + 4 * i, vmul(load_f32x16(x + 4 * i), v))
    for i in range(full, hi):
        st_f32(out + 4 * i, ld_f32(x + 4 * i) * factor)


@inline
def swiglu_span(out, gate, up, lo, hi):
    full = lo + ((hi - lo) & ~15)
    for i in range(lo, full, 16):
        store_f32x16(out + 4 * i, vmul(vsilu(load_f32x16(gate + 4 * i)), load_f32x16(up + 4 * i)))
    for i in range(full, hi):
        g = ld_f32(gate + 4 * i)
        st_f32(out + 4 * i, g / (_F1 + np.float32(math.exp(-g))) * ld_f32(up + 4 * i))


def make_swiglu():
    @kernel(SwiGluParams)
    def swiglu(params, ith, nth):
        lo, hi = span(n_rows(params) * params.cols, ith, nth)
        swiglu_span(params.out, params.gate, params.up, lo, hi)

    return swiglu


def make_concat():
    """Return a kernel that copies one part, head by head."""

    @kernel(ConcatParams)
    def concat(params, ith, nth):
        src, src_stride, n, dst, dst_stride = params.src, params.src_stride, params.cols, params.dst, params.dst_stride
        heads, src_head, dst_head = params.heads, params.src_head, params.dst_head
        items = n_rows(params) * heads
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, h = item // heads, item % heads
            copy_f32(dst + row * dst_stride + h * dst_head, src + row * src_stride + h * src_head, n)

    return concat


def make_get_rows():
    """Return a kernel that copies the rows listed in out_ids."""

    @kernel(MapParams)
    def get_rows(params, ith, nth):
        x, out, cols, ids = params.x, params.out, params.cols, state_word(params, OUT_IDS)
        rows = n_rows(params)
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            copy_f32(out + 4 * row * cols, x + 4 * ld_i64(ids + 8 * row) * cols, cols)

    return get_rows


def make_rope_table():
    """Return a kernel that writes cos and sin per pair."""

    @kernel(RopeTableParams)
    def rope_table(params, ith, nth):
        out, pairs, freqs, mscale = params.out, params.pairs, params.freqs, params.mscale
        pos = state_word(params, POS)
        items = state_word(params, N_TOKENS) * pairs
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, pair = item // pairs, item % pairs
            theta = (ld_i32(pos + 4 * row) - params.lag) * ld_f64(freqs + 8 * pair)
            st_f32(out + 8 * item, np.float32(math.cos(theta)) * mscale)
            st_f32(out + 8 * item + 4, np.float32(math.sin(theta)) * mscale)

    return rope_table


def make_rope():
    @kernel(RopeParams)
    def rope(params, ith, nth):
        x, table, out, heads, dim = params.x, params.table, params.out, params.heads, params.dim
        offset, n_rot, neox = params.offset, params.n_rot, params.neox
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
