"""Multiply a weight row by a few quantized activation rows on ARM64, in the order of columns.

A product of 16 signed bytes leaves four sums. Those of four blocks are added pairwise, three instructions in all, so
that each lane has the sum of its block and scales are multiplied without moving lanes. Codes need not move either. The
bias of codes is applied to the sums of activations.
"""

import functools

from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow
from ikcli.backends.cpu.kernels.row_dot_avx2 import offsets
from ikcli.backends.cpu.kernels.row_emitter import RowEmitter
from ikcli.backends.cpu.kernels.rowformat import prefetch_step, steps
from ikcli.native.simd import arm64
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import f32x8, f32x16, i8x16

_TWICE = [i // 2 for i in range(16)]


@functools.cache
def row_dot_arm64(fmt, n_tokens):
    """Return dot(w, a, a_stride, k, out, out_stride): out[t] for n_tokens activation rows (strides in bytes)."""
    mode = fmt.mode
    vec, per_block = (f32x8, 1) if mode.endswith("32") else (f32x16, 2)

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, k, out, out_stride = args
            e = RowEmitter(builder)
            row = fmt.header(e, w)
            tokens = [ActivationRow(e, e.opaque(e.offset(a, e.times(a_stride, t))), k) for t in range(n_tokens)]
            sums = [e.variable(e.zero(vec)) for _ in tokens]

            def add(slot, x, y):
                builder.store(e.fused(x, y, builder.load(slot)), slot)

            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                scales = fmt.scales(e, at_w, row)
                factors = fmt.minima(e, at_w, row) if mode[0] == "m" else offsets(e, fmt, at_w, scales)
                for x, slot in zip(tokens, sums, strict=True):
                    if factors is not None:
                        add(slot, factors, x.scaled_sums(e, i, valid, per_block))
                starts = [e.offset(x.codes_at, e.times(i, 256)) for x in tokens]
                dots = _block_sums(e, fmt, at_w, starts, per_block)
                for x, slot, parts in zip(tokens, sums, dots, strict=True):
                    d = x.scales(e, i, valid)
                    factor = e.mul(scales, d if per_block == 1 else e.pick(d, _TWICE))
                    add(slot, e.ints_to_f32(arm64.joined(builder, parts)), factor)
            for t, slot in enumerate(sums):
                e.store(folded(builder, builder.load(slot), 1), e.offset(out, e.times(out_stride, t)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


def _block_sums(e, fmt, w, starts, per_block):
    """Return for each activation row vectors of four sums, one per block of 32 or of 16 columns."""
    lanes = [[] for _ in starts]  # sums of a block in four lanes
    found = [[] for _ in starts]
    for j in range(4):
        # Codes are decoded once, for all activation rows.
        codes = arm64.sixteens(e.b, fmt.dot_codes(e, w, j))
        for mine, done, at in zip(lanes, found, starts, strict=True):
            for first in range(0, 4, 3 - per_block):
                total = e.zero_words()
                for n in range(first, first + 3 - per_block):
                    y = e.load(i8x16, e.offset(at, 64 * j + 16 * n))
                    total = arm64.signed_dot(e.b, total, codes[n], y)
                mine.append(total)
            if len(mine) == 4:
                pairs = [arm64.pair_sums(e.b, *mine[n : n + 2]) for n in (0, 2)]
                done.append(arm64.pair_sums(e.b, *pairs))
                mine.clear()
    return found
