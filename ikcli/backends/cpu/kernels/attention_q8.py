"""Compute scores of generation with a q8_0 K cache in integers: on ARM64 and with 512-bit dot products of bytes.

A row of Q becomes 15-bit codes with one scale, code = 128 * high + low: two signed bytes, so that rounding Q adds an
error far below that of the cache. The codes of K, with 128 added, are the unsigned operand; the start value of a sum
subtracts the sum of Q's codes that this adds. Two blocks of K (64 columns) make a vector. ARM64 multiplies signed bytes
and needs no such start; a sum of a block has four lanes there.

Q of a unit: 16 scales (lane row * positions + position), then [64 columns][row] of high, low, start (64 bytes each).
"""

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.sgemm import (
    CHUNK_ROW,
    fma_f32x16,
    load_f32x16_at,
    loop,
    offset,
    rows_left,
    store_block,
    sum_lanes,
)
from ikcli.native import isa
from ikcli.native.jit import merge
from ikcli.native.simd import arm64
from ikcli.native.simd.control import emit_prefetch
from ikcli.native.simd.dot import dot_u8_i8, emit_dot
from ikcli.native.simd.half import half_to_f32
from ikcli.native.simd.vec import (
    call_llvm,
    const_vector,
    cvt_f32x16_i32,
    f32x16,
    i8x64,
    i32x16,
    llvm_type,
    load_f32x16,
    load_i8x64,
    pointer,
    reduce_add,
    reduce_max,
    splat_f32x16,
    splat_i8x64,
    st_f32,
    store_i8x16,
    store_i32x16,
    trunc_i32x16_i8,
    vabs,
    vfma,
    vmax,
    vmul,
    vround_even,
    vshl,
    vsub,
    zero_f32x16,
    zero_i32x16,
)

_I8, _I16, _I32, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F0 = np.float32(0)
_TOP, _TINY, _BASE = np.float32(127 * 128), np.float32(1e-20), np.float32(128)
_BLOCK = 34
STEP_BYTES = 192  # of a row of Q, per 64 columns


@merge
def _row_codes(src, src_chunk, n_chunks, dst, dst_step, inverse):
    """Store codes of a row: [64 columns] high, low, start at every dst_step; missing columns are 0."""
    for c in range((n_chunks + 3) // 4 * 4):
        x = load_f32x16(src + c * src_chunk) if c < n_chunks else zero_f32x16()
        code = vround_even(vmul(x, splat_f32x16(inverse)))
        high = vround_even(vmul(code, splat_f32x16(np.float32(1) / _BASE)))
        low = vfma(high, splat_f32x16(-_BASE), code)
        at = dst + c // 4 * dst_step + 16 * (c % 4)
        store_i8x16(at, trunc_i32x16_i8(cvt_f32x16_i32(high)))
        store_i8x16(at + 64, trunc_i32x16_i8(cvt_f32x16_i32(low)))
    ones, zero = splat_i8x64(1), zero_i32x16()
    for at in range(dst, dst + (n_chunks + 3) // 4 * dst_step, dst_step):
        high = dot_u8_i8(zero, ones, load_i8x64(at))
        store_i32x16(at + 128, vsub(zero, dot_u8_i8(vshl(high, 7), ones, load_i8x64(at + 64))))


def make_quantize_q(m, n):
    """Return quantize_q(src, n_chunks, dst), which makes the codes that make_q8_scores reads.

    src: a unit of m rows, given as f32 chunks.
    """

    @merge
    def quantize_q(src, n_chunks, dst):
        for r in range(m):
            row = src + CHUNK_ROW * r
            top, nan = zero_f32x16(), zero_f32x16()
            for c in range(n_chunks):
                x = load_f32x16(row + CHUNK_ROW * m * c)
                top = vmax(top, vabs(x))
                nan = vfma(x, splat_f32x16(_F0), nan)
            largest = reduce_max(top)
            inverse = _TOP / largest if largest > _TINY else _F0
            scale = largest / _TOP + reduce_add(nan)
            for j in range(n):
                st_f32(dst + 4 * (r * n + j), scale)
            _row_codes(row, CHUNK_ROW * m, n_chunks, dst + 64 + STEP_BYTES * r, STEP_BYTES * m, inverse)

    return quantize_q


def _scales(builder, first, second):
    """Return f32x16 of the scales of two blocks, 8 lanes each."""
    t = ir.VectorType(_I16, 16)
    halves = ir.Constant(t, ir.Undefined)
    for lane, at in ((0, first), (1, second)):
        bits = builder.load(pointer(builder, at, _I16), align=1)
        halves = builder.insert_element(halves, bits, ir.Constant(_I32, lane))
    pick = ir.Constant(ir.VectorType(_I32, 16), [0] * 8 + [1] * 8)
    return half_to_f32(builder, builder.shuffle_vector(halves, halves, pick))


def _codes(builder, first, second):
    """Return the codes of two blocks, each plus 128."""
    t = ir.VectorType(_I8, 32)
    a, b = (builder.load(pointer(builder, offset(builder, at, 2), t), align=1) for at in (first, second))
    both = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, 64), list(range(64))))
    return builder.xor(both, const_vector(i8x64, [-128] * 64))


def _products(builder, qt, m, accs, blocks):
    """Return accs (f32x16) + products of m rows of Q with rows of K, two blocks each."""
    it, ft = llvm_type(i32x16), llvm_type(f32x16)
    n, out = len(blocks), list(accs)
    scales = [_scales(builder, *b) for b in blocks]
    codes = [_codes(builder, *b) for b in blocks]
    for i in range(m):
        high, low, start = (load_f32x16_at(builder, offset(builder, qt, STEP_BYTES * i + b), it) for b in (0, 64, 128))
        for j in range(n):
            x = emit_dot(builder, start, codes[j], high, 16)
            x = emit_dot(builder, builder.shl(x, const_vector(i32x16, [7] * 16)), codes[j], low, 16)
            out[i * n + j] = fma_f32x16(builder, builder.sitofp(x, ft), scales[j], out[i * n + j])
    return out


def _products_arm64(builder, qt, m, accs, blocks):
    """Return accs (f32x4) + the same products, block by block."""
    n, out, ft = len(blocks), list(accs), ir.VectorType(ir.FloatType(), 4)
    zero, seven = ir.Constant(arm64.WORDS, None), ir.Constant(arm64.WORDS, [7] * 4)
    for two in range(2):
        k = []  # codes and scale of every row of K
        for block in blocks:
            codes = [load_f32x16_at(builder, offset(builder, block[two], 2 + at), arm64.BYTES) for at in (0, 16)]
            bits = builder.load(pointer(builder, block[two], _I16), align=1)
            k.append((codes, splat4(builder, half_to_f32(builder, bits))))
        for i in range(m):
            at = offset(builder, qt, STEP_BYTES * i + 32 * two)
            high, low = ([load_f32x16_at(builder, offset(builder, at, b + c), arm64.BYTES) for c in (0, 16)]
                         for b in (0, 64))  # fmt: skip
            for j, (codes, scale) in enumerate(k):
                x = zero
                for q in (high, low):
                    x = builder.shl(x, seven) if q is low else x
                    for a, b in zip(codes, q, strict=True):
                        x = arm64.signed_dot(builder, x, a, b)
                args = [builder.sitofp(x, ft), scale, out[i * n + j]]
                out[i * n + j] = call_llvm(builder, "llvm.fma.v4f32", ft, args)
    return out


def splat4(builder, x):
    """Return a float in four lanes."""
    t = ir.VectorType(x.type, 4)
    one = builder.insert_element(ir.Constant(t, ir.Undefined), x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, 4), [0] * 4))


def make_q8_scores(m, n, lines):
    """Return scores as in attention_stream.make_scores, of q8_0 rows and a unit of quantized Q; m * n = 16."""
    products, lanes = (_products_arm64, 4) if isa.current().is_arm64 else (_products, 16)

    @intrinsic
    def scores(typingctx, q, k, k_stride, n_left, n_chunks, s, s_stride, next_):
        def codegen(context, builder, sig, args):
            q, k, k_stride, n_left, n_chunks, s, s_stride, next_ = args
            rows = rows_left(builder, k, k_stride, n, n_left)
            end = builder.mul(builder.udiv(n_chunks, ir.Constant(_I64, 2)), ir.Constant(_I64, _BLOCK))

            def step(state):
                qt, kt, at, *accs = state
                # Behind an odd block it is read again: those columns of Q are 0.
                two = offset(builder, kt, _BLOCK)
                two = builder.select(builder.icmp_unsigned("<", two, end), two, kt)
                blocks = [(builder.add(row, kt), builder.add(row, two)) for row in rows]
                accs = products(builder, qt, m, accs, blocks)
                at = emit_prefetch(builder, at, lines)
                return [offset(builder, qt, STEP_BYTES * m), offset(builder, kt, 2 * _BLOCK), at, *accs]

            zero = ir.Constant(ir.VectorType(ir.FloatType(), lanes), None)
            count = builder.udiv(offset(builder, n_chunks, 3), ir.Constant(_I64, 4))
            state = [offset(builder, q, 64), ir.Constant(_I64, 0), next_, *[zero] * (m * n)]
            _, _, _, *accs = loop(builder, count, state, step)
            sums = arm64.joined(builder, [sum_lanes(builder, accs[i : i + lanes]) for i in range(0, m * n, lanes)])
            sums = builder.fmul(sums, load_f32x16_at(builder, q))
            store_block(builder, sums, m, n, s, s_stride)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), codegen

    return scores
