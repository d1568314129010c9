"""Convert activations to the form that the weights' kernels read.

`q8`, for the integer kernels: int8 per 32 values, float32 scale, exact sums. A row of K values is stored as K int8 | d
f32[K/32] | s f32[K/32] = d * sum(q) | `first_sum()` - 128*sum(q) i32[K/32] | the same per 16 i32[K/16] | s per 16
f32[K/16], padded to 64 bytes | the int8 again, by quarters: of each 256 columns first columns 0..3 of all 16 blocks of
16, then columns 4..7 and so on (`kernels/row_dot.py`); with AVX2 their magnitudes instead, in order, and after these
what `_more` finds (`kernels/row_dot_avx2.py`). ARM64 leaves that part unused. Elsewhere a row of HALF_STEP values
is followed by a row with these values twice. No half-precision sums anywhere: those overflow in models with large
activations. `bf16`, for weights of bfloat16: rounded to nearest even. `f32`: as they are (only ever gathered). `i16`,
for weights that become 16-bit integers if rows are many, and stay floats if they are few: f32[K'], K' = K in whole
blocks of 128, then per 512 columns the blocks' scales (f32, 64 bytes) | i16[512].
"""

import math

import numpy as np

from ikcli.backends.cpu.kernels.basic import copy_f32
from ikcli.backends.cpu.kernels.common import n_rows
from ikcli.backends.cpu.kernels.pair_codes import NORM, TOP, rounded
from ikcli.backends.cpu.kernels.records import kernel
from ikcli.backends.cpu.params_products import ConvertParams, GatherParams
from ikcli.backends.cpu.tile_modes import (
    HALF_STEP,
    MORE_BYTES,
    PAIRS_BLOCK,
    PAIRS_PART,
    first_sum,
    quantized_bytes,
    reads_two_rows,
)
from ikcli.native import isa
from ikcli.native.jit import inline
from ikcli.native.simd.blocks import store_magnitudes, store_quarters, store_words_apart
from ikcli.native.simd.dot import store_i16x32
from ikcli.native.simd.half import st_bf16, store_bf16x16
from ikcli.native.simd.vec import (
    cvt_f32x16_i32,
    ld_f32,
    ld_i64,
    load_f32x16,
    load_i8x16,
    reduce_add,
    reduce_max,
    splat_f32x16,
    st_f32,
    st_i32,
    store_i8x16,
    trunc_i32x16_i8,
    vabs,
    vfma,
    vmax,
    vmul,
    vround_even,
    zero_f32x16,
)

_F0, _F1, _F127 = np.float32(0.0), np.float32(1.0), np.float32(127.0)
_FIRST = first_sum()
TWICE_AT = quantized_bytes(HALF_STEP)  # where the row with values twice begins
_TINY = np.float32(1e-36)  # smaller maxima count as zero: 127 / them would overflow
_TINY16 = np.float32(1e-33)  # ... TOP / them


@inline
def second_at(k):
    """Return where the codes by quarters, or magnitudes, begin in a row."""
    return (k + 28 * (k // 32) + 63) & ~63


@inline
def _by_quarters(second, k, ib, c0, c1):
    store_quarters(second + 256 * (ib // 8) + 8 * (ib % 8), c0, c1)


@inline
def _magnitudes(second, k, ib, c0, c1):
    store_magnitudes(second + 32 * ib, c0, c1)
    pairs = _more(second, k, ib) + 256 + 64 * (ib % 8 // 2) + 16 * (ib % 2)
    store_i8x16(pairs, c0)
    store_i8x16(pairs + 32, c1)
    store_i8x16(pairs + 256, load_i8x16(second + 32 * ib))
    store_i8x16(pairs + 288, load_i8x16(second + 32 * ib + 16))
    crossed = _more(second, k, ib) + 768 + 128 * (ib % 8 // 4) + 4 * (ib % 4)
    store_words_apart(crossed, 32, c0)
    store_words_apart(crossed + 16, 32, c1)


@inline
def _more(second, k, ib):
    """Return where more numbers begin, for 256 columns with block ib.

    s per 16 f32[16], those of every other block together | sum(q) per 16 i16[16] | d per 32 f32[8], those of every
    other block together | d per 32, four times each, f32[32] | int8, of each 64 columns 0..15, 32..47, 16..31,
    48..63 | their magnitudes | int8, of each 128 columns first columns 0..3 of the four blocks, then columns 16..19 of
    these, then columns 4..7 and so on.
    """
    return second + ((k + 255) & ~255) + MORE_BYTES * (ib // 8)


@inline
def _more_numbers(second, k, ib, d, s0, s1, sum0, sum1):
    at = _more(second, k, ib)
    st_f32(at + 32 * (ib % 8 // 4) + 4 * (ib % 4), s0)
    st_f32(at + 32 * (ib % 8 // 4) + 4 * (ib % 4) + 16, s1)
    st_i32(at + 64 + 4 * (ib % 8), (sum0 & 0xFFFF) + (sum1 << 16))
    st_f32(at + 96 + 16 * (ib % 2) + 4 * (ib % 8 // 2), d)
    for i in range(4):
        st_f32(at + 128 + 16 * (ib % 8) + 4 * i, d)


@inline
def _no_numbers(second, k, ib, d, s0, s1, sum0, sum1):
    return


@inline
def _no_second(second, k, ib, c0, c1):
    return


_store_second, _store_numbers = _by_quarters, _no_numbers
if isa.current().short_vectors:
    _store_second, _store_numbers = _magnitudes, _more_numbers
if isa.current().is_arm64:
    _store_second = _no_second


@inline
def quantize_blocks(src, dst, k, lo, hi):
    """Quantize blocks lo..hi-1 (of 32) of one row."""
    nb = k // 32
    d_at, s_at = dst + k, dst + k + 4 * nb
    sum32_at, sum16_at, s16_at = dst + k + 8 * nb, dst + k + 12 * nb, dst + k + 20 * nb
    second = dst + second_at(k)
    for ib in range(lo, hi):
        v0, v1 = load_f32x16(src + 128 * ib), load_f32x16(src + 128 * ib + 64)
        amax = reduce_max(vmax(vabs(v0), vabs(v1)))
        inv = _F127 / amax if amax > _TINY else _F0
        scale = splat_f32x16(inv)
        q0, q1 = vround_even(vmul(v0, scale)), vround_even(vmul(v1, scale))
        f0, f1 = reduce_add(q0), reduce_add(q1)
        d = amax / _F127 + ((f0 + f1) - (f0 + f1))  # NaN if any value is NaN or Inf: int8 cannot say so
        c0, c1 = trunc_i32x16_i8(cvt_f32x16_i32(q0)), trunc_i32x16_i8(cvt_f32x16_i32(q1))
        store_i8x16(dst + 32 * ib, c0)
        store_i8x16(dst + 32 * ib + 16, c1)
        _store_second(second, k, ib, c0, c1)
        # Sums are exact, and stored once per row here instead of being computed in every product that needs them.
        sum0, sum1 = np.int64(f0), np.int64(f1)
        st_f32(d_at + 4 * ib, d)
        st_f32(s_at + 4 * ib, d * np.float32(sum0 + sum1))
        st_i32(sum32_at + 4 * ib, _FIRST - 128 * (sum0 + sum1))
        st_i32(sum16_at + 8 * ib, _FIRST - 128 * sum0)
        st_i32(sum16_at + 8 * ib + 4, _FIRST - 128 * sum1)
        st_f32(s16_at + 8 * ib, d * f0)
        st_f32(s16_at + 8 * ib + 4, d * f1)
        _store_numbers(second, k, ib, d, d * f0, d * f1, sum0, sum1)


@inline
def quantize_span(src, dst, k, lo, hi):
    """Quantize blocks lo..hi-1 of one row, and of the row with these values twice."""
    quantize_blocks(src, dst, k, lo, hi)
    if k == HALF_STEP:
        for shift in (0, HALF_STEP):
            twice, blocks = dst + TWICE_AT, shift // 32
            quantize_blocks(src - 4 * shift, twice, 2 * HALF_STEP, lo + blocks, hi + blocks)


@inline
def round_span(src, dst, k, lo, hi):
    """Round columns lo..hi-1 of one row to bfloat16; a zero makes the number of columns even."""
    full = lo + ((hi - lo) & ~15)
    for i in range(lo, full, 16):
        store_bf16x16(dst + 2 * i, load_f32x16(src + 4 * i))
    # Columns behind the last whole vector, one by one: nothing is read past the row.
    for i in range(full, hi):
        st_bf16(dst + 2 * i, ld_f32(src + 4 * i))
    if hi == k and k & 1:
        st_bf16(dst + 2 * k, _F0)


@inline
def integers_at(k, k0):
    """Return where the part of an `i16` row begins that holds column k0, a multiple of PAIRS_PART."""
    return 4 * PAIRS_BLOCK * ((k + PAIRS_BLOCK - 1) // PAIRS_BLOCK) + k0 // PAIRS_PART * (64 + 2 * PAIRS_PART)


@inline
def integer_blocks(src, dst, k, lo, hi):
    """Convert blocks lo..hi-1 (of PAIRS_BLOCK) of one row; zeros fill up the last."""
    last = min(PAIRS_BLOCK * hi, k)
    copy_f32(dst + 4 * PAIRS_BLOCK * lo, src + 4 * PAIRS_BLOCK * lo, last - PAIRS_BLOCK * lo)
    for i in range(last, PAIRS_BLOCK * hi):
        st_f32(dst + 4 * i, _F0)
    for ib in range(lo, hi):
        first, x = PAIRS_BLOCK * ib // PAIRS_PART * PAIRS_PART, dst + 4 * PAIRS_BLOCK * ib
        inside, y = ib - first // PAIRS_BLOCK, dst + integers_at(k, first)
        top = zero_f32x16()
        for i in range(0, 4 * PAIRS_BLOCK, 64):
            top = vmax(top, vabs(load_f32x16(x + i)))
        # Scale by the largest first, so that squares cannot overflow; the norm then bounds every sum of products.
        largest = reduce_max(top)
        inverse = TOP / largest if largest > _TINY16 else _F0
        wide, squares = splat_f32x16(inverse), zero_f32x16()
        for i in range(0, 4 * PAIRS_BLOCK, 64):
            v = vmul(load_f32x16(x + i), wide)
            squares = vfma(v, v, squares)
        norm = reduce_add(squares)
        factor = min(_F1, NORM / np.float32(math.sqrt(norm + _F1)))
        st_f32(y + 4 * inside, largest / TOP / factor + _F0 * norm)  # NaN if any value is NaN or Inf
        wide = splat_f32x16(inverse * factor)
        y += 64 + 2 * PAIRS_BLOCK * inside
        for i in range(0, 4 * PAIRS_BLOCK, 128):
            store_i16x32(y + i // 2, rounded(load_f32x16(x + i), wide), rounded(load_f32x16(x + i + 64), wide))


@inline
def copy_span(src, dst, k, lo, hi):
    """Copy columns lo..hi-1 of one row."""
    copy_f32(dst + 4 * lo, src + 4 * lo, hi - lo)


_SPANS = {
    "q8": (quantize_span if reads_two_rows() else quantize_blocks, 32), "i16": (integer_blocks, PAIRS_BLOCK),
    "bf16": (round_span, 1), "f32": (copy_span, 1),
}  # fmt: skip
"""Kind -> span(src, dst, k, lo, hi) of one row, and the columns that one of its units has."""


def make_convert(kind):
    """Return a kernel whose output row r*heads + h is columns offset + h*head_stride .. +k of row r."""
    span, unit = _SPANS[kind]

    @kernel(ConvertParams)
    def convert(params, ith, nth):
        x, stride, heads, head_stride = params.x, params.stride, params.heads, params.head_stride
        k, out, out_stride = params.k, params.out, params.out_stride
        x += params.offset
        # Threads share units, not rows: a single row of generation is divided as well.
        units = (k + unit - 1) // unit
        rows = n_rows(params) * heads
        lo, hi = rows * units * ith // nth, rows * units * (ith + 1) // nth
        while lo < hi:
            # A thread's share may begin and end inside of a row.
            row, first = lo // units, lo % units
            last = min(units, first + hi - lo)
            src = x + (row // heads) * stride + (row % heads) * head_stride
            span(src, out + row * out_stride, k, first, last)
            lo += last - first

    return convert


def make_gather(kind):
    """Return a kernel that converts rows in expert order."""
    span, unit = _SPANS[kind]

    @kernel(GatherParams)
    def gather(params, ith, nth):
        x, stride, order, n_used = params.x, params.stride, params.order, params.n_used
        k, out, out_stride = params.k, params.out, params.out_stride
        n = ld_i64(params.n_sorted)
        for r in range(n * ith // nth, n * (ith + 1) // nth):
            span(x + ld_i64(order + 8 * r) // n_used * stride, out + r * out_stride, k, 0, (k + unit - 1) // unit)

    return gather
