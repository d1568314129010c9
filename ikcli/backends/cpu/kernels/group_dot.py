"""A group of interleaved weight rows times a few quantized activation rows, straight from memory (generation).

The group is decoded once for all of them; each result is the same, bit for bit, as that of the activation row alone.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow
from ikcli.backends.cpu.kernels.groupformat import GroupEmitter
from ikcli.backends.cpu.kernels.rowformat import prefetch_step, steps
from ikcli.backends.cpu.tile_modes import MODES, most_code
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import f32x16, i8x64, i32x8, i32x16, llvm_type


@functools.cache
def group_dot(fmt, n_tokens):
    """dot(w, a, a_stride, k, out, out_stride): out[t][0:rows] for n_tokens activation rows (strides in bytes)."""
    mode = MODES[fmt.name]
    assert fmt.rows == 4 or mode.endswith("32")

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, k, out, out_stride = args
            e = GroupEmitter(builder)
            row = fmt.header(e, w)
            rows = [ActivationRow(e, e.opaque(e.offset(a, e.times(a_stride, t))), k) for t in range(n_tokens)]
            slots = [[e.variable(e.zero(f32x16)) for _ in range(3)] for _ in rows]
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                prefetch_step(e, fmt, at_w)
                tokens = [_Token(e, mode, x, s, i, valid) for x, s in zip(rows, slots, strict=True)]
                _dot_step(e, fmt, mode, at_w, row, tokens)
            for t, token_slots in enumerate(slots):
                even, odd, low = (builder.load(slot) for slot in token_slots)
                total = folded(builder, builder.fadd(builder.fadd(even, odd), low), fmt.rows)
                e.store(total, e.offset(out, e.times(out_stride, t)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


class _Token:
    """Step i of an activation row (layout: `kernels/activations.py`), and the sums over all steps."""

    def __init__(self, e, mode, row, slots, i, valid):
        self.e, self.valid, self.slots = e, valid, slots
        self.codes_at, self.d_at = e.offset(row.codes_at, e.times(i, 256)), e.offset(row.d_at, e.times(i, 32))
        self.d = row.scales(e, i, valid)
        self.sums = row.scaled_sums(e, i, valid, 1 if mode.endswith("32") else 2)

    def scale(self, ib):
        """The scale of block ib in 16 lanes."""
        if self.valid is not None:
            return self.e.pick(self.d, [ib] * 16)
        return self.e.splat_f32(self.e.offset(self.d_at, 4 * ib))

    def groups(self, ib, order, rows):
        """Column groups of block ib, each repeated for the rows."""
        at = self.e.offset(self.codes_at, 32 * ib)
        if rows == 16:
            return self.e.splat_bytes(self.e.offset(at, 4 * order[0]))
        v = self.e.pick(self.e.load(i32x8, at), [g for g in order for _ in range(rows)])
        return self.e.b.bitcast(v, llvm_type(i8x64))

    def add(self, slot, x, y):
        """x * y to one of the sums."""
        slot = self.slots[slot]
        self.e.b.store(self.e.fma(x, y, self.e.b.load(slot)), slot)


def _lanes(fmt, mode):
    """Scales per block."""
    return fmt.rows * (2 if mode.endswith("16") else 1)


def _dot_step(e, fmt, mode, w, row, tokens):
    lanes, most = _lanes(fmt, mode), most_code(fmt, mode)
    scales = fmt.scales(e, w, row)
    factors = fmt.minima(e, w, row) if mode[0] == "m" else scales
    per = 16 // lanes
    for part in range(8 // per):
        factor = e.joined(factors[per * part : per * part + per])
        if mode[0] == "s":
            factor = e.mul(factor, _offsets(e, fmt, w, part))
        which = [per * part * lanes // fmt.rows + i // fmt.rows for i in range(16)]
        for t in tokens:
            t.add(2, factor, e.pick(t.sums, which))
    for ib in range(8):
        dots = [e.zero(i32x16) for _ in tokens]
        for v, order in enumerate(fmt.order):
            codes = fmt.dot_codes(e, w, ib, v)
            dots = [e.dot(x, codes, t.groups(ib, order, fmt.rows), most) for x, t in zip(dots, tokens, strict=True)]
        wide = e.repeated(scales[ib], per)
        for x, t in zip(dots, tokens, strict=True):
            t.add(ib % 2, e.mul(e.to_f32(x), t.scale(ib)), wide)


def _offsets(e, fmt, w, part):
    """What a code that stands for zero contributes, negated, in 16 lanes: -bias, or shift - bias."""
    plain, shifted = (ir.Constant(llvm_type(f32x16), [x] * 16) for x in (-1.0 * fmt.bias, 1.0 * fmt.shift - fmt.bias))
    on = fmt.shifted_lanes(e, w, part)
    return plain if on is None else e.b.select(on, shifted, plain)
