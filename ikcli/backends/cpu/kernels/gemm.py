"""Emit register-blocked matrix micro-kernels, one intrinsic per shape.

Quantized: `nv` tiles of 16 weight rows, unpacked to unsigned bytes, times `nt` quantized activation rows. Per 32
columns a tile holds its scales (f32x16; two vectors for 16-column scales), for types with minima the minima likewise,
then 8 x 64 bytes: group j holds bytes 4j..4j+3 of each row. Symmetric types store value + bias, so that the dot product
must start from -bias * (sum of activations); activation rows carry it for 128 (`kernels/activations.py`). Tiles of
plain AVX2 may hold magnitudes, signs and starts instead (`tile_modes.has_signs`).

Float: tile of 16*nv rows as f32 [column][row] times nt float activation rows. Pairs of 16-bit integers: per
block of columns the scales of 16*nv rows, then their pairs, column pair by column pair.
"""

import contextlib
import functools

import llvmlite.ir as ir
from numba.core import types
from numba.extending import intrinsic

from ikcli.backends.cpu.tile_modes import (
    FIRST_SUM_F32,
    MOST_WITH_MINIMUM,
    PAIRS_BLOCK,
    first_sum,
    has_signs,
    minima_per_block,
    scales_per_block,
    tile_layout,
)
from ikcli.native import isa
from ikcli.native.simd import vec
from ikcli.native.simd.dot import emit_dot_bf16, emit_dot_i16, most_addends
from ikcli.native.simd.emit import Emitter, transpose16
from ikcli.native.simd.half import bf16_to_f32, half_to_f32
from ikcli.native.simd.vec import const_vector, f32x16, i8x64, i32x16, llvm_type


@functools.cache
def quant_tile(mode, bias, nt, nv=1):
    """Return micro(tiles, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes).

    out[t][0:n_lanes] = blocks first .. first + n_blocks - 1 of nv tiles, `tile_stride` bytes apart, times those of
    a[t], t < nt, rows of k columns (`kernels/activations.py`); added to the old value unless first is 0. n_lanes <=
    16*nv.
    """
    header, block_bytes = tile_layout(mode, bias)
    most = MOST_WITH_MINIMUM if mode in ("m32", "m16") else 2 * bias - 1
    with_min, halves, n_minima = mode[0] == "m", scales_per_block(mode), minima_per_block(mode)
    from_bits = bool(first_sum())
    smaller = 7 - (bias.bit_length() - 1)
    assert not (smaller and from_bits) and not has_signs(mode, bias)
    groups = 8 // halves
    # Plain AVX2 adds products in 16 bits; as many groups as cannot overflow are widened together.
    at_once = min(2 * halves, 1 << (most_addends(most).bit_length() - 1))
    pairs = [(t, v) for t in range(nt) for v in range(nv)]
    # Unrolled for a whole block, LLVM would multiply one row after the other and keep the codes on the stack, as there
    # are few registers; that takes a fifth longer.
    in_rounds = isa.current().plain_avx2 and at_once <= 2
    per_round = 4 if in_rounds else groups

    def rounds(e):
        return e.loop(e.opaque(e.int(groups // per_round))) if in_rounds else contextlib.nullcontext(e.int(0))

    @intrinsic
    def micro(typingctx, tiles, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes):
        def codegen(context, builder, sig, args):
            tiles, tile_stride, first, n_blocks, a, a_stride, k, out, out_stride, n_lanes = args
            e = Emitter(builder)
            a = e.offset(a, e.times(first, 32))
            # Hidden from LLVM, which would derive each address from the one before: a chain of additions.
            rows = [e.opaque(e.offset(a, e.times(a_stride, t))) for t in range(nt)]
            tiles = e.offset(tiles, e.times(first, block_bytes))
            tiles = [e.opaque(e.offset(tiles, e.times(tile_stride, v))) for v in range(nv)]
            acc = {tv: e.variable(e.zero(f32x16)) for tv in pairs}
            outs = {(t, v): e.offset(out, e.times(out_stride, t), 64 * v) for t, v in pairs}
            # Without this, stores of spilled registers queue up behind result stores that wait for memory.
            for at in outs.values():
                e.prefetch(at, write=True)
            # Parts of an activation row (`kernels/activations.py`): four bytes per 32 columns each, or per 16.
            nb4, scales_at = builder.lshr(k, e.int(3)), e.offset(k, e.times(first, -28))
            sums_at = e.offset(scales_at, nb4)
            starts16_at = e.offset(sums_at, nb4, nb4, e.times(first, 4))
            starts_at = e.offset(sums_at, nb4) if halves == 1 else starts16_at
            s16_at = e.offset(starts16_at, nb4, nb4)
            with e.loop(n_blocks) as ib:
                blocks = [e.offset(tile, e.times(ib, block_bytes)) for tile in tiles]
                q, ib4 = e.times(ib, 32), e.times(ib, 4)
                d_at = e.opaque(e.offset(scales_at, ib4))
                first_at = e.opaque(e.offset(starts_at, e.times(ib4, halves)))

                def floats(at):
                    """Load a vector of the header of every block."""
                    return [e.load(f32x16, e.offset(p, at)) for p in blocks]

                def multiply(dots, codes_at, x_at):
                    """Add the products of `at_once` groups of columns."""
                    # An activation is loaded once, for the codes of all tiles.
                    codes = [[e.load(i8x64, e.offset(p, 64 * j)) for j in range(at_once)] for p in codes_at]
                    for t in range(nt):
                        x = [e.splat_bytes(e.offset(rows[t], x_at, 4 * j)) for j in range(at_once)]
                        for v in range(nv):
                            dot = builder.load(dots[t, v])
                            builder.store(e.dots(dot, codes[v], x, most), dots[t, v])

                def add(x, y, slot):
                    builder.store(e.fma(x, y, builder.load(slot)), slot)

                parts = {}
                for half in range(halves):
                    dots = {}
                    for t in range(nt):
                        # With this start the bits of a sum are a float32 (`first_sum`): no conversion is needed.
                        start = const_vector(i32x16, [first_sum()] * 16)
                        if not with_min:
                            start = e.splat_i32(e.offset(rows[t], first_at, 4 * half))
                            if smaller:
                                start = builder.ashr(start, ir.Constant(start.type, [smaller] * 16))
                        dots.update({(t, v): e.variable(start) for v in range(nv)})
                    with rounds(e) as i:
                        for j in range(groups * half, groups * half + per_round, at_once):
                            at = e.offset(e.times(i, 64 * per_round), header + 64 * j)
                            codes_at = [e.offset(p, at) for p in blocks]
                            multiply(dots, codes_at, e.offset(q, e.times(i, 4 * per_round), 4 * j))
                    scales, d = floats(64 * half), [e.splat_f32(e.offset(row, d_at)) for row in rows]
                    # What the start adds to a sum goes away in the multiplication by the scale, as its addend.
                    surplus = [builder.fmul(s, const_vector(f32x16, [-FIRST_SUM_F32] * 16)) for s in scales]
                    for t, v in pairs:
                        dot = builder.load(dots[t, v])
                        if from_bits:  # added per half, since no registers are left to keep the sums of one
                            part = e.fma(builder.bitcast(dot, llvm_type(f32x16)), scales[v], surplus[v])
                            add(part, d[t], acc[t, v])
                        else:
                            parts[t, v] = _plus(e, parts.get((t, v)), e.to_f32(dot), scales[v])
                for (t, v), part in parts.items():
                    add(part, d[t], acc[t, v])
                if with_min:
                    # The minimum of a block is the same for all its columns: it multiplies the sum of their
                    # activations.
                    s_at = sums_at if n_minima == 1 else s16_at
                    for half in range(n_minima):
                        minima = floats(64 * (halves + half))
                        sums = [e.splat_f32(e.offset(row, s_at, e.times(ib4, n_minima), 4 * half)) for row in rows]
                        for t, v in pairs:
                            add(minima[v], sums[t], acc[t, v])
            add_or_store(e, acc, outs, n_lanes, first)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return micro


def split_signs(e, codes):
    """Return magnitudes and signs (0 or -1) of codes with a bias of 128."""
    values = e.without_128(codes)
    signs = e.b.sext(e.b.icmp_signed("<", values, ir.Constant(values.type, None)), values.type)
    return e.b.sub(e.b.xor(values, signs), signs), signs


def add_negative(e, total, magnitudes, signs):
    """Return i32x16 + the magnitudes of negative codes, four bytes to a lane: see `has_signs`."""
    return e.dot(total, e.b.and_(magnitudes, signs), const_vector(i8x64, [1] * 64), 127)


def _plus(e, total, value, factor):
    """Return value * factor, added to the total if there is one."""
    return e.b.fmul(value, factor) if total is None else e.fma(value, factor, total)


def tile_scale(builder, x, with_signs=False):
    """Cut scales to 22 bits, as tiles hold them, so that their products with FIRST_SUM_F32 are exact."""
    if not (first_sum() or with_signs):
        return x
    ints = ir.VectorType(ir.IntType(32), x.type.count)
    return builder.bitcast(builder.and_(builder.bitcast(x, ints), ir.Constant(ints, [-4] * x.type.count)), x.type)


@functools.cache
def float_tile(nv, nt, pairs=False):
    """Return micro(tile, k, a, a_stride, out, out_stride, n_lanes, more): out[t] (+)= tile . a[t].

    more != 0 adds to the old value of `out` (later chunks of columns). n_lanes <= 16*nv rows are stored. `pairs`: tile
    and activations are bfloat16, k counts pairs of columns.
    """

    @intrinsic
    def micro(typingctx, tile, k, a, a_stride, out, out_stride, n_lanes, more):
        def codegen(context, builder, sig, args):
            tile, k, a, a_stride, out, out_stride, n_lanes, more = args
            e = Emitter(builder)
            rows = [e.opaque(e.offset(a, e.times(a_stride, t))) for t in range(nt)]
            acc = {(t, v): e.variable(e.zero(f32x16)) for t in range(nt) for v in range(nv)}
            outs = {(t, v): e.offset(out, e.times(out_stride, t), 64 * v) for t, v in acc}
            for at in outs.values():
                e.prefetch(at, write=True)
            with e.loop(k) as i:
                p, i4 = e.offset(tile, e.times(i, 64 * nv)), e.times(i, 4)
                # nv loads and nt broadcasts feed nv * nt products.
                w = [e.load(i32x16 if pairs else f32x16, e.offset(p, 64 * v)) for v in range(nv)]
                for t in range(nt):
                    x = (e.splat_i32 if pairs else e.splat_f32)(e.offset(rows[t], i4))
                    for v in range(nv):
                        old = builder.load(acc[t, v])
                        new = emit_dot_bf16(builder, old, w[v], x) if pairs else e.fma(w[v], x, old)
                        builder.store(new, acc[t, v])
            add_or_store(e, acc, outs, n_lanes, more)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return micro


@functools.cache
def pair_tile(nv, nt):
    """Return micro(tile, n_blocks, a, a_stride, out, out_stride, n_lanes, more): out[t] (+)= tile . a[t].

    Blocks have PAIRS_BLOCK columns; `a` points at their scales in the first of nt activation rows, integers follow.
    more != 0 adds to the old value of `out`. n_lanes <= 16*nv rows are stored.
    """
    steps, unrolled = PAIRS_BLOCK // 2 - 1, 7  # and a last step
    assert steps % unrolled == 0
    pairs = [(t, v) for t in range(nt) for v in range(nv)]

    @intrinsic
    def micro(typingctx, tile, n_blocks, a, a_stride, out, out_stride, n_lanes, more):
        def codegen(context, builder, sig, args):
            tile, n_blocks, a, a_stride, out, out_stride, n_lanes, more = args
            e = Emitter(builder)
            rows = [e.opaque(e.offset(a, e.times(a_stride, t))) for t in range(nt)]
            outs = {(t, v): e.offset(out, e.times(out_stride, t), 64 * v) for t, v in pairs}
            # Float sums stay in memory, hidden from LLVM, while registers hold the integer sums of a block.
            room = e.opaque(e.room(64 * len(pairs)))
            acc = {tv: e.offset(room, 64 * i) for i, tv in enumerate(pairs)}
            for at in acc.values():
                e.store(e.zero(f32x16), at)
            for at in outs.values():
                e.prefetch(at, write=True)
            with e.loop(n_blocks) as ib:
                header = e.offset(tile, e.times(ib, 64 * nv * (steps + 2)))
                first, a_first = e.offset(header, 64 * nv), e.offset(e.times(ib, 2 * PAIRS_BLOCK), 64)
                dots = {tv: e.variable(e.zero(i32x16)) for tv in pairs}

                def add(w, t, a_at):
                    x = e.splat_i32(e.offset(rows[t], a_at))
                    for v in range(nv):
                        builder.store(emit_dot_i16(builder, builder.load(dots[t, v]), w[v], x), dots[t, v])

                with e.loop(e.int(steps // unrolled)) as i:
                    for j in range(unrolled):
                        at = e.offset(first, e.times(i, 64 * nv * unrolled), 64 * nv * j)
                        w = [e.load(i32x16, e.offset(at, 64 * v)) for v in range(nv)]
                        for t in range(nt):
                            add(w, t, e.offset(a_first, e.times(i, 4 * unrolled), 4 * j))
                w = [e.load(i32x16, e.offset(first, 64 * nv * steps + 64 * v)) for v in range(nv)]
                scales = [e.load(f32x16, e.offset(header, 64 * v)) for v in range(nv)]
                for t in range(nt):  # while the sums of one row are scaled, another is multiplied
                    add(w, t, e.offset(a_first, 4 * steps))
                    d = e.splat_f32(e.offset(rows[t], e.times(ib, 4)))
                    for v in range(nv):
                        part = builder.fmul(e.to_f32(builder.load(dots[t, v])), scales[v])
                        e.store(e.fma(part, d, e.load(f32x16, acc[t, v])), acc[t, v])
            slots = {tv: e.variable(e.load(f32x16, at)) for tv, at in acc.items()}
            add_or_store(e, slots, outs, n_lanes, more)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return micro


def add_or_store(e, acc, outs, n_lanes, more):
    """Store sums (t, v) at their places; more != 0 adds the old values."""
    # Old values join finished sums, so that the prefetch has had time to fetch them.
    with e.b.if_then(e.b.icmp_signed("!=", more, e.int(0))):
        for tv, slot in acc.items():
            old = _load_first(e, outs[tv], e.offset(n_lanes, -16 * tv[1]))
            e.b.store(e.b.fadd(e.b.load(slot), old), slot)
    for tv, slot in acc.items():
        e.store_first(e.b.load(slot), outs[tv], e.offset(n_lanes, -16 * tv[1]))


def _load_first(e, address, n):
    """Load the first n lanes of 16 floats, zeros elsewhere; never read past them."""
    mask = e.b.icmp_signed(
        "<", vec.const_vector(i32x16, range(16)), vec.splat_value(e.b, i32x16, e.b.trunc(n, ir.IntType(32)))
    )
    t = vec.llvm_type(f32x16)
    args = [vec.pointer(e.b, address, t), ir.Constant(ir.IntType(32), 1), mask, e.zero(f32x16)]
    return vec.call_llvm(e.b, "llvm.masked.load.v16f32.p0", t, args)


@functools.cache
def unpack_float16(kind):
    """Return unpack(src, row_bytes, n_valid, dst, dst_stride): 16 rows x 16 columns of `kind` to f32 [column][row].

    Rows from n_valid on are read from the last valid row, so nothing outside the tensor is touched.
    """

    @intrinsic
    def unpack(typingctx, src, row_bytes, n_valid, dst, dst_stride):
        def codegen(context, builder, sig, args):
            src, row_bytes, n_valid, dst, dst_stride = args
            e = Emitter(builder)
            rows = [load_floats(e, kind, at) for at in row_addresses(e, src, row_bytes, n_valid)]
            for i, column in enumerate(transpose16(builder, rows)):
                e.store(column, e.offset(dst, e.times(dst_stride, i)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return unpack


def row_addresses(e, first, row_bytes, n):
    """Return the addresses of 16 rows; the last of n <= 16 rows is repeated."""
    last = e.offset(n, -1)
    indices = [e.b.select(e.b.icmp_signed("<", e.int(r), n), e.int(r), last) for r in range(16)]
    return [e.offset(first, e.b.mul(index, row_bytes)) for index in indices]


def load_floats(e, kind, address):
    """Load 16 floats of a stored kind as f32x16."""
    if kind == "f32":
        return e.load(f32x16, address)
    bits = e.b.load(vec.pointer(e.b, address, ir.VectorType(ir.IntType(16), 16)), align=1)
    return half_to_f32(e.b, bits) if kind == "f16" else bf16_to_f32(e.b, bits)
