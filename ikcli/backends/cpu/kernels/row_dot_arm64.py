"""Multiply a weight row by a few quantized activation rows on ARM64, in the order of columns.

A product of 16 signed bytes leaves four sums. Those of four blocks are added pairwise, three instructions in all, so
that each lane has the sum of its block and scales are multiplied without moving lanes. Codes need not move either. The
bias of codes is applied to the sums of activations.

The row is decoded once for all activation rows; each result is the same, bit for bit, as that of the activation row
alone. The codes of a step take 16 registers and its scales up to 8, so sums are four lanes at a time, and finished
before the next ones are begun.
"""

import functools

from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow
from ikcli.backends.cpu.kernels.row_dot import MOST_ROWS
from ikcli.backends.cpu.kernels.row_dot_avx2 import offsets
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import prefetch_step, steps
from ikcli.backends.cpu.tile_modes import scales_per_block
from ikcli.native.simd import arm64
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import Vec, i8x16

_TWICE = [i // 2 for i in range(16)]
_f32x4 = Vec("f32", 4)


@functools.cache
def row_dot_arm64(fmt):
    """Return dot(w, a, a_stride, k, out, out_stride): out[0] for one activation row; strides are unused."""

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, _, k, out, _ = args
            e = RowEmitter(builder)
            row, x = fmt.header(e, w), ActivationRow(e, e.opaque(a), k)
            sums = [e.variable(e.zero(_f32x4)) for _ in range(_parts(fmt))]
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                factors = _factors(e, fmt, at_w, row)
                codes = _codes(e, fmt, at_w)
                for n, total in enumerate(_step_sums(e, fmt, x, i, valid, factors, codes, map(builder.load, sums))):
                    builder.store(total, sums[n])
            e.store(folded(builder, arm64.joined(builder, [builder.load(at) for at in sums]), 1), out)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


@functools.cache
def row_dots_arm64(fmt):
    """Return dots(w, a, a_stride, m, k, out, out_stride): out[t] for m <= MOST_ROWS activation rows; strides in bytes.

    The sums of each are those of `row_dot_arm64`, in a loop that covers any number of them.
    """
    size = 16 * _parts(fmt)  # bytes of the sums of an activation row

    @intrinsic
    def dots(typingctx, w, a, a_stride, m, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, m, k, out, out_stride = args
            e = RowEmitter(builder)
            room = e.opaque(e.room(size * MOST_ROWS))
            row, first = fmt.header(e, w), ActivationRow(e, e.opaque(a), k)

            def places(t):
                return [e.offset(room, e.times(t, size), at) for at in range(0, size, 16)]

            with e.loop(m) as t:
                for at in places(t):
                    e.store(e.zero(_f32x4), at)
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                factors, codes, here = _factors(e, fmt, at_w, row), list(_codes(e, fmt, at_w)), first.at_step(e, i)
                with e.loop(m) as t:
                    x, at = here.moved(e, builder.mul(t, a_stride)), places(t)
                    old = (e.load(_f32x4, p) for p in at)
                    for n, total in enumerate(_step_sums(e, fmt, x, e.int(0), valid, factors, codes, old)):
                        e.store(total, at[n])
            with e.loop(m) as t:
                sums = arm64.joined(builder, [e.load(_f32x4, at) for at in places(t)])
                e.store(folded(builder, sums, 1), e.offset(out, builder.mul(t, out_stride)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return dots


def _parts(fmt):
    """Return the vectors of four sums of a step."""
    return 2 * scales_per_block(fmt.mode)


def _factors(e, fmt, w, row):
    """Return the scales of a step, and what multiplies the sums of activations, or None, as vectors of four."""
    scales = fmt.scales(e, w, row)
    others = fmt.minima(e, w, row) if fmt.mode[0] == "m" else offsets(e, fmt, w, scales)
    return arm64.sixteens(e.b, scales), None if others is None else arm64.sixteens(e.b, others)


def _codes(e, fmt, w):
    """Yield the codes of a step by 16."""
    for j in range(4):
        yield from arm64.sixteens(e.b, fmt.dot_codes(e, w, j))


def _step_sums(e, fmt, x, i, valid, factors, codes, old):
    """Yield the sums of an activation row, four blocks at a time, with step i added to the old ones."""
    scales, others = factors
    per_block, codes, old = scales_per_block(fmt.mode), iter(codes), iter(old)
    d = x.scales(e, i, valid)
    d = arm64.sixteens(e.b, d if per_block == 1 else e.pick(d, _TWICE))
    if others is not None:
        apart = arm64.sixteens(e.b, x.scaled_sums(e, i, valid, per_block))
    start = e.offset(x.codes_at, e.times(i, 256))
    for n, scale in enumerate(scales):
        blocks = []
        for block in range(4 * n, 4 * n + 4):
            total = e.zero_words()
            for at in range(32 // per_block * block, 32 // per_block * (block + 1), 16):
                total = arm64.signed_dot(e.b, total, next(codes), e.load(i8x16, e.offset(start, at)))
            blocks.append(total)
        pairs = [arm64.pair_sums(e.b, *blocks[at : at + 2]) for at in (0, 2)]
        total = next(old)
        if others is not None:
            total = e.fused(others[n], apart[n], total)
        yield e.fused(e.mul(scale, d[n]), e.ints_to_f32(arm64.pair_sums(e.b, *pairs)), total)
