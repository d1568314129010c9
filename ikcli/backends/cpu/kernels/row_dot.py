"""A weight row times a few quantized activation rows, straight from memory (generation).

The row is decoded once for all of them; each result is the same, bit for bit, as that of the activation row alone.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.rowformat import RowEmitter, activation_floats, indices, steps
from ikcli.backends.cpu.tile_modes import MODES
from ikcli.native.simd.emit import F32, I32
from ikcli.native.simd.vec import const_vector, f32x8, f32x16, i8x64, i32x8, i32x16, pointer

_PREFETCH_BYTES = 4096  # ahead; the next rows follow in memory
_SUMS = 2  # sums per activation row: a single one would be a chain of dependent additions


class _Token:
    """One activation row: its address and what has been summed so far."""

    def __init__(self, e, mode, a):
        self.mode, self.a = mode, a
        self.sums = [e.variable(e.zero(f32x16)) for _ in range(_SUMS)]

    def scaled(self, e, fmt, w, scales, minima, i, valid):
        """Block scales of step i times those of the activations; adds what depends on sums of activations."""
        i32, nb = e.times(i, 32), e.b.lshr(e.k, e.int(5))
        at = e.offset(self.a, e.k, i32)
        d = activation_floats(e, at, valid)
        if self.mode == "m32":
            scales, factors = e.mul(scales, d), minima
            sums = activation_floats(e, e.offset(at, e.times(nb, 4)), valid)
        else:
            if self.mode == "s32":
                starts = e.load(i32x8, e.offset(at, e.times(nb, 8)))
            else:
                starts = e.load(i32x16, e.offset(at, i32, e.times(nb, 12)))
                d = e.pick(d, [n // 2 for n in range(16)])
            scales = e.mul(scales, d)
            if self.mode == "m16":
                factors = e.mul(minima, const_vector(f32x16, [-1.0 / 128] * 16))
                sums = e.mul(e.ints_to_f32(starts), d)
            else:
                factors, sums = scales, e.ints_to_f32(_moved(e, fmt, starts, w))
        self.plus(e, 0, *(_widen(e, v) if v.type.count == 8 else v for v in (factors, sums)))
        return scales

    def plus(self, e, n, x, y):
        """x * y to sum n."""
        slot = self.sums[n]
        e.b.store(e.fused(x, y, e.b.load(slot)), slot)

    def add(self, e, j, codes, scales, i):
        """Columns 64j.. of step i."""
        dot = e.dot(e.zero(i32x16), codes, e.load(i8x64, e.offset(self.a, e.times(i, 256), 64 * j)))
        per = scales.type.count // 4
        spread = e.pick(scales, [per * j + n * per // 16 for n in range(16)])
        self.plus(e, (j + 1) % _SUMS, e.to_f32(dot), spread)

    def total(self, e):
        first, second = (e.b.load(slot) for slot in self.sums)
        return _sum_lanes(e, e.b.fadd(first, second))


def _widen(e, v):
    """8 lanes and 8 zeros."""
    return e.b.shuffle_vector(v, e.zero(f32x8), indices(range(16)))


@functools.cache
def row_dot(fmt, n_tokens):
    """dot(w, a, a_stride, k, out, out_stride): out[t] for n_tokens activation rows (strides in bytes)."""
    mode = MODES[fmt.name]

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, k, out, out_stride = args
            e = RowEmitter(builder)
            e.k = k
            tokens = [_Token(e, mode, e.opaque(e.offset(a, e.times(a_stride, t)))) for t in range(n_tokens)]
            row = fmt.header(e, w)
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                for line in range(0, fmt.step_bytes, 64):
                    e.prefetch(e.offset(at_w, _PREFETCH_BYTES + line))
                plain = fmt.scales(e, at_w, row)
                minima = fmt.minima(e, at_w, row) if mode.startswith("m") else None
                scales = [t.scaled(e, fmt, at_w, plain, minima, i, valid) for t in tokens]
                for j in range(4):
                    codes = fmt.dot_codes(e, at_w, j)
                    for t, sc in zip(tokens, scales, strict=True):
                        t.add(e, j, codes, sc, i)
            for n, t in enumerate(tokens):
                builder.store(t.total(e), pointer(builder, e.offset(out, e.times(out_stride, n)), F32), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


def _moved(e, fmt, starts, w):
    """-bias * sum from -128 * sum, plus shift * sum, which `dot_codes` left out of the codes of some blocks."""
    n = starts.type.count
    blocks = fmt.shifted_blocks(e, w)
    if blocks is None:
        return e.b.ashr(starts, ir.Constant(starts.type, [8 - fmt.bias.bit_length()] * n))
    assert fmt.bias == 128
    parts = [e.b.ashr(starts, ir.Constant(starts.type, [7 - bit] * n)) for bit in range(3) if fmt.shift >> bit & 1]
    more = parts[0] if len(parts) == 1 else e.b.add(*parts)
    return e.b.select(blocks, e.b.sub(starts, more), starts)


def _sum_lanes(e, v):
    n = v.type.count
    while n > 1:
        n //= 2
        v = e.b.fadd(e.pick(v, range(n)), e.pick(v, range(n, 2 * n)))
    return e.b.extract_element(v, ir.Constant(I32, 0))
