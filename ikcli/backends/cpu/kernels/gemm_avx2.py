"""Emit the matrix micro-kernels of plain AVX2, where a product of bytes leaves sums of two in 16 bits: see `gemm.py`.

Sums of small codes with a scale per 32 columns stay in 16 bits, one vector for each result, for as many columns as they
fit; only then they are widened. Magnitudes with signs fill 16 bits at once. Whole scales then take the place of the
ones in the instruction that widens, so that both halves of a block share a sum.

h is the lower or the upper eight of the sixteen weight rows, t an activation row.
"""

import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.kernels.gemm import add_or_store
from ikcli.backends.cpu.kernels.vector_emitter import VectorEmitter
from ikcli.backends.cpu.tile_modes import (
    FIRST_SUM_F32,
    has_signs,
    has_whole_tile,
    scales_per_block,
    tile_bias,
    tile_layout,
)
from ikcli.native.simd.dot import SUMS_OF_TWO, emit_products, emit_sums_of_two, most_addends
from ikcli.native.simd.vec import (
    f32x8,
    f32x16,
    i8x32,
    i32x8,
    llvm_type,
    pointer,
    splat_value,
)

_GROUPS = 8  # of four columns in a block of 32


@functools.cache
def avx2_tile(fmt, nt):
    """Return micro(tile, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes) of a format, or None.

    out[t][0:n_lanes] = blocks first .. first + n_blocks - 1 of a tile times those of a[t], t < nt, as `quant_tile`.
    None: for tiles that `quant_tile` is meant for.
    """
    bias, with_min = tile_bias(fmt), fmt.mode == "m32"
    if has_signs(fmt.mode, bias):
        return _micro(fmt.mode, bias, nt, _WholeBlock() if has_whole_tile(fmt) else _SignedBlock(fmt.mode))
    addends = most_addends(fmt.most_with_minimum if with_min else 2 * bias - 1)
    if fmt.mode.endswith("16") or addends == 1:
        return None
    return _micro(fmt.mode, bias, nt, _UnsignedBlock(bias, with_min, min(_GROUPS, 1 << (addends.bit_length() - 1))))


def _micro(mode, bias, nt, of_block):
    header, block_bytes = tile_layout(mode, bias)

    @intrinsic
    def micro(typingctx, tile, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes):
        def codegen(context, builder, sig, args):
            tile, _, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes = args
            e = VectorEmitter(builder)
            a = e.offset(a, e.times(first, 32))
            # Hidden from LLVM, which would derive each address from the one before: a chain of additions.
            rows = [e.opaque(e.offset(a, e.times(a_stride, t))) for t in range(nt)]
            tile = e.opaque(e.offset(tile, e.times(first, block_bytes)))
            totals = e.opaque(e.room(64 * nt))  # in memory: all registers are for sums of products
            slots = {(t, 0): pointer(builder, e.offset(totals, 64 * t), llvm_type(f32x16)) for t in range(nt)}
            outs = {(t, 0): e.offset(out, e.times(out_stride, t)) for t in range(nt)}
            for slot in slots.values():
                builder.store(e.zero(f32x16), slot)
            # Without this, stores of spilled registers queue up behind result stores that wait for memory.
            for at in outs.values():
                e.prefetch(at, write=True)
            # Parts of an activation row (`kernels/activations.py`): four bytes per 32 columns each.
            nb4, scales_at = builder.lshr(k, e.int(3)), e.offset(k, e.times(first, -28))
            with e.loop(n_blocks) as ib:
                block, ib4 = e.offset(tile, e.times(ib, block_bytes)), e.times(ib, 4)
                at = e.opaque(e.offset(scales_at, ib4))
                here = _Block(e, block, header, rows, e.times(ib, 32), at, nb4, totals)
                of_block.add(here)
            add_or_store(e, slots, outs, n_lanes, first)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return micro


class _Block:
    """A block of 32 columns of a tile and of the activation rows."""

    def __init__(self, e, at, header, rows, columns, scales_at, nb4, totals):
        self.e, self.at, self.header, self.rows, self.columns = e, at, header, rows, columns
        self.scales_at, self.nb4, self.totals = scales_at, nb4, totals
        self.places = [(t, h) for t in range(len(rows)) for h in range(2)]

    def floats(self, n):
        """Load vector n of the header, in halves."""
        return [self.e.load(f32x8, self.e.offset(self.at, 64 * n + 32 * h)) for h in range(2)]

    def integers(self, n):
        return [self.e.load(i32x8, self.e.offset(self.at, 64 * n + 32 * h)) for h in range(2)]

    def codes(self, n):
        """Load vector n behind the header, in halves."""
        return [self.e.load(i8x32, self.e.offset(self.at, self.header + 64 * n + 32 * h)) for h in range(2)]

    def activations(self, t, j):
        """Load four columns of an activation row into all lanes."""
        v = self.e.b.load(pointer(self.e.b, self.e.offset(self.rows[t], self.columns, 4 * j), ir.IntType(32)), align=1)
        return self.e.b.bitcast(splat_value(self.e.b, i32x8, v), llvm_type(i8x32))

    def number(self, t, part, vec=f32x8):
        """Load a number of the block from part 0, 1 .. of an activation row behind the codes: scale, sum, start."""
        at = self.e.offset(self.rows[t], self.scales_at, *[self.nb4] * part)
        return splat_value(self.e.b, vec, self.e.b.load(pointer(self.e.b, at, llvm_type(vec).element), align=1))

    def total(self, t, h):
        return self.e.load(f32x8, self.e.offset(self.totals, 64 * t + 32 * h))

    def store_totals(self, t, halves):
        for h, v in enumerate(halves):
            self.e.store(v, self.e.offset(self.totals, 64 * t + 32 * h))

    def in_registers(self, vectors):
        """Keep LLVM from mixing what follows with this until registers run out."""
        return {th: self.e.in_register(v) for th, v in vectors.items()}


class _UnsignedBlock:
    """Small codes; `addends`: the groups of columns whose sums fit 16 bits."""

    def __init__(self, bias, with_min, addends):
        self.with_min, self.addends = with_min, addends
        self.shift = 7 - (bias.bit_length() - 1)  # stored starts are for a bias of 128

    def add(self, block):
        e, dots = block.e, self._products(block)
        scales, minima = block.floats(0), block.floats(1)
        for t in range(len(block.rows)):
            d, new = block.number(t, 0), []
            of_minima = block.number(t, 1) if self.with_min else None
            start = None if self.with_min else block.number(t, 2, i32x8)
            for h in range(2):
                dot = dots[t, h]
                if start is not None:
                    dot = e.b.add(dot, e.b.ashr(start, ir.Constant(start.type, [self.shift] * 8)))
                part = e.b.fmul(e.b.sitofp(dot, llvm_type(f32x8)), scales[h])
                new.append(block.e.fused(part, d, block.total(t, h)))
                if of_minima is not None:
                    # The minimum of a block is the same for all its columns: it multiplies the sum of activations.
                    new[h] = block.e.fused(minima[h], of_minima, new[h])
            block.store_totals(t, new)

    def _products(self, block):
        dots, sums = {}, {}
        for j in range(_GROUPS):
            codes = block.codes(j)
            for t in range(len(block.rows)):
                x = block.activations(t, j)
                for h in range(2):
                    product = emit_products(block.e.b, codes[h], x)
                    sums[t, h] = block.e.b.add(sums[t, h], product) if (t, h) in sums else product
            if (j + 1) % self.addends:
                sums = block.in_registers(sums)
                continue
            for th, v in sums.items():
                wide = emit_sums_of_two(block.e.b, v)
                dots[th] = block.e.b.add(dots[th], wide) if th in dots else wide
            sums, dots = {}, block.in_registers(dots)
        return dots


class _SignedBlock:
    """Magnitudes and signs, with a scale per 32 or 16 columns; starts hold FIRST_SUM (`tile_modes.first_sum`)."""

    def __init__(self, mode):
        self.halves = scales_per_block(mode)

    def add(self, block):
        per = _GROUPS // self.halves
        for half in range(self.halves):
            starts = block.integers(self.halves + half)
            dots = {(t, h): starts[h] for t, h in block.places}
            for j in range(per * half, per * (half + 1)):
                dots = _with_signed_group(block, dots, j, [None, None])
            scales = block.floats(half)
            # What the start adds to a sum goes away in the multiplication by the scale, as its addend.
            surplus = [block.e.b.fmul(s, ir.Constant(s.type, [-FIRST_SUM_F32] * 8)) for s in scales]
            for t in range(len(block.rows)):
                d, new = block.number(t, 0), []
                for h in range(2):
                    part = block.e.fused(block.e.b.bitcast(dots[t, h], scales[h].type), scales[h], surplus[h])
                    new.append(block.e.fused(part, d, block.total(t, h)))
                block.store_totals(t, new)


class _WholeBlock:
    """Magnitudes and signs, with whole scales per 16 columns (`tile_modes.has_whole_tile`)."""

    def add(self, block):
        starts = block.integers(2)
        dots = {(t, h): starts[h] for t, h in block.places}
        for half in range(2):
            factors = [block.e.b.bitcast(v, SUMS_OF_TWO) for v in block.integers(half)]
            for j in range(4 * half, 4 * half + 4):
                dots = _with_signed_group(block, dots, j, factors)
        units = block.floats(3)
        for t in range(len(block.rows)):
            d, new = block.number(t, 0), []
            for h in range(2):
                part = block.e.b.fmul(block.e.b.sitofp(dots[t, h], units[h].type), units[h])
                new.append(block.e.fused(part, d, block.total(t, h)))
            block.store_totals(t, new)


def _with_signed_group(block, dots, j, factors):
    """Add the products of four columns to sums (t, h)."""
    codes, signs = block.codes(2 * j), block.codes(2 * j + 1)
    new = {}
    for t in range(len(block.rows)):
        x = block.activations(t, j)
        for h in range(2):
            # Magnitudes are up to 128 and the others -128 .. 127: the sum of two products fits 16 bits.
            product = emit_products(block.e.b, codes[h], block.e.b.xor(x, signs[h]))
            new[t, h] = block.e.b.add(dots[t, h], emit_sums_of_two(block.e.b, product, factors[h]))
    return block.in_registers(new)
