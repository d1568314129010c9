"""Process sixteen blocks side by side: device code shared by the searches of block scales.

A group is 16 blocks (or sub-blocks) of `size` consecutive weights, one per lane: vector i of a group holds weight i of
all 16, so that a search runs for 16 scales at once and never adds across lanes. The result of a lane does not depend on
its neighbours. Values are divided by the largest of the block (or super-block), so that no square can overflow.
"""
# mypy: ignore-errors
# (compiled from bytecode; intrinsics have no Python body that a type checker could follow)

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.native.jit import inline
from ikcli.native.simd.half import load_f16x16, store_f16x16
from ikcli.native.simd.vec import (
    Vec,
    bits_f32x16_i32,
    bits_i32x16_f32,
    const_vector,
    f32x16,
    ld_f32,
    load_f32x16,
    splat_f32x16,
    splat_i32x16,
    st_f32,
    store_f32x16,
    vabs,
    vand,
    vdiv,
    vmax,
    vmin,
    vmul,
    vor,
    vsub,
    zero_f32x16,
)

LANES = 16
_F1, _TINY, _HUGE, _F16_MAX = np.float32(1.0), np.float32(1e-20), np.float32(3.4e38), np.float32(65504.0)
ALL, HEAVY = np.float32(0.0), np.float32(0.03)  # shares of the largest weight: all values, those that matter


@intrinsic
def where_less(typingctx, a, b, x, y):
    """Return x where a < b (f32x16), else y (any vector of 16 lanes)."""
    if a != f32x16 or b != f32x16 or not isinstance(x, Vec) or x != y:
        return None

    def codegen(context, builder, sig, args):
        return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

    return x(a, b, x, y), codegen


@intrinsic
def mask_less(typingctx, a, b):
    """Return bit i set where lane i of a is below that of b (f32x16)."""

    def codegen(context, builder, sig, args):
        mask = builder.icmp_signed("!=", builder.fcmp_ordered("<", args[0], args[1]), ir.Constant(
            ir.VectorType(ir.IntType(1), 16), [0] * 16))  # fmt: skip
        return builder.zext(builder.bitcast(mask, ir.IntType(16)), ir.IntType(64))

    return types.int64(f32x16, f32x16), codegen


@intrinsic
def swap_lanes(typingctx, v, step):
    """Return lane i ^ step of f32x16 in lane i; step is 1, 2, 4 or 8."""
    if not isinstance(step, types.IntegerLiteral):
        return None
    k = step.literal_value

    def codegen(context, builder, sig, args):
        order = ir.Constant(ir.VectorType(ir.IntType(32), 16), [i ^ k for i in range(16)])
        return builder.shuffle_vector(args[0], args[0], order)

    return f32x16(f32x16, step), codegen


def make_step_sum(thresholds, start, steps):
    """Return an intrinsic: start + sum of steps[i] over the thresholds[i] <= y, for f32x16 y."""

    @intrinsic
    def step_sum(typingctx, y):
        def codegen(context, builder, sig, args):
            total = const_vector(f32x16, [float(start)] * 16)
            for threshold, step in zip(thresholds, steps, strict=True):
                reached = builder.fcmp_ordered(">=", args[0], const_vector(f32x16, [float(threshold)] * 16))
                sum_ = builder.fadd(total, const_vector(f32x16, [float(step)] * 16))
                total = builder.select(reached, sum_, total)
            return total

        return f32x16(f32x16), codegen

    return step_sum


@inline
def splat(x):
    """Return x (a float32 constant or value) in all lanes."""
    return splat_f32x16(np.float32(x))


@inline
def copy_sign(magnitude, sign):
    """Return |magnitude| with the sign of `sign`."""
    bit = vand(bits_f32x16_i32(sign), splat_i32x16(-0x80000000))
    return bits_i32x16_f32(vor(bits_f32x16_i32(vabs(magnitude)), bit))


@inline
def reciprocal(x):
    """Return 1/x; 0 where |x| is 0 or so small that 1/x would overflow."""
    small = splat_f32x16(np.float32(1e-37))
    return where_less(small, vabs(x), vdiv(splat_f32x16(_F1), x), zero_f32x16())


@inline
def round_f16(x, scratch):
    """Round x to a finite half float, back as float32; `scratch` is 32 bytes."""
    limit = splat_f32x16(_F16_MAX)
    store_f16x16(scratch, vmax(vmin(x, limit), vsub(zero_f32x16(), limit)))
    return load_f16x16(scratch)


@inline
def load_group(x, weights, first, n_blocks, size, ne0, xs, ws):
    """Load blocks first..first+15 transposed to `xs`, and their weights to `ws` (0: not).

    Blocks beyond the last repeat it.
    """
    for lane in range(LANES):
        block = min(first + lane, n_blocks - 1)
        src = x + 4 * size * block
        for i in range(size):
            st_f32(xs + 64 * i + 4 * lane, ld_f32(src + 4 * i))
        if weights != 0:
            src = weights + 4 * ((block * size) % ne0)
            for i in range(size):
                st_f32(ws + 64 * i + 4 * lane, ld_f32(src + 4 * i))


@inline
def fill_ones(ws, size):
    """Fill the weights of a search without importance matrix with 1."""
    for i in range(size):
        store_f32x16(ws + 64 * i, splat_f32x16(_F1))


@inline
def value_range(xs, ws, size, share):
    """Return (smallest, largest) value of each lane among those with at least `share` of the largest weight."""
    top = load_f32x16(ws)
    for i in range(1, size):
        top = vmax(top, load_f32x16(ws + 64 * i))
    least = vmul(top, splat_f32x16(share))
    huge = splat_f32x16(_HUGE)
    lo, hi = huge, vsub(zero_f32x16(), huge)
    for i in range(size):
        v, w = load_f32x16(xs + 64 * i), load_f32x16(ws + 64 * i)
        lo, hi = where_less(w, least, lo, vmin(lo, v)), where_less(w, least, hi, vmax(hi, v))
    return lo, hi


@inline
def signed_largest(xs, ws, size, share):
    """Return each lane's value of largest magnitude, with its sign.

    Only values with at least `share` of the largest weight count. 0 where the value is so small that no scale can hold
    it.
    """
    lo, hi = value_range(xs, ws, size, share)
    largest = where_less(hi, vsub(zero_f32x16(), lo), lo, hi)
    return where_less(vabs(largest), splat_f32x16(_TINY), zero_f32x16(), largest)


@inline
def scale_group(xs, size, factor):
    """Multiply all values of a group, lane by lane."""
    for i in range(size):
        store_f32x16(xs + 64 * i, vmul(load_f32x16(xs + 64 * i), factor))
