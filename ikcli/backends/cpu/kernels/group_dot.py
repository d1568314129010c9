"""Multiply a group of interleaved weight rows by a few quantized activation rows, straight from memory (generation).

The group is decoded once for all of them; each result is the same, bit for bit, as that of the activation row alone.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.activation_row import ActivationRow, without_bias
from ikcli.backends.cpu.kernels.groupformat import GroupEmitter
from ikcli.backends.cpu.kernels.rowformat import prefetch_step, steps
from ikcli.backends.cpu.tile_modes import most_code
from ikcli.native import isa
from ikcli.native.simd import arm64
from ikcli.native.simd.dot import emit_halves_added, most_addends
from ikcli.native.simd.emit import F32, I32
from ikcli.native.simd.lanes import folded
from ikcli.native.simd.vec import f32x16, i8x64, i32x8, i32x16, llvm_type, pointer


@functools.cache
def group_dot(fmt, n_tokens):
    """Return dot(w, a, a_stride, k, out, out_stride): out[t][0:rows] for n_tokens activation rows."""
    mode = fmt.mode
    assert fmt.rows == 4 or mode.endswith("32")

    @intrinsic
    def dot(typingctx, w, a, a_stride, k, out, out_stride):
        def codegen(context, builder, sig, args):
            w, a, a_stride, k, out, out_stride = args
            e = GroupEmitter(builder)
            row = fmt.header(e, w)
            # Opaque: LLVM would compute each address from the one before, a chain of additions.
            rows = [ActivationRow(e, e.opaque(e.offset(a, e.times(a_stride, t))), k) for t in range(n_tokens)]
            n_lanes = _lanes_of_sums(fmt)
            totals = [e.variable(ir.Constant(ir.VectorType(F32, n_lanes), None)) for _ in rows]
            for i, at_w, valid in steps(e, fmt, e.offset(w, fmt.header_bytes), k):
                tokens = [_Token(e, fmt, mode, x, i, valid) for x in rows]
                _dot_step(e, fmt, mode, at_w, row, tokens)
                for t, total in zip(tokens, totals, strict=True):
                    t.finish(total, fmt.d(e, at_w, row), fmt.dmin(e, at_w, row))
            lanes = fmt.dot_lanes()[0][:n_lanes]
            by_row = [[i for i, (_, r) in enumerate(lanes) if r == row] for row in range(fmt.rows)]
            # Rows take turns, so that folding in halves adds lanes of one row only, always in the same order.
            in_turn = [i for lanes in zip(*by_row, strict=True) for i in lanes]
            for t, total in enumerate(totals):
                sums = folded(builder, e.pick(builder.load(total), in_turn), fmt.rows)
                e.store(sums, e.offset(out, e.times(out_stride, t)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return dot


def _lanes_of_sums(fmt):
    """Return 8 on plain AVX2 where both halves of the vectors of codes have the same scales, so that they can be added.

    On ARM64 as many as there are rows, where each row has one scale. Else 16.
    """
    runs = fmt.runs()
    if isa.current().is_arm64:
        scaled = [(block, r) for block, _, r in runs] if fmt.mode.endswith("32") else runs
        return fmt.rows if scaled == scaled[: fmt.rows] * (16 // fmt.rows) else 16
    return 8 if isa.current().plain_avx2 and runs[:8] == runs[8:] else 16


class _Token:
    """Step i of an activation row (layout: `kernels/activations.py`), and the sums of the step, without d and dmin."""

    def __init__(self, e, fmt, mode, row, i, valid):
        self.e, self.fmt, self.valid, self.lanes = e, fmt, valid, _lanes_of_sums(fmt)
        self.row, self.i = row, i
        self.codes_at, self.d_at = e.offset(row.codes_at, e.times(i, 256)), e.offset(row.d_at, e.times(i, 32))
        self.second_at = e.offset(row.second_at, e.times(i, 256))
        self.d = row.scales(e, i, valid)
        self.sum = self.low = self.starts = self.parts = None
        if mode[0] == "m" or fmt.unit == 1:
            self.sums = row.scaled_sums(e, i, valid, 1 if mode.endswith("32") else 2)
        else:
            self.starts = without_bias(e, fmt, e.load(i32x16, e.offset(row.sums_at, e.times(i, 64))))

    def started(self, e, w, u):
        """Return the start values of unit u's integer sums.

        They are the negated contribution of zero codes, if each lane has its own.
        """
        if self.starts is None:
            return ir.Constant(ir.VectorType(I32, self.lanes), None)
        lanes = [2 * (self.fmt.unit * u + block) + half for block, half, _ in self.fmt.runs()[: self.lanes]]
        plain, shifted = self.starts
        on = self.fmt.shifted_lanes(e, w, u)
        return e.pick(plain, lanes) if on is None else e.b.select(on, e.pick(shifted, lanes), e.pick(plain, lanes))

    def scale(self, u):
        """Return the scales of unit u in the lanes of a sum."""
        # A broadcast from memory is cheaper than a shuffle, but must not read past the last block.
        if self.fmt.unit == 1 and self.valid is None:
            return self.e.pick(self.e.splat_f32(self.e.offset(self.d_at, 4 * u)), range(self.lanes))
        return self.e.pick(self.d, [self.fmt.unit * u + block for block, _, _ in self.fmt.runs()[: self.lanes]])

    def groups(self, u, lanes):
        """Return column groups of unit u in the lane order of a vector of codes."""
        if self.fmt.in_quarters:
            at = self.e.offset(self.second_at, 64 * lanes[0][0] + 16 * u)
            v = self.e.b.load(self.e.vector_pointer(at, 32, 4), align=1)
            return self.e.b.bitcast(self.e.pick(v, list(range(4)) * 4), llvm_type(i8x64))
        at = self.e.offset(self.codes_at, 32 * self.fmt.unit * u)
        # All lanes of a vector are one column group of 16 rows: one broadcast instead of a shuffle.
        if self.fmt.rows == 16:
            return self.e.splat_bytes(self.e.offset(at, 4 * lanes[0][0]))
        v = self.e.load(i32x8 if self.fmt.unit == 1 else i32x16, at)
        return self.e.b.bitcast(self.e.pick(v, [g for g, _ in lanes]), llvm_type(i8x64))

    def four(self, at, per_step, offset):
        """Load four words of this step of a part of the activation row."""
        at = self.e.offset(at, self.e.times(self.i, per_step), offset)
        return self.e.b.load(self.e.vector_pointer(at, 32, 4), align=1)

    def four_sums(self, u):
        """Return the negated sums of the activations of unit u, of each 16."""
        sums = self.four(self.row.sums_at, 64, 16 * u)  # times -128
        return self.e.b.ashr(sums, ir.Constant(sums.type, [7] * 4))

    def two_scales(self, u):
        """Return the scales of the blocks of unit u."""
        if self.valid is not None:
            return self.e.pick(self.d, [2 * u, 2 * u + 1])
        return self.e.b.load(pointer(self.e.b, self.e.offset(self.d_at, 8 * u), ir.VectorType(F32, 2)), align=4)

    def add_run(self, n, x, y):
        """Add x * y to lanes 4n .. 4n+3 of the sum of the step."""
        parts = self.parts = self.parts or [None] * 4
        parts[n] = self.e.in_order(self.e.mul(x, y) if parts[n] is None else self.e.fused(x, y, parts[n]))

    def add(self, x, y):
        """Add x * y to the sum of the step."""
        # In order: LLVM would mix the units of a step until registers spill.
        self.sum = self.e.in_order(self._sum(self.sum, x, y))

    def add_low(self, x, y):
        """Add x * y to the sum of the minima."""
        self.low = self._sum(self.low, x, y)

    def _sum(self, total, x, y):
        for a, b in zip(self.e.split(x, self.lanes), self.e.split(y, self.lanes), strict=True):
            total = self.e.mul(a, b) if total is None else self.e.fused(a, b, total)
        return total

    def finish(self, total, d, dmin):
        """Add the step to the sum of all steps."""
        e, rows = self.e, [r for _, r in self.fmt.dot_lanes()[0][: self.lanes]]
        v = e.b.load(total)
        if self.parts:
            self.sum = arm64.joined(e.b, self.parts)
        v = e.b.fadd(v, self.sum) if d is None else e.fused(self.sum, e.pick(d, rows), v)
        e.b.store(v if self.low is None else e.fused(self.low, e.pick(dmin, rows), v), total)


def _dot_step(e, fmt, mode, w, row, tokens):
    lanes, runs = fmt.scale_lanes(mode), fmt.runs()
    most, signed = most_code(fmt, mode), mode[0] == "s" and not fmt.bias
    apart = fmt.most_magnitude() > 0
    n_lanes = _lanes_of_sums(fmt)
    # If both halves are added, half as many vectors fit 16 bits.
    addends = max(1, most_addends(most) * n_lanes // 16)  # 1 where codes are signed
    if mode[0] == "m":
        # Minima multiply sums of activations, which rows hold ready: no codes are needed.
        for part, x in enumerate(fmt.minima(e, w, row)):
            for t in tokens:
                t.add_low(x, e.pick(t.sums, _sum_lanes(fmt, part)))
    units = 16 // (lanes * fmt.unit)  # of a vector of scales
    for part, scales in enumerate(fmt.scales(e, w, row)):
        # Units of one block start from 0: the bias is taken off here, by the sums of activations, for a whole vector of
        # scales at once.
        if mode[0] == "s" and fmt.unit == 1 and not apart and (fmt.bias or fmt.shift):
            offsets = e.mul(scales, _offsets(e, fmt, w, part))
            for t in tokens:
                t.add(offsets, e.pick(t.sums, _sum_lanes(fmt, part)))
        for n in range(units):
            u = units * part + n
            prefetch_step(e, fmt, w, part=u, n_parts=8 // fmt.unit)
            of_halves = fmt.rows if lanes > fmt.rows else 0
            where = [lanes * (fmt.unit * n + block) + of_halves * half + r for block, half, r in runs[:n_lanes]]
            if _sums_apart(fmt):
                _dot_runs(e, fmt, w, u, tokens, arm64.sixteens(e.b, e.pick(scales, where)))
                continue
            dots = [t.started(e, w, u) for t in tokens]
            # Codes are decoded once and multiplied for every activation row while they are in registers.
            for first in range(0, len(fmt.order), addends):
                vectors = fmt.dot_lanes()[first : first + addends]
                codes, signs = [fmt.dot_codes(e, w, u, first + v) for v in range(len(vectors))], None
                if apart:
                    codes, signs = zip(*codes, strict=True)
                for i, t in enumerate(tokens):
                    groups = [t.groups(u, lanes) for lanes in vectors]
                    if signs:
                        groups = [e.with_sign(x, s) for x, s in zip(groups, signs, strict=True)]
                    if n_lanes < 16:
                        dots[i] = emit_halves_added(e.b, dots[i], codes, groups, most)
                    elif signed:
                        dots[i] = e.dot_signed(dots[i], *codes, *groups)
                    else:
                        dots[i] = e.dots(dots[i], codes, groups, most)
            # Each lane's scale, for all activation rows.
            wide = e.pick(scales, where)
            for x, t in zip(dots, tokens, strict=True):
                t.add(e.mul(e.ints_to_f32(x), t.scale(u)), wide)


def _sums_apart(fmt):
    """Return whether every four lanes of a vector of codes are multiplied by themselves (`_dot_runs`)."""
    return isa.current().is_arm64 and fmt.unit == 2 and _lanes_of_sums(fmt) == 16


def _dot_runs(e, fmt, w, u, tokens, scales):
    """Add the products of unit u, half a block of four rows after the other: registers are too few for all their sums.

    scales: of each half, four lanes.
    """
    zeros = None if fmt.mode[0] == "m" else arm64.sixteens(e.b, _zero_codes(e, fmt, w, u))
    sums, ds = [t.four_sums(u) for t in tokens], [t.two_scales(u) for t in tokens]
    for n, (block, half, _) in enumerate(fmt.runs()[::4]):
        # Only these 16 bytes of each vector are used, so that nothing else is loaded and decoded here.
        codes = [arm64.sixteens(e.b, fmt.dot_codes(e, w, u, v))[n] for v in range(len(fmt.order))]
        groups = [lanes[4 * n][0] for lanes in fmt.dot_lanes()]
        for t, of, d in zip(tokens, sums, ds, strict=True):
            x = t.four(t.row.codes_at, 256, 64 * u + 16 * n)
            start = e.pick(of, [2 * block + half] * 4)
            dot = e.zero_words() if zeros is None else e.b.mul(start, zeros[n])
            for v, g in zip(codes, groups, strict=True):
                dot = arm64.signed_dot(e.b, dot, v, e.b.bitcast(e.pick(x, [g % 4] * 4), arm64.BYTES))
            t.add_run(n, e.mul(e.ints_to_f32(dot), e.pick(d, [block] * 4)), scales[n])


def _zero_codes(e, fmt, w, u):
    """Return what multiplies negated sums of activations for codes that stand for zero: bias or bias - shift."""
    plain, shifted = (ir.Constant(llvm_type(i32x16), [x] * 16) for x in (fmt.bias, fmt.bias - fmt.shift))
    on = fmt.shifted_lanes(e, w, u)
    return plain if on is None else e.b.select(on, shifted, plain)


def _sum_lanes(fmt, part):
    """Return which sums of activations belong to the scales 16*part.. (or minima)."""
    return [(16 * part + i) // fmt.rows for i in range(16)]


def _offsets(e, fmt, w, part):
    """Return the negated contribution of a code that stands for zero, in 16 lanes: -bias, or shift - bias."""
    plain, shifted = (ir.Constant(llvm_type(f32x16), [x] * 16) for x in (-1.0 * fmt.bias, 1.0 * fmt.shift - fmt.bias))
    on = fmt.shifted_lanes(e, w, part)
    return plain if on is None else e.b.select(on, shifted, plain)
