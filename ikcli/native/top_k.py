"""Kernels for samplers: find the k largest of many numbers, best first, and draw from those that filters leave.

Groups of 64 numbers are compared with the k-th best so far by four instructions; a number that passes is inserted in
its place. The filters and the draw are those of ikcli/sampling, in float64.
"""

import math

import llvmlite.ir as ir
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from ikcli.native.jit import inline
from ikcli.native.simd.vec import (
    f32x16,
    ld_f32,
    ld_f64,
    ld_i64,
    llvm_type,
    pointer,
    splat_value,
    st_f32,
    st_f64,
    st_i64,
)

_GROUP = 64


@intrinsic
def _any_above(typingctx, address, bound):
    """Return 1 if one of 64 floats is above the bound or NaN."""

    def codegen(context, builder, sig, args):
        address, bound = args
        t = llvm_type(f32x16)
        bounds = splat_value(builder, f32x16, bound)
        found = None
        for i in range(0, 4 * _GROUP, 64):
            at = builder.add(address, ir.Constant(address.type, i))
            x = builder.load(pointer(builder, at, t), align=1)
            above = builder.fcmp_unordered(">", x, bounds)
            found = above if found is None else builder.or_(found, above)
        bits = builder.bitcast(found, ir.IntType(16))
        any_ = builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))
        return builder.zext(any_, ir.IntType(64))

    return types.int64(types.intp, types.float32), codegen


@inline
def largest(numbers, n, k, ids, values):
    """Write ids[k], values[k] of the largest numbers; return how many were found, -1 if there is a NaN."""
    found = np.int64(0)
    bound = np.float32(-np.inf)
    first = np.int64(0)
    while first < n:
        stop = min(first + _GROUP, n)
        if stop - first == _GROUP and _any_above(numbers + 4 * first, bound) == 0:
            first = stop
            continue
        for i in range(first, stop):
            x = ld_f32(numbers + 4 * i)
            if x != x:
                return np.int64(-1)
            if not x > bound:
                continue
            at = min(found, k - 1)
            while at > 0 and ld_f32(values + 4 * (at - 1)) < x:
                st_f32(values + 4 * at, ld_f32(values + 4 * (at - 1)))
                st_i64(ids + 8 * at, ld_i64(ids + 8 * (at - 1)))
                at -= 1
            st_f32(values + 4 * at, x)
            st_i64(ids + 8 * at, i)
            found = min(found + 1, k)
            if found == k:
                bound = ld_f32(values + 4 * (k - 1))
        first = stop
    return found


@inline
def sum_of_exp(logits, n):
    """Return the sum of e**logit, with the rounding error added at the end."""
    total, lost = 0.0, 0.0
    for i in range(n):
        x = math.exp(ld_f64(logits + 8 * i))
        new = total + x
        lost += (total - new) + x if total >= x else (x - new) + total
        total = new
    return total + lost


@inline
def n_top_p(logits, n, p):
    """Return how many of the best numbers together have the share p."""
    bound, total = p * sum_of_exp(logits, n), 0.0
    for i in range(n):
        total += math.exp(ld_f64(logits + 8 * i))
        if total >= bound:
            return i + 1
    return n


@inline
def n_min_p(logits, n, least):
    """Return how many numbers are at least this."""
    kept = 0
    while kept < n and ld_f64(logits + 8 * kept) >= least:
        kept += 1
    return kept


@inline
def pick(logits, n, u):
    """Return an index drawn in proportion to e**logit by a random number u in [0, 1)."""
    total = 0.0
    for i in range(n):
        total += math.exp(ld_f64(logits + 8 * i))
    bound, total = u * total, 0.0
    for i in range(n):
        total += math.exp(ld_f64(logits + 8 * i))
        if total > bound:
            return i
    return n - 1


def make_top_k():
    """Return top_k(numbers f32[n], n, k, ids i64[k], values f32[k]) -> how many were found; -1 if there is a NaN.

    -inf is never found; equal numbers keep their order.
    """

    def top_k(numbers, n, k, ids, values):
        return largest(numbers, n, k, ids, values)

    return top_k, 5, True


def make_draw():
    """Return draw(numbers f32[n], n, k, ids i64[k], values f32[k], state f64[2 + 2*n_steps + k], n_steps, min_keep).

    It returns the drawn id, or -1 if there is a NaN or inf, or nothing but -inf. state: u in [0, 1), 0, (step, value)
    of every step, work space. Steps: 0 divide by, 1 top-p, 2 logit at least.
    """

    def draw(numbers, n, k, ids, values, state, n_steps, min_keep):
        n = largest(numbers, n, k, ids, values)
        if n <= 0 or ld_f32(values) == np.float32(np.inf):
            return np.int64(-1)
        logits, steps = state + 16 + 16 * n_steps, state + 16
        top = np.float64(ld_f32(values))
        for i in range(n):
            st_f64(logits + 8 * i, np.float64(ld_f32(values + 4 * i)) - top)
        for step in range(n_steps):
            kind, value = ld_f64(steps + 16 * step), ld_f64(steps + 16 * step + 8)
            if kind == 0.0:
                for i in range(n):
                    st_f64(logits + 8 * i, ld_f64(logits + 8 * i) / value)
            else:
                kept = n_top_p(logits, n, value) if kind == 1.0 else n_min_p(logits, n, value)
                n = min(n, max(kept, min_keep))
        return ld_i64(ids + 8 * pick(logits, n, ld_f64(state)))

    return draw, 8, True
