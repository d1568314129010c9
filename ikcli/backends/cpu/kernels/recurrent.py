"""Kernels around the delta rule: short convolution, norm of heads, decays, gated norm. float32, rows contiguous."""

import math

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.basic import span, sum_squares
from ikcli.backends.cpu.kernels.common import N_SEG, SEG_N_TOKENS, SEG_TOKEN, SEG_WORDS, SEGMENTS, n_rows, state_word
from ikcli.backends.cpu.kernels.elements import sigmoid
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.kernels.sgemm import load_f32x16_at, offset
from ikcli.backends.cpu.kernels.state_rows import begins, state_row
from ikcli.backends.cpu.params_layers import CONV_BLOCK, DecayParams, GatedNormParams, L2NormParams, ShortConvParams
from ikcli.native.jit import inline
from ikcli.native.simd.math import vexp, vsigmoid, vsilu, vsoftplus
from ikcli.native.simd.vec import (
    ld_f32,
    ld_i64,
    load_f32x16,
    pointer,
    splat_f32x16,
    st_f32,
    store_f32x16,
    vabs,
    vadd,
    vfma,
    vmul,
    zero_f32x16,
)

_F0, _F1 = np.float32(0.0), np.float32(1.0)


def _make_tap_rows(n_taps):
    """Return tap_rows(w, to): the taps of 16 columns as rows CONV_BLOCK columns apart.

    In w they lie column by column.
    """

    @intrinsic
    def tap_rows(typingctx, w, to):
        def codegen(context, builder, sig, args):
            all_taps = load_f32x16_at(builder, args[0], ir.VectorType(ir.FloatType(), 16 * n_taps))
            for j in range(n_taps):
                pick = ir.Constant(ir.VectorType(ir.IntType(32), 16), [n_taps * i + j for i in range(16)])
                row = builder.shuffle_vector(all_taps, all_taps, pick)
                builder.store(row, pointer(builder, offset(builder, args[1], 4 * CONV_BLOCK * j), row.type), align=1)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), codegen

    return tap_rows


def make_short_conv(n_taps, linear=False):
    """Return the convolution, `linear` without silu; columns are a multiple of 16."""
    before = n_taps - 1
    tap_rows = _make_tap_rows(n_taps)

    @inline
    def conv_rows(x, x_stride, old, old_stride, fresh, taps, bias, out, out_stride, n):
        """Convolve 16 columns of a segment; then the state takes its last rows."""
        for t in range(n):
            acc = bias
            for j in range(n_taps):
                r = t + j - before
                tap = load_f32x16(taps + 4 * CONV_BLOCK * j)
                if r >= 0:
                    acc = vfma(tap, load_f32x16(x + r * x_stride), acc)
                elif not fresh:
                    acc = vfma(tap, load_f32x16(old + (r + before) * old_stride), acc)
            store_f32x16(out + t * out_stride, acc if linear else vsilu(acc))
        for j in range(before):
            r = n + j - before
            if r >= 0:
                row = load_f32x16(x + r * x_stride)
            elif fresh:
                row = zero_f32x16()
            else:
                row = load_f32x16(old + (r + before) * old_stride)
            store_f32x16(old + j * old_stride, row)

    @kernel(ShortConvParams)
    def short_conv(params, ith, nth):
        x, x_stride, w, out, out_stride, cols = (
            params.x,
            params.x_stride,
            params.w,
            params.out,
            params.out_stride,
            params.cols,
        )
        states, state_bytes, row_bytes = params.states, params.state_bytes, params.row_bytes
        taps = params.taps + ith * params.taps_bytes
        lo, hi = span(cols, ith, nth)
        segments, n_seg = state_word(params, SEGMENTS), state_word(params, N_SEG)
        for c0 in range(lo, hi, CONV_BLOCK):
            width = min(CONV_BLOCK, hi - c0)
            for c in range(0, width, 16):
                tap_rows(w + 4 * n_taps * (c0 + c), taps + 4 * c)
            for i in range(n_seg):
                start = ld_i64(segments + 8 * (SEG_WORDS * i + SEG_TOKEN))
                n = ld_i64(segments + 8 * (SEG_WORDS * i + SEG_N_TOKENS))
                state, fresh = state_row(params, i, states, state_bytes), begins(params, i)
                for c in range(0, width, 16):
                    at = 4 * (c0 + c)
                    bias = load_f32x16(params.bias + at) if params.bias else zero_f32x16()
                    conv_rows(x + start * x_stride + at, x_stride, state + at, row_bytes, fresh, taps + 4 * c, bias,
                              out + start * out_stride + at, out_stride, n)  # fmt: skip

    return short_conv


def make_l2_norm():
    @kernel(L2NormParams)
    def l2_norm(params, ith, nth):
        x, stride, out, cols, width = (params.x + params.offset, params.stride, params.out, params.cols, params.width)
        eps, groups = params.eps, cols // width
        items, full = n_rows(params) * groups, width & ~15
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            row, group = item // groups, item % groups
            src = x + row * stride + 4 * group * width
            dst = out + 4 * (row * cols + group * width)
            scale = _F1 / np.float32(math.sqrt(sum_squares(src, width) + eps))
            for i in range(0, full, 16):
                store_f32x16(dst + 4 * i, vmul(load_f32x16(src + 4 * i), splat_f32x16(scale)))
            for i in range(full, width):
                st_f32(dst + 4 * i, ld_f32(src + 4 * i) * scale)

    return l2_norm


def make_decay(bounded):
    @inline
    def one(x, a, bound):
        if bounded:
            return np.float32(math.exp(bound * sigmoid(abs(a) * x)))
        soft = max(x, _F0) + np.float32(math.log1p(math.exp(-abs(x))))
        return np.float32(math.exp(a * soft))

    @inline
    def many(x, a, bound):
        if bounded:
            return vexp(vmul(bound, vsigmoid(vmul(vabs(a), x))))
        return vexp(vmul(a, vsoftplus(x)))

    @kernel(DecayParams)
    def decay(params, ith, nth):
        x, dt, a, out, cols, heads = (params.x, params.dt, params.a, params.out, params.cols, params.heads)
        bound = params.bound
        width, bounds = cols // heads, splat_f32x16(bound)
        rows = n_rows(params)
        lo, hi = span(cols, ith, nth) if rows == 1 else (0, cols)
        first, stop = (0, 1) if rows == 1 else (rows * ith // nth, rows * (ith + 1) // nth)
        vectors = width == 1 or width % 16 == 0
        full = lo + ((hi - lo) & ~15) if vectors else lo
        for row in range(first, stop):
            src, dst = x + 4 * row * cols, out + 4 * row * cols
            for i in range(lo, full, 16):
                factor = load_f32x16(a + 4 * i) if width == 1 else splat_f32x16(ld_f32(a + 4 * (i // width)))
                shifted = vadd(load_f32x16(src + 4 * i), load_f32x16(dt + 4 * i))
                store_f32x16(dst + 4 * i, many(shifted, factor, bounds))
            for i in range(full, hi):
                shifted = ld_f32(src + 4 * i) + ld_f32(dt + 4 * i)
                st_f32(dst + 4 * i, one(shifted, ld_f32(a + 4 * (i // width)), bound))

    return decay


def make_gated_norm(activation):
    @inline
    def one(g):
        return g * sigmoid(g) if activation == "silu" else sigmoid(g)

    @inline
    def many(g):
        return vsilu(g) if activation == "silu" else vsigmoid(g)

    @kernel(GatedNormParams)
    def gated_norm(params, ith, nth):
        x, w, gate, out, cols, width = (params.x, params.w, params.gate, params.out, params.cols, params.width)
        eps = params.eps
        items, full = n_rows(params) * (cols // width), width & ~15
        for item in range(items * ith // nth, items * (ith + 1) // nth):
            at = 4 * item * width
            src, g, dst = x + at, gate + at, out + at
            scale = _F1 / np.float32(math.sqrt(sum_squares(src, width) / np.float32(width) + eps))
            scales = splat_f32x16(scale)
            for i in range(0, full, 16):
                normed = vmul(vmul(load_f32x16(src + 4 * i), scales), load_f32x16(w + 4 * i))
                store_f32x16(dst + 4 * i, vmul(normed, many(load_f32x16(g + 4 * i))))
            for i in range(full, width):
                st_f32(dst + 4 * i, ld_f32(src + 4 * i) * scale * ld_f32(w + 4 * i) * one(ld_f32(g + 4 * i)))

    return gated_norm
