"""Norms other than weighted `rms_norm`: around the mean, without weights, with bias. A cut above the mean."""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import sum_squares
from ikcli.backends.cpu.kernels.common import n_rows
from ikcli.backends.cpu.kernels.glu import relu, vrelu
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_layers import CutParams, NormParams
from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    ld_f32,
    load_f32x16,
    reduce_add,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vadd,
    vfma,
    vmul,
    vsub,
    zero_f32x16,
)

_F0, _F1 = np.float32(0.0), np.float32(1.0)


@inline
def mean(x, n):
    full = n & ~15
    acc = zero_f32x16()
    for i in range(0, full, 16):
        acc = vadd(acc, load_f32x16(x + 4 * i))
    total = reduce_add(acc)
    for i in range(full, n):
        total += ld_f32(x + 4 * i)
    return total / np.float32(n)


@inline
def sum_squares_around(x, n, middle):
    full, m = n & ~15, splat_f32x16(middle)
    acc = zero_f32x16()
    for i in range(0, full, 16):
        v = vsub(load_f32x16(x + 4 * i), m)
        acc = vfma(v, v, acc)
    total = reduce_add(acc)
    for i in range(full, n):
        d = ld_f32(x + 4 * i) - middle
        total += d * d
    return total


def make_norm(kind, weighted, biased):
    around_mean, of_sum, plain = kind == "layer", kind == "l2", kind == "none"

    @kernel(NormParams)
    def norm(params, ith, nth):
        x, w, b, out = params.x, params.w, params.b, params.out
        cols, width, eps = params.cols, params.width, params.eps
        groups, full = cols // width, width & ~15
        items = n_rows(params) * groups
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            src, dst = x + 4 * item * width, out + 4 * item * width
            at = item % groups * width
            middle = mean(src, width) if around_mean else _F0
            squares = _F0
            if not plain:
                squares = sum_squares_around(src, width, middle) if around_mean else sum_squares(src, width)
            if plain:
                scale = _F1
            elif of_sum:
                root = np.float32(math.sqrt(squares))
                scale = _F1 / (eps if root < eps else root)  # NaN stays
            else:
                scale = _F1 / np.float32(math.sqrt(squares / np.float32(width) + eps))
            m, s = splat_f32x16(middle), splat_f32x16(scale)
            wx = w + 4 * (at % params.w_period) if weighted else w
            bx = b + 4 * (at % params.b_period) if biased else b
            for i in range(0, full, 16):
                v = vmul(vsub(load_f32x16(src + 4 * i), m), s)
                if weighted:
                    v = vmul(v, load_f32x16(wx + 4 * i))
                if biased:
                    v = vadd(v, load_f32x16(bx + 4 * i))
                store_f32x16(dst + 4 * i, v)
            for i in range(full, width):
                y = (ld_f32(src + 4 * i) - middle) * scale
                if weighted:
                    y = y * ld_f32(wx + 4 * i)
                if biased:
                    y = y + ld_f32(bx + 4 * i)
                st_f32(dst + 4 * i, y)

    return norm


def make_cut():
    """Return the kernel that keeps of rows what is above so many standard deviations over their mean."""

    @kernel(CutParams)
    def cut(params, ith, nth):
        cols, rows = params.cols, n_rows(params)
        full = cols & ~15
        for row in range(rows * ith // nth, rows * (ith + 1) // nth):
            x, out = params.x + 4 * cols * row, params.out + 4 * cols * row
            middle = mean(x, cols)
            spread = np.float32(math.sqrt(sum_squares_around(x, cols, middle) / np.float32(cols)))
            least = middle + params.z * spread
            v = splat_f32x16(least)
            for i in range(0, full, 16):
                store_f32x16(out + 4 * i, vrelu(vsub(load_f32x16(x + 4 * i), v)))
            for i in range(full, cols):
                st_f32(out + 4 * i, relu(ld_f32(x + 4 * i) - least))

    return cut
